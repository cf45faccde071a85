"""The management API and the stream port of the broker behind an AMQP URL."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from bide.amqp.transport import TCP
from bide.amqp.url import BrokerUrl
from bide.errors import InvalidUrlError, LocalBrokerError, ManagementApiError
from bide.management.api import ManagementApi
from bide.management.endpoint import MANAGEMENT_VARIABLE, PORTS, ManagementEndpoint, endpoint_at, parse_management_url

if TYPE_CHECKING:
    from bide.local_broker import LocalBroker

STREAM_PORT_VARIABLE: Final = "BIDE_STREAM_PORT"

URL_VARIABLE: Final = "BIDE_URL"

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})

_HIGHEST: Final = 65_535


def stream_port(url: str, environment: Mapping[str, str]) -> int | None:
    """The port that ``BIDE_STREAM_PORT`` names, or that of the broker which ``bide broker start`` started.

    Args:
        url: the broker's. If ``BIDE_URL`` names another broker, the variable is that one's, and not heeded.

    Returns:
        None where there is neither: it is the usual one.

    Raises:
        InvalidUrlError: the URL cannot be read, or the variable is not a port; or it is one, and ``BIDE_URL``, whose
            broker it belongs to, cannot be read.
    """
    broker = BrokerUrl.parse(url)
    if given := of_environment(STREAM_PORT_VARIABLE, broker, environment):
        if not re.fullmatch("[0-9]{1,9}", given) or not 1 <= int(given) <= _HIGHEST:
            raise InvalidUrlError(f"{STREAM_PORT_VARIABLE} is {given!r}: give a port, from 1 to {_HIGHEST:,}")
        return int(given)
    private = private_broker(broker)
    return None if private is None else private.stream_port


def management_api(
    url: BrokerUrl, management_url: str | None = None, *, environment: Mapping[str, str] | None = None
) -> ManagementApi:
    """The management API that belongs to an AMQP URL.

    Its address is ``management_url``, or that of ``BIDE_MANAGEMENT_URL`` (unless ``BIDE_URL`` names another broker
    than this), or that of the private broker which serves the URL, or the URL's own hosts with RabbitMQ's default
    port. A user that it does not name is the URL's.

    Args:
        url: of the broker.
        management_url: ``http[s]://user:password@host:port``.
        environment: by default that of the process.

    Raises:
        InvalidUrlError: the management URL cannot be read; the message never shows the password.
        ManagementApiError: it is the URL of a broker in memory, which has none.
    """
    return ManagementApi(*endpoints(url, management_url, os.environ if environment is None else environment))


def endpoints(url: BrokerUrl, management_url: str | None, environment: Mapping[str, str]) -> list[ManagementEndpoint]:
    """Where the management API of the broker of an AMQP URL may be; see :func:`management_api`.

    Raises:
        InvalidUrlError: the management URL cannot be read.
        ManagementApiError: it is the URL of a broker in memory, which has none.
    """
    if url.transport is not TCP:
        raise ManagementApiError("a broker in memory has no management API: use a real broker for what needs it")
    if given := management_url or of_environment(MANAGEMENT_VARIABLE, url, environment):
        return [parse_management_url(given, url)]
    if broker := private_broker(url):
        return [parse_management_url(broker.management_url, url)]
    scheme = "https" if url.tls else "http"
    hosts = dict.fromkeys(host for host, _ in url.hosts)
    return [endpoint_at(url, scheme, host, PORTS[scheme]) for host in hosts]


def of_environment(variable: str, url: BrokerUrl, environment: Mapping[str, str]) -> str | None:
    """A variable of the environment about a broker, where it is about this one.

    They belong together: who names another broker by ``BIDE_URL`` means that one by the others too.

    Raises:
        InvalidUrlError: it is set, and ``BIDE_URL``, which has to tell whose it is, cannot be read.
    """
    found = environment.get(variable)
    if not found:
        # Then it is of no matter what BIDE_URL says: this broker was named in another way.
        return None
    if other := environment.get(URL_VARIABLE):
        try:
            hosts = BrokerUrl.parse(other).hosts
        except InvalidUrlError as error:
            raise InvalidUrlError(
                f"{URL_VARIABLE} names the broker that {variable} belongs to, and cannot be read: {error}"
            ) from error
        if hosts != url.hosts:
            return None
    return found


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
