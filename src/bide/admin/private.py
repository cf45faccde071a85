"""The private broker behind an AMQP URL, where there is one: more can be asked of it than of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bide.amqp.url import BrokerUrl
from bide.errors import LocalBrokerError

if TYPE_CHECKING:
    from bide.local_broker import LocalBroker

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def private_broker(url: BrokerUrl) -> LocalBroker | None:
    """The broker that ``bide broker start`` started, if it is the one that this URL leads to."""
    ports = {port for host, port in url.hosts if host in _LOOPBACK}
    if not ports:
        return None
    from bide.local_broker import find_running

    try:
        broker = find_running()
        if broker is None:
            return None
        ((_, port),) = BrokerUrl.parse(broker.url).hosts
    except (LocalBrokerError, OSError):
        # It is just stopping, or its folder is another user's.
        return None
    return broker if port in ports else None
