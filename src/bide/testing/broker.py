"""A broker in memory, and clients of it."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from bide.amqp.url import BrokerUrl
from bide.client import Connecting, connect
from bide.duration import DueTimeLike
from bide.errors import InvalidInputError
from bide.memory.clock import VirtualClock
from bide.memory.host import DEFAULT_PREFETCH, VirtualHost
from bide.sync import SyncClient, connect_sync
from bide.testing.server import ServerConnection
from bide.testing.transport import MemoryTransport

AnyProtocol = TypeVar("AnyProtocol", bound=asyncio.Protocol)

DEFAULT_RELEASE: Final = (4, 3, 0)
RELEASES: Final = ((3, 10), (4, 0), (4, 3))
"""The releases whose rules are modelled."""


class MemoryBroker:
    """A broker that exists in this process only. Make it with :func:`broker`.

    Attributes:
        clock: its time, which clients count their delays by.
        release: the release of RabbitMQ whose rules it follows.
        url: what :func:`bide.connect` takes instead of an address.
    """

    def __init__(
        self,
        *,
        release: tuple[int, ...] = DEFAULT_RELEASE,
        start: DueTimeLike | None = None,
        dead_letter_prefetch: int = DEFAULT_PREFETCH,
    ) -> None:
        if release[:2] not in RELEASES:
            known = ", ".join(".".join(map(str, one)) for one in RELEASES)
            raise InvalidInputError(f"the release {release!r} is not modelled: give one of {known}, as in (4, 3)")
        self.release = release if len(release) > 2 else (*release, 0)
        self._lock = threading.RLock()
        self.clock = VirtualClock(start, guard=self._lock)
        self.url = BrokerUrl(hosts=(("memory", 5672),), heartbeat=0, network=_Memory(self))
        self._hosts: dict[str, VirtualHost] = {}
        self._prefetch = dead_letter_prefetch
        self._transports: list[MemoryTransport] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop_connections()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop_connections()

    def connect(self, *, vhost: str = "/", **options: Any) -> Connecting:
        """A client of this broker; see :func:`bide.connect` for the other options.

        Args:
            vhost: the virtual host, which is made if there is none.
        """
        return connect(replace(self.url, vhost=vhost), **options)

    def connect_sync(self, *, vhost: str = "/", **options: Any) -> SyncClient:
        """A client whose calls block; see :func:`bide.connect_sync` for the other options."""
        return connect_sync(replace(self.url, vhost=vhost), **options)

    def host(self, name: str = "/") -> VirtualHost:
        """A virtual host, with all that is in it; it is made if there is none."""
        with self._lock:
            found = self._hosts.get(name)
            if found is None:
                found = self._hosts[name] = VirtualHost(
                    name, self.clock, release=self.release, dead_letter_prefetch=self._prefetch
                )
            return found

    def drop_connections(self) -> None:
        """Cut all connections, as a network that fails does. Clients that are still open connect again."""
        transports, self._transports = self._transports, []
        for one in transports:
            one.abort()

    def open(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
        """Connect a protocol to this broker."""
        transport = MemoryTransport(loop, protocol)
        self._transports = [one for one in self._transports if not one.is_closing()] + [transport]
        transport.open(lambda end: ServerConnection(end, host=self.host, release=self.release, lock=self._lock))


class _Memory:
    """The way to one broker in memory; see :class:`bide.amqp.network.Network`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    async def connect(
        self,
        factory: Callable[[], AnyProtocol],
        host: str,
        port: int,
        *,
        loop: asyncio.AbstractEventLoop,
        context: ssl.SSLContext | None,
    ) -> AnyProtocol:
        protocol = factory()
        self._broker.open(loop, protocol)
        return protocol

    def now(self) -> datetime:
        return self._broker.clock.now()


def broker(
    *,
    release: tuple[int, ...] = DEFAULT_RELEASE,
    start: DueTimeLike | None = None,
    dead_letter_prefetch: int = DEFAULT_PREFETCH,
) -> MemoryBroker:
    """A broker in memory: ``async with bide.testing.broker() as b``, or ``with``.

    Args:
        release: whose rules it follows: 3.10, 4.0 or 4.3.
        start: what its clock shows at first; the beginning of 2030 if None.
        dead_letter_prefetch: dead letters that a queue has under way at a time, where it dead-letters at least once.

    Raises:
        InvalidInputError: another release.
        InvalidDueTimeError: the start has no time zone.
    """
    return MemoryBroker(release=release, start=start, dead_letter_prefetch=dead_letter_prefetch)
