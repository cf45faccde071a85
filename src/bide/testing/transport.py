"""A connection without a socket: what the client writes, the broker has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol


class Server(Protocol):
    """The broker's end."""

    def received(self, data: bytes) -> None:
        """Bytes came from the client."""

    def lost(self) -> None:
        """The connection is gone."""


class MemoryTransport(asyncio.Transport):
    """The client's end of a connection to a broker in the same process.

    Nothing is handed over at once: what one side does while it is being called comes after it, as over a network.

    Args:
        protocol: of the client.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
        super().__init__({"peername": ("memory", 0)})
        self._loop = loop
        self._protocol = protocol
        self._server: Server | None = None
        self._incoming = bytearray()
        self._is_planned = False
        self._is_paused = False
        self._is_closing = False

    def open(self, server: Callable[[MemoryTransport], Server]) -> None:
        """Connect both sides."""
        self._server = server(self)
        self._protocol.connection_made(self)

    # -- the client's side

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Send to the broker."""
        if self._server is not None and not self._is_closing:
            self._server.received(bytes(data))

    def get_write_buffer_size(self) -> int:
        """Bytes that wait to be sent: none ever do."""
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Take note of when the client wants to be held back, which is never needed."""

    def is_closing(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._is_closing

    def close(self) -> None:
        """Close it once everything that was received is handed over."""
        if not self._is_closing:
            self._is_closing = True
            self._call(self._close)

    def abort(self) -> None:
        """Close it."""
        self._incoming.clear()
        self.close()

    def pause_reading(self) -> None:
        """Hand nothing over for the time being."""
        self._is_paused = True

    def resume_reading(self) -> None:
        """Hand over again."""
        self._is_paused = False
        self._plan()

    # -- the broker's side

    def deliver(self, data: bytes) -> None:
        """Send to the client."""
        self._incoming += data
        self._plan()

    def _plan(self) -> None:
        if self._incoming and not self._is_planned and not self._is_paused:
            self._is_planned = True
            self._call(self._hand_over)

    def _hand_over(self) -> None:
        self._is_planned = False
        if self._is_paused or self._server is None:
            return
        data = bytes(self._incoming)
        self._incoming.clear()
        if data:
            self._protocol.data_received(data)

    def _close(self) -> None:
        self._hand_over()
        server, self._server = self._server, None
        if server is not None:
            server.lost()
            self._protocol.connection_lost(None)

    def _call(self, callback: Callable[[], None]) -> None:
        # Another client, or the clock, may be used in another thread. A loop that is closed has no client any more.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)
