"""The management API and the stream port of the broker behind an AMQP URL."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bide.amqp.transport import TCP
from bide.amqp.url import BrokerUrl
from bide.errors import InvalidUrlError, LocalBrokerError, ManagementApiError
from bide.management.api import ManagementApi
from bide.management.endpoint import MANAGEMENT_VARIABLE, PORTS, ManagementEndpoint, endpoint_at, parse_management_url

if TYPE_CHECKING:
    from bide.local_broker import LocalBroker, LocalCluster

STREAM_PORT_VARIABLE: Final = "BIDE_STREAM_PORT"
"""Port of the stream protocol on the broker of ``BIDE_URL``. The default is 5552, or 5551 with TLS."""

URL_VARIABLE: Final = "BIDE_URL"

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})

_MAX_PORT: Final = 65_535


def stream_port(url: str, environment: Mapping[str, str]) -> int | None:
    """The port in ``BIDE_STREAM_PORT``, or the stream port of the broker that ``bide broker start`` started.

    Args:
        url: the broker's URL. If ``BIDE_URL`` names another broker, the variable belongs to that one and is ignored.

    Returns:
        None if neither exists: RabbitMQ's default port applies.

    Raises:
        InvalidUrlError: the URL is invalid; or the variable is set, and is not a port, or ``BIDE_URL`` is invalid.
    """
    broker = BrokerUrl.parse(url)
    if given := of_environment(STREAM_PORT_VARIABLE, broker, environment):
        if not re.fullmatch("[0-9]{1,9}", given) or not 1 <= int(given) <= _MAX_PORT:
            raise InvalidUrlError(f"{STREAM_PORT_VARIABLE} is {given!r}: give a port, from 1 to {_MAX_PORT:,}")
        return int(given)
    private = private_broker(broker)
    return None if private is None else private.stream_port


def management_api(
    url: BrokerUrl, management_url: str | None = None, *, environment: Mapping[str, str] | None = None
) -> ManagementApi:
    """The management API of the broker behind an AMQP URL.

    Its address is the first of these: ``management_url``; ``BIDE_MANAGEMENT_URL``, unless ``BIDE_URL`` names another
    broker; the management URL of the private broker behind the AMQP URL; the hosts of the AMQP URL with RabbitMQ's
    default port. If the address has no user, the user of the AMQP URL is used.

    Args:
        url: the URL of the broker.
        management_url: ``http[s]://user:password@host:port``.
        environment: environment variables; by default those of the process.

    Raises:
        InvalidUrlError: the management URL cannot be read; the error never shows the password.
        ManagementApiError: the URL is that of an in-memory broker, which has no management API.
    """
    return ManagementApi(*endpoints(url, management_url, os.environ if environment is None else environment))


def endpoints(url: BrokerUrl, management_url: str | None, environment: Mapping[str, str]) -> list[ManagementEndpoint]:
    """The possible addresses of a broker's management API; see :func:`management_api`.

    Raises:
        InvalidUrlError: the management URL cannot be read.
        ManagementApiError: the URL is that of an in-memory broker, which has no management API.
    """
    if url.transport is not TCP:
        raise ManagementApiError("the in-memory broker has no management API: use a real broker")
    if management_url:
        return [parse_management_url(management_url, url)]
    if given := of_environment(MANAGEMENT_VARIABLE, url, environment):
        return [replace(parse_management_url(given, url), variable=MANAGEMENT_VARIABLE)]
    if broker := private_broker(url):
        return [parse_management_url(broker.management_url, url)]
    scheme = "https" if url.tls else "http"
    hosts = dict.fromkeys(host for host, _ in url.hosts)
    return [endpoint_at(url, scheme, host, PORTS[scheme]) for host in hosts]


def of_environment(variable: str, url: BrokerUrl, environment: Mapping[str, str]) -> str | None:
    """The value of an environment variable that describes the broker of ``BIDE_URL``.

    Returns:
        None if the variable is not set, or ``BIDE_URL`` names another broker than *url*.

    Raises:
        InvalidUrlError: the variable is set, and ``BIDE_URL`` is invalid.
    """
    found = environment.get(variable)
    if not found:
        # BIDE_URL is not parsed, because it may be unused and invalid.
        return None
    if other := environment.get(URL_VARIABLE):
        try:
            hosts = BrokerUrl.parse(other).hosts
        except InvalidUrlError as error:
            raise InvalidUrlError(
                f"{variable} belongs to the broker of {URL_VARIABLE}, but {URL_VARIABLE} cannot be read: {error}"
            ) from error
        if hosts != url.hosts:
            return None
    return found


def private_broker(url: BrokerUrl) -> LocalBroker | LocalCluster | None:
    """The broker or cluster that ``bide broker start`` started, if this URL leads to it; otherwise None."""
    ports = {port for host, port in url.hosts if host in _LOOPBACK}
    if not ports:
        return None
    from bide.local_broker import find_running

    try:
        broker = find_running()
        if broker is None:
            return None
        found = {port for _, port in BrokerUrl.parse(broker.url).hosts}
    except (LocalBrokerError, OSError):
        # The broker is stopping, or its folder belongs to another user.
        return None
    return broker if ports & found else None
