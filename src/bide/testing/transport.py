"""A transport in memory between a client and the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol


class Server(Protocol):
    """The broker's end of a connection."""

    def received(self, data: bytes) -> None:
        """Handle data from the client."""

    def lost(self) -> None:
        """Handle the loss of the connection."""


class MemoryTransport(asyncio.Transport):
    """The client's end of a connection to a broker in the same process.

    Data is delivered in a later turn of the event loop, as over a network, and never inside the call that sends it.

    Args:
        loop: the event loop of the client.
        protocol: the client's protocol.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
        super().__init__({"peername": ("memory", 0)})
        self._loop = loop
        self._protocol = protocol
        self._server: Server | None = None
        self._incoming = bytearray()
        self._is_scheduled = False
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
        """The number of unsent bytes, which is always 0."""
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: writing never has to pause."""

    def is_closing(self) -> bool:
        """Whether the connection is closed or closing."""
        return self._is_closing

    def close(self) -> None:
        """Close the connection after the received data was delivered."""
        if not self._is_closing:
            self._is_closing = True
            self._call(self._close)

    def abort(self) -> None:
        """Close the connection, and drop received data."""
        self._incoming.clear()
        self.close()

    def pause_reading(self) -> None:
        """Stop delivering data to the protocol."""
        self._is_paused = True

    def resume_reading(self) -> None:
        """Continue to deliver data to the protocol."""
        self._is_paused = False
        self._schedule()

    # -- the broker's side

    def deliver(self, data: bytes) -> None:
        """Send to the client."""
        self._incoming += data
        self._schedule()

    def _schedule(self) -> None:
        if self._incoming and not self._is_scheduled and not self._is_paused:
            self._is_scheduled = True
            self._call(self._hand_over)

    def _hand_over(self) -> None:
        self._is_scheduled = False
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
        # Other clients, or the clock, can be used in other threads. A closed event loop has no clients any more.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)
