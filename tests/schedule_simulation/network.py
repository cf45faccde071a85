"""The network between simulated processes and the broker in memory."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from datetime import datetime, timedelta
from typing import Any, TypeVar

from bide.amqp.transport import TCP
from bide.amqp.url import BrokerUrl
from bide.testing import MemoryBroker
from bide.testing.transport import MemoryTransport

AnyProtocol = TypeVar("AnyProtocol", bound=asyncio.Protocol)


class Link(MemoryTransport):
    """A connection that takes its time, and that can break.

    What was on its way to the broker when it breaks may still arrive, up to half a minute later and behind what others
    sent meanwhile: a prefix of it, as with TCP.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        protocol: asyncio.Protocol,
        rng: random.Random,
        latency: float,
        on_write: Callable[[bytes], None],
    ) -> None:
        super().__init__(loop, protocol)
        self._rng = rng
        self._latency = latency
        self._on_write = on_write
        self._context = copy_context()
        self._to_broker = _Pipe(loop, self._arrive, None)
        self._to_client = _Pipe(loop, super().deliver, self._context)
        self.is_broken = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Send to the broker."""
        if not self.is_closing() and not self.is_broken:
            sent = bytes(data)
            self._to_broker.put(sent, self._delay())
            self._on_write(sent)

    def deliver(self, data: bytes) -> None:
        """Send to the client."""
        if not self.is_broken:
            self._to_client.put(data, self._delay())

    def close(self) -> None:
        """Close the connection behind what was written."""
        if self.is_broken or self.is_closing():
            super().close()
        else:
            self._to_broker.put(None, self._delay())
            self._is_closing = True

    def abort(self) -> None:
        """Close the connection, and drop what was written."""
        self.cut()

    def cut(self, *, is_late: bool = False) -> None:
        """Break the connection.

        Args:
            is_late: whether everything that is on its way still arrives.
        """
        if self.is_broken:
            return
        self.is_broken = True
        self._to_client.drop()
        rng = self._rng
        kept = 1000 if is_late else rng.choice((0, 0, 1, 3, 10, 1000))
        self._to_broker.keep(kept, rng.choice((0.0, 0.01, 0.5, 3.0, 30.0)))
        self._loop.call_later(rng.choice((0.0, 0.0, 0.05, 1.0)), self._lose, context=self._context)

    def _delay(self) -> float:
        rng = self._rng
        if not self._latency:
            return 0.0
        return self._latency * rng.random() + (rng.random() < 0.002) * rng.random() * 0.5

    def _arrive(self, data: bytes | None) -> None:
        if self._server is None:
            return
        if data is not None:
            self._server.received(data)
            return
        server, self._server = self._server, None
        server.lost()
        if not self.is_broken:
            self.is_broken = True
            self._lose()

    def _lose(self) -> None:
        self._is_closing = True
        self._protocol.connection_lost(None)

    def _call(self, callback: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon(callback, context=self._context)


class _Pipe:
    """One direction: what is put in comes out in order. None is the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, arrive: Callable[[Any], None], context: Context | None) -> None:
        self._loop = loop
        self._arrive = arrive
        self._context = Context() if context is None else context
        self._waiting = deque[tuple[float, bytes | None]]()
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, data: bytes | None, delay: float) -> None:
        self._last = max(self._last, self._loop.time() + delay)
        self._waiting.append((self._last, data))
        self._wait()

    def drop(self) -> None:
        """Lose what is on its way."""
        self._waiting.clear()

    def keep(self, count: int, delay: float) -> None:
        """Let only a part arrive, later, and then the end."""
        at = self._loop.time() + delay
        kept = [one for one in list(self._waiting)[:count] if one[1] is not None]
        self._waiting = deque([*((max(when, at), data) for when, data in kept), (at, None)])
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wait()

    def _wait(self) -> None:
        if self._waiting and self._timer is None and not self._loop.is_closed():
            self._timer = self._loop.call_at(self._waiting[0][0], self._come, context=self._context)

    def _come(self) -> None:
        self._timer = None
        now = self._loop.time() + 1e-7
        while self._waiting and self._waiting[0][0] <= now:
            self._arrive(self._waiting.popleft()[1])
        self._wait()


class Network:
    """The network and the clocks of one process; see :class:`bide.amqp.transport.Transport`.

    Attributes:
        is_dead: whether the process was killed.
        clock_error: seconds by which the wall clock of the process is wrong.
        on_write: called with what the process sends.
    """

    def __init__(self, broker: MemoryBroker, rng: random.Random, latency: float) -> None:
        self._broker = broker
        self._rng = rng
        self._latency = latency
        self._links: list[Link] = []
        self.is_dead = False
        self.clock_error = 0.0
        self.on_write: Callable[[bytes], None] = lambda _: None
        self.url = BrokerUrl(hosts=(("memory", 5672),), heartbeat=0, transport=self)

    async def connect(
        self, factory: Callable[[], AnyProtocol], host: str, port: int, *, loop: asyncio.AbstractEventLoop, context: Any
    ) -> AnyProtocol:
        """Open a link."""
        await asyncio.sleep(self._latency * self._rng.random())  # in virtual time
        if self.is_dead:
            raise ConnectionRefusedError("the process is dead")
        protocol = factory()
        link = Link(loop, protocol, self._rng, self._latency, lambda data: self.on_write(data))
        self._links = [*(one for one in self._links if not one.is_broken), link]
        link.open(self._broker.accept)
        return protocol

    def cut(self, *, is_late: bool = False) -> None:
        """Break all links."""
        for one in self._links:
            one.cut(is_late=is_late)

    def kill(self) -> None:
        """Break all links for good."""
        self.is_dead = True
        self.cut()

    def now(self) -> datetime:
        """The wall clock of the process."""
        return self._broker.clock.now() + timedelta(seconds=self.clock_error)

    async def wait(self, event: asyncio.Event, seconds: float, *, due: float | None = None) -> None:
        """Wait by the event loop, whose time is virtual."""
        await TCP.wait(event, seconds, due=due)

    def monotonic(self) -> float:
        """The monotonic clock of the machine."""
        return self._broker.clock.microseconds / 1_000_000
