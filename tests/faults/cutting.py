"""A TCP proxy in this process that breaks connections on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit, urlunsplit


class Proxy:
    """Stands between a client and a broker.

    Attributes:
        cut_after: number of bytes from the client after which the next connection breaks; None: never.
        next_cut: called after each such break, returns the next value of ``cut_after``.
        stalled: while set, nothing passes in either direction, though the connection stands.
        deaf: while set, what the broker answers is thrown away.
        refusing: while set, new connections are closed at once.
        cuts: how many connections were broken.
    """

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._moving = asyncio.Event()
        self._moving.set()
        self.cut_after: int | None = None
        self.next_cut: Callable[[], int | None] = lambda: None
        self.deaf = False
        self.refusing = False
        self.cuts = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self._moving.set()
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
        for writer in self._writers:
            writer.transport.abort()
        self.cuts += bool(self._writers)
        self._writers.clear()

    def stall(self) -> None:
        """Let nothing pass from now on."""
        self._moving.clear()

    def resume(self) -> None:
        """Let everything pass again, first what was held up."""
        self._moving.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        assert self._parts.hostname
        assert self._parts.port
        accepting = asyncio.current_task()
        assert accepting is not None
        self._tasks.add(accepting)
        accepting.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        far_reader, far_writer = await asyncio.open_connection(self._parts.hostname, self._parts.port)
        if writer.transport.is_closing():
            # It was cut meanwhile.
            far_writer.transport.abort()
            return
        self._writers.add(far_writer)
        for source, sink, is_client in ((reader, far_writer, True), (far_reader, writer, False)):
            task = asyncio.create_task(self._pump(source, sink, is_client=is_client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_client: bool) -> None:
        try:
            while data := await source.read(4096):
                await self._moving.wait()
                if is_client and self.cut_after is not None:
                    if len(data) >= self.cut_after:
                        sink.write(data[: self.cut_after])
                        await sink.drain()
                        self.cut()
                        self.cut_after = self.next_cut()
                        return
                    self.cut_after -= len(data)
                if self.deaf and not is_client:
                    continue
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            # The other half was cut.
            return
        finally:
            sink.transport.abort()
            self._writers.discard(sink)
