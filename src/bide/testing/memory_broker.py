"""A broker in memory, and clients of it."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from bide.amqp.url import BrokerUrl
from bide.arguments import whole_number
from bide.client.client import Connecting, connect
from bide.client.sync import SyncClient, connect_sync
from bide.durations import DelayLike, DueTimeLike, parse_delay
from bide.errors import InvalidInputError
from bide.testing.amqp_server import ServerConnection
from bide.testing.rules.clock import VirtualClock
from bide.testing.rules.virtual_host import DEFAULT_PREFETCH, VirtualHost
from bide.testing.transport import MemoryTransport

AnyProtocol = TypeVar("AnyProtocol", bound=asyncio.Protocol)

DEFAULT_RELEASE: Final = (4, 3, 0)
RELEASES: Final = ((3, 10), (4, 0), (4, 3))
"""The releases whose rules are modelled."""

DEFAULT_PATIENCE: Final = timedelta(seconds=1)

_QUIET_TURNS: Final = 25
"""Turns of the event loop without a word: what a client does at once takes a few."""

_LOOK_AGAIN: Final = 0.001
"""Seconds between two looks at what clients have in hand."""


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
        if not _is_modelled(release):
            known = ", ".join(".".join(map(str, one)) for one in RELEASES)
            raise InvalidInputError(f"the release {release!r} is not modelled: give one of {known}, as in (4, 3)")
        self.release = release if len(release) > 2 else (*release, 0)
        self._lock = threading.RLock()
        self.clock = VirtualClock(start, guard=self._lock)
        self.url = BrokerUrl(hosts=(("memory", 5672),), heartbeat=0, transport=_Memory(self))
        self._hosts: dict[str, VirtualHost] = {}
        self._prefetch = whole_number("dead_letter_prefetch", dead_letter_prefetch, 1, 2**31)
        self._connections: list[ServerConnection] = []
        self._given_up: set[tuple[int, int]] = set()

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

    async def run(self, delay: DelayLike, *, patience: DelayLike = DEFAULT_PATIENCE) -> None:
        """Let time pass, and clients act on what happens when it happens.

        ``clock.advance`` moves the clock in one go: a consumer sees what came meanwhile only afterwards. Here the clock
        stops whenever something happens, until everything is :meth:`settled`. So a message that an endpoint retries in
        five seconds, and then in an hour, is handled at these times.

        Args:
            delay: how much time.
            patience: see :meth:`settled`.

        Raises:
            InvalidDelayError: a time is negative, or cannot be read.
        """
        end = self.clock.now() + parse_delay(delay)
        await self.settled(patience=patience)
        while (due := self.clock.next_due) is not None and due < end:
            self.clock.advance_to(max(due, self.clock.now()))
            await self.settled(patience=patience)
        self.clock.advance_to(end)
        await self.settled(patience=patience)

    async def settled(self, *, patience: DelayLike = DEFAULT_PATIENCE) -> None:
        """Wait, in real time, until the broker and its clients have nothing to say to each other at the moment.

        Args:
            patience: how long to wait for messages that clients have in hand, such as those that handlers work on in
                threads. What is still in hand then is not waited for again.

        Raises:
            InvalidDelayError: the patience is negative, or cannot be read.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + parse_delay(patience).total_seconds()
        while True:
            await self._quiet()
            in_hand = self._in_hand()
            self._given_up &= in_hand
            if not in_hand - self._given_up:
                return
            if loop.time() >= deadline:
                self._given_up |= in_hand
                return
            # Somebody else's code has them: there is nothing to be told by.
            await asyncio.sleep(_LOOK_AGAIN)

    async def _quiet(self) -> None:
        """Let the event loop turn until nothing was sent for a while."""
        turns = 0
        while turns < _QUIET_TURNS:
            before = sum(one.sent for one in self._connections)
            await asyncio.sleep(0)
            turns = turns + 1 if sum(one.sent for one in self._connections) == before else 0

    def _in_hand(self) -> set[tuple[int, int]]:
        with self._lock:
            return {key for one in self._connections for key in one.in_hand()}

    def drop_connections(self) -> None:
        """Cut all connections, as a network that fails does. Clients that are still open connect again."""
        connections, self._connections = self._connections, []
        for one in connections:
            one.cut()

    def open(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
        """Connect a protocol to this broker."""

        def accept(transport: MemoryTransport) -> ServerConnection:
            connection = ServerConnection(transport, host=self.host, release=self.release, lock=self._lock)
            self._connections = [*(one for one in self._connections if not one.is_closed), connection]
            return connection

        MemoryTransport(loop, protocol).open(accept)


def _is_modelled(release: object) -> bool:
    return isinstance(release, tuple) and release[:2] in RELEASES


class _Memory:
    """The way to one broker in memory; see :class:`bide.amqp.transport.Transport`."""

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

    def monotonic(self) -> float:
        return self._broker.clock.microseconds / 1_000_000


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
        InvalidInputError: another release; no whole number of dead letters.
        InvalidDueTimeError: the start has no time zone.
    """
    return MemoryBroker(release=release, start=start, dead_letter_prefetch=dead_letter_prefetch)
