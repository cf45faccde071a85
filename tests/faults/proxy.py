"""TCP proxies, and one for AMQP that breaks connections at a chosen byte or frame."""

from __future__ import annotations

import asyncio
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit, urlunsplit

PUBLISH = (60, 40)
CONSUME = (60, 20)
QUEUE_DECLARE = (50, 10)
QUEUE_BIND = (50, 20)
ACK = (60, 80)
NACK = (60, 120)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
"""The two directions of a connection."""

_HEAD = struct.Struct(">BHI")
_METHOD = struct.Struct(">HH")


def without_confirms(data: bytes) -> bytes:
    """Remove confirms and refusals from the broker's frames; for ``Proxy.rewrite``, which gets whole frames."""
    kept = b""
    while len(data) >= _HEAD.size:
        end = _HEAD.size + _HEAD.unpack_from(data)[2] + 1
        frame, data = data[:end], data[end:]
        if not (frame[0] == 1 and _METHOD.unpack_from(frame, 7) in (ACK, NACK)):
            kept += frame
    return kept + data


def whole_frames(data: bytes) -> tuple[bytes, bytes]:
    """The whole frames in what the broker says, and the beginning of the one that is not all there yet."""
    end = 0
    while len(data) >= end + _HEAD.size:
        following = end + _HEAD.size + _HEAD.unpack_from(data, end)[2] + 1
        if following > len(data):
            break
        end = following
    return data[:end], data[end:]


def url_of(*proxies: Proxy) -> str:
    """The URL with several proxies as its hosts, tried in this order."""
    first, *others = (urlsplit(one.url) for one in proxies)
    hosts = ",".join([first.netloc, *(one.netloc.rpartition("@")[2] for one in others)])
    return urlunsplit(first._replace(netloc=hosts, query="order=given"))


class TcpProxy(ABC):
    """Accepts connections, and opens one to the broker for each.

    Attributes:
        moving: unset while nothing passes in either direction, though all connections stand.
        deaf: while set, what the broker answers is thrown away.
        refusing: while set, new connections are closed at once.
        accepted: how many connections there were.
        cuts: how many the proxy broke.
    """

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: set[asyncio.StreamWriter] = set()
        self.moving = asyncio.Event()
        self.moving.set()
        self.deaf = False
        self.refusing = False
        self.accepted = 0
        self.cuts = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.moving.set()
        while self._tasks:
            self.cut()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        """The broker's URL, by way of the proxy."""
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        credentials = self._parts.netloc.rpartition("@")[0]
        return urlunsplit(self._parts._replace(netloc=f"{credentials}@127.0.0.1:{port}"))

    def cut(self) -> None:
        """Break all connections, without a goodbye."""
        for writer in self._accepting:
            writer.transport.abort()

    def stall(self) -> None:
        """Let nothing pass from now on, though all connections stand."""
        self.moving.clear()

    def resume(self) -> None:
        """Let everything pass again, first what was held up."""
        self.moving.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.refusing:
            writer.transport.abort()
            return
        assert self._parts.hostname
        assert self._parts.port
        accepting = asyncio.current_task()
        assert accepting is not None
        self._keep(accepting)
        self._accepting.add(writer)
        try:
            broker = await asyncio.open_connection(self._parts.hostname, self._parts.port)
        finally:
            self._accepting.discard(writer)
        if writer.transport.is_closing():
            # It was cut meanwhile.
            broker[1].transport.abort()
            return
        self._connected((reader, writer), broker)

    @abstractmethod
    def _connected(self, client: Streams, broker: Streams) -> None:
        """Begin to pass on what a client and the broker send."""

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Proxy(TcpProxy):
    """Stands between clients and a broker.

    Attributes:
        budget: called for every new connection; returns the bytes from the client until it breaks, None: never.
        on_method: what to do when a client sends this method for the next time, once: cut the connection before the
            frame, in the middle of it, or let it pass and throw away what the broker answers from then on.
        rewrite: changes what the broker says, in whole frames.
        rate: maximum bytes per second in each direction; None: unlimited.
        lag: seconds by which the broker's answers are held up.
        sent: bytes that clients have sent so far.
        methods: how often clients have sent each method.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._pairs: set[_Pair] = set()
        self.budget: Callable[[], int | None] = lambda: None
        self.on_method: dict[tuple[int, int], Literal["before", "inside", "deaf"]] = {}
        self.rewrite: Callable[[bytes], bytes] = bytes
        self.rate: int | None = None
        self.lag = 0.0
        self.sent = 0
        self.methods: Counter[tuple[int, int]] = Counter()

    def cut(self) -> None:
        """See :meth:`TcpProxy.cut`."""
        super().cut()
        for pair in list(self._pairs):
            self.cut_one(pair)

    def cut_one(self, pair: _Pair) -> None:
        """Break one connection."""
        if pair in self._pairs:
            self._pairs.discard(pair)
            self.cuts += 1
            pair.abort()

    def strand(self) -> list[_Pair]:
        """Break all connections for the clients, while the broker thinks that they stand."""
        for pair in self._pairs:
            pair.stranded = True
            pair.to_client.transport.abort()
        return list(self._pairs)

    def half_close(self) -> None:
        """Tell every client that the broker will send no more, and go on listening to it."""
        for pair in self._pairs:
            pair.to_client.write_eof()

    def _connected(self, client: Streams, broker: Streams) -> None:
        pair = _Pair(self, client[1], broker[1], self.budget())
        self._pairs.add(pair)
        self._keep(asyncio.create_task(pair.from_client(client[0])))
        self._keep(asyncio.create_task(pair.from_broker(broker[0])))

    def action(self, frame: bytes) -> Literal["before", "inside", "deaf"] | None:
        """Count a frame of a client, and return what to do with it."""
        if frame[0] != 1:
            return None
        method = _METHOD.unpack_from(frame, 7)
        self.methods[method] += 1
        return self.on_method.pop(method, None)

    def forget(self, pair: _Pair) -> None:
        """Forget a connection that one side has closed."""
        self._pairs.discard(pair)


class _Pair:
    """Two sockets with the proxy between them."""

    def __init__(
        self, proxy: Proxy, to_client: asyncio.StreamWriter, to_broker: asyncio.StreamWriter, budget: int | None
    ) -> None:
        self._proxy = proxy
        self._left = budget
        self._deaf = False
        self.stranded = False
        self.to_client = to_client
        self.to_broker = to_broker

    def abort(self) -> None:
        self.to_client.transport.abort()
        self.to_broker.transport.abort()

    async def from_client(self, reader: asyncio.StreamReader) -> None:
        try:
            await self._pass(await reader.readexactly(8))
            while True:
                head = await reader.readexactly(_HEAD.size)
                frame = head + await reader.readexactly(_HEAD.unpack(head)[2] + 1)
                action = self._proxy.action(frame)
                if action in ("before", "inside"):
                    await self._pass(frame[: len(frame) // 2 if action == "inside" else 0])
                    self._proxy.cut_one(self)
                    return
                self._deaf = self._deaf or action == "deaf"
                if not await self._pass(frame):
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            if not self.stranded:
                self._proxy.forget(self)
                self.abort()

    async def _pass(self, data: bytes) -> bool:
        """Send to the broker what the budget allows; False if that was the end of it."""
        await self._proxy.moving.wait()
        allowed = data if self._left is None else data[: self._left]
        self._proxy.sent += len(allowed)
        self.to_broker.write(allowed)
        await self.to_broker.drain()
        await self._slow_down(len(allowed))
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._proxy.cut_one(self)
                return False
        return True

    async def from_broker(self, reader: asyncio.StreamReader) -> None:
        held = b""
        try:
            while data := await reader.read(4096):
                await self._proxy.moving.wait()
                data, held = whole_frames(held + data)
                if not data or self._deaf or self._proxy.deaf or self.stranded:
                    continue
                if self._proxy.lag:
                    asyncio.get_running_loop().call_later(self._proxy.lag, self.to_client.write, data)
                    continue
                self.to_client.write(self._proxy.rewrite(data))
                await self.to_client.drain()
                await self._slow_down(len(data))
        except ConnectionError:
            # The other half was cut.
            return
        finally:
            self._proxy.forget(self)
            self.abort()

    async def _slow_down(self, size: int) -> None:
        if self._proxy.rate is not None:
            await asyncio.sleep(size / self._proxy.rate)  # the time on a slow network
