"""The broker in memory, and connections of clients to it."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from math import ceil
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from bide.amqp.url import BrokerUrl
from bide.client.client import Connecting, connect
from bide.client.sync import SyncClient, connect_sync
from bide.durations import DelayLike, DueTimeLike, parse_delay
from bide.errors import InvalidInputError
from bide.runtime.arguments import whole_number
from bide.testing.amqp_server import ServerConnection
from bide.testing.rules.clock import VirtualClock
from bide.testing.rules.virtual_host import DEFAULT_PREFETCH, VirtualHost
from bide.testing.transport import MemoryTransport

if TYPE_CHECKING:
    from bide.testing.memory_gate import MemoryGate

AnyProtocol = TypeVar("AnyProtocol", bound=asyncio.Protocol)

DEFAULT_RELEASE: Final = (4, 3, 0)
RELEASES: Final = ((3, 10), (4, 0), (4, 3))
"""The releases whose rules are modelled."""

DEFAULT_TIMEOUT: Final = timedelta(seconds=1)

_QUIET_TURNS: Final = 25
"""Turns of the event loop without sent data after which clients count as idle. A client's reaction takes a few."""

_POLL_INTERVAL: Final = 0.001
"""Seconds between two checks for unsettled messages."""


class MemoryBroker:
    """A broker in this process. Create it with :func:`broker`.

    Attributes:
        clock: the broker's clock, which clients use for delays.
        release: the release of RabbitMQ whose rules the broker follows.
        url: the URL to pass to :func:`bide.connect`.
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
        self.url = BrokerUrl(hosts=(("memory", 5672),), heartbeat=0, transport=_MemoryNetwork(self))
        self._hosts: dict[str, VirtualHost] = {}
        self._prefetch = whole_number("dead_letter_prefetch", dead_letter_prefetch, 1, 2**31)
        self._connections: list[ServerConnection] = []
        self._timed_out: set[tuple[int, int]] = set()

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
        """Connect a client to this broker; see :func:`bide.connect` for the options.

        Args:
            vhost: the virtual host, which is created if it does not exist.
        """
        return connect(replace(self.url, vhost=vhost), **options)

    def connect_sync(self, *, vhost: str = "/", **options: Any) -> SyncClient:
        """Connect a blocking client; see :func:`bide.connect_sync` for the options."""
        return connect_sync(replace(self.url, vhost=vhost), **options)

    def gate(self, *, vhost: str = "/", allow: Iterable[str] = ("*",), **options: Any) -> MemoryGate:
        """A gate that delivers schedules by :attr:`clock`: ``async with b.gate(): ...``, or ``with``.

        Args:
            vhost: the virtual host, which is created if it does not exist.
            allow: the targets that messages may have; see :class:`bide.Gate` for this and other options.
        """
        # Imported here: SQLite is not needed by other tests.
        from bide.testing.memory_gate import MemoryGate

        return MemoryGate(replace(self.url, vhost=vhost), allow=allow, **options)

    def host(self, name: str = "/") -> VirtualHost:
        """A virtual host by name, which is created if it does not exist."""
        with self._lock:
            found = self._hosts.get(name)
            if found is None:
                found = self._hosts[name] = VirtualHost(
                    name, self.clock, release=self.release, dead_letter_prefetch=self._prefetch
                )
            return found

    async def run(self, delay: DelayLike, *, timeout: DelayLike = DEFAULT_TIMEOUT) -> None:  # noqa: ASYNC109 (real time)
        """Let time pass, and let clients react to each event at its time.

        ``clock.advance`` moves the clock in one step, so consumers see messages that became due on the way only
        afterwards. This method stops the clock at each event until everything is :meth:`settled`. So if an endpoint
        retries a message in five seconds and then in an hour, both attempts happen at these times.

        Args:
            delay: how much time passes.
            timeout: see :meth:`settled`.

        Raises:
            InvalidDelayError: *delay* or *timeout* is negative or malformed.
        """
        end = self.clock.now() + parse_delay(delay)
        await self.settled(timeout=timeout)
        while (due := self.clock.next_due) is not None and due < end:
            self.clock.advance_to(max(due, self.clock.now()))
            await self.settled(timeout=timeout)
        self.clock.advance_to(end)
        await self.settled(timeout=timeout)

    async def settled(self, *, timeout: DelayLike = DEFAULT_TIMEOUT) -> None:  # noqa: ASYNC109 (real time)
        """Wait, in real time, until the broker and its clients are idle and all deliveries are settled.

        Args:
            timeout: how long to wait for unsettled messages, for example those whose handlers run in threads. Later
                calls do not wait again for messages that were unsettled at the end of that time.

        Raises:
            InvalidDelayError: *timeout* is negative or malformed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + parse_delay(timeout).total_seconds()
        while True:
            await self._quiet()
            unsettled = self._unsettled()
            self._timed_out &= unsettled
            if not unsettled - self._timed_out:
                return
            if loop.time() >= deadline:
                self._timed_out |= unsettled
                return
            # User code works on these messages, and no event reports when it ends.
            await asyncio.sleep(_POLL_INTERVAL)

    async def _quiet(self) -> None:
        """Run the event loop until nothing has been sent for several turns."""
        turns = 0
        while turns < _QUIET_TURNS:
            before = sum(one.sent for one in self._connections)
            await asyncio.sleep(0)
            turns = turns + 1 if sum(one.sent for one in self._connections) == before else 0

    def _unsettled(self) -> set[tuple[int, int]]:
        with self._lock:
            return {key for one in self._connections for key in one.unsettled()}

    def drop_connections(self) -> None:
        """Close all connections, like a network failure. Open clients connect again."""
        connections, self._connections = self._connections, []
        for one in connections:
            one.cut()

    def open(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
        """Connect a protocol to this broker."""
        MemoryTransport(loop, protocol).open(self.accept)

    def accept(self, transport: MemoryTransport) -> ServerConnection:
        """Take a connection."""
        connection = ServerConnection(transport, host=self.host, release=self.release, lock=self._lock)
        self._connections = [*(one for one in self._connections if not one.is_closed), connection]
        return connection


def _is_modelled(release: object) -> bool:
    return isinstance(release, tuple) and release[:2] in RELEASES


class _MemoryNetwork:
    """The transport to a broker in memory; see :class:`bide.amqp.transport.Transport`."""

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

    async def wait(self, event: asyncio.Event, seconds: float, *, due: float | None = None) -> None:
        loop, clock = asyncio.get_running_loop(), self._broker.clock

        def wake() -> None:
            # The clock can be advanced in another thread. A closed event loop waits for nothing any more.
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

        timers = [clock.call_at(clock.microseconds + round(seconds * 1_000_000), wake, is_upkeep=True)]
        if due is not None:
            # Rounded up, because a caller that is woken just before the due time would wait again, without end.
            timers.append(clock.call_at(clock.microseconds + ceil(due * 1_000_000), wake))
        try:
            await event.wait()
        finally:
            for one in timers:
                one.cancel()


def broker(
    *,
    release: tuple[int, ...] = DEFAULT_RELEASE,
    start: DueTimeLike | None = None,
    dead_letter_prefetch: int = DEFAULT_PREFETCH,
) -> MemoryBroker:
    """Create a broker in memory: ``async with bide.testing.broker() as b``, or ``with``.

    Args:
        release: the release of RabbitMQ whose rules the broker follows: 3.10, 4.0 or 4.3.
        start: the initial time of its clock; the beginning of 2030 if None.
        dead_letter_prefetch: maximum number of unconfirmed dead letters of a queue that dead-letters at least once.

    Raises:
        InvalidInputError: the release is not modelled, or *dead_letter_prefetch* is invalid.
        InvalidDueTimeError: *start* has no time zone.
    """
    return MemoryBroker(release=release, start=start, dead_letter_prefetch=dead_letter_prefetch)
