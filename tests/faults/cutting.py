"""A TCP proxy in this process that breaks connections on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.faults.proxy import Streams, TcpProxy


class Proxy(TcpProxy):
    """Stands between a client and a broker, whatever protocol they speak. A cut breaks all connections.

    Attributes:
        cut_after: number of bytes from clients after which all connections break; None: never.
        next_cut: called after each such break, returns the next value of ``cut_after``.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._writers: set[asyncio.StreamWriter] = set()
        self.cut_after: int | None = None
        self.next_cut: Callable[[], int | None] = lambda: None

    def cut(self) -> None:
        """See :meth:`TcpProxy.cut`. It counts once for all connections."""
        self.cuts += bool(self._writers or self._accepting)
        super().cut()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def _connected(self, client: Streams, broker: Streams) -> None:
        self._writers |= {client[1], broker[1]}
        self._keep(asyncio.create_task(self._pump(client[0], broker[1], is_client=True)))
        self._keep(asyncio.create_task(self._pump(broker[0], client[1], is_client=False)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_client: bool) -> None:
        try:
            while data := await source.read(4096):
                await self.moving.wait()
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
