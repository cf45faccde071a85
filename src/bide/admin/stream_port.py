"""The port of a broker's stream protocol, where nobody names it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from bide.admin.management_address import of_environment
from bide.admin.private import private_broker
from bide.amqp.url import BrokerUrl
from bide.errors import InvalidUrlError

STREAM_PORT_VARIABLE: Final = "BIDE_STREAM_PORT"

_HIGHEST: Final = 65_535


def stream_port(url: str, environment: Mapping[str, str]) -> int | None:
    """The port that ``BIDE_STREAM_PORT`` names, or that of the broker which ``bide broker start`` started.

    Args:
        url: the broker's. If ``BIDE_URL`` names another broker, the variable is that one's, and not heeded.

    Returns:
        None where there is neither: it is the usual one.

    Raises:
        InvalidUrlError: the URL cannot be read, or the variable is no port; or it is one, and ``BIDE_URL``, which has
            to tell whose, cannot be read.
    """
    broker = BrokerUrl.parse(url)
    if given := of_environment(STREAM_PORT_VARIABLE, broker, environment):
        if not re.fullmatch("[0-9]{1,9}", given) or not 1 <= int(given) <= _HIGHEST:
            raise InvalidUrlError(f"{STREAM_PORT_VARIABLE} is {given!r}: give a port, from 1 to {_HIGHEST:,}")
        return int(given)
    private = private_broker(broker)
    return None if private is None else private.stream_port
