"""The sending half of a connection: batched writes, with backpressure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from bide.foreign_text import visible

WRITE_BUFFER: Final = 1 << 20
"""Bytes that may wait for the socket before publishers are held back."""


class Writer:
    """Writes frames to a transport.

    Attributes:
        blocked_by: why the broker has blocked publishing (an alarm), or None.
        sent_at: when bytes were last handed to the transport, by the loop's clock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._frames: list[bytes] = []
        self._queued_bytes = 0
        self._flush_handle: asyncio.Handle | None = None
        self._closed = False
        self._is_full = False
        self.blocked_by: str | None = None
        self.sent_at = loop.time()
        self._drained = asyncio.Event()
        self._drained.set()
        self._writable = asyncio.Event()
        self._writable.set()
        self._when_writable: list[Callable[[], None]] = []

    def connect(self, transport: asyncio.Transport) -> None:
        """Write to this transport from now on."""
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_BUFFER)

    def send(self, *frames: bytes) -> None:
        """Queue frames; those of one iteration of the event loop go out in one write."""
        if self._closed:
            return
        self._frames += frames
        self._queued_bytes += sum(map(len, frames))
        if self._queued_bytes >= WRITE_BUFFER:
            # At once, so that the transport can report that it is full before the next sender adds to it.
            self.flush()
        elif self._flush_handle is None:
            self._flush_handle = self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Pass queued frames to the transport."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        if self._transport is not None and self._frames:
            self._transport.write(b"".join(self._frames))
            self.sent_at = self._loop.time()
        self._frames.clear()
        self._queued_bytes = 0

    def pause(self) -> None:
        """Hold senders back: the transport is full."""
        self._is_full = True
        self._update_events()

    def resume(self) -> None:
        """Release senders: the transport has room again."""
        self._is_full = False
        self._update_events()

    def block(self, reason: str | None) -> None:
        """Hold publishers back for this reason (the broker blocks publishing), or release them if it is None."""
        self.blocked_by = reason and visible(reason)
        self._update_events()

    def close(self) -> None:
        """Pass on queued frames, drop later ones, and release all waiting senders."""
        self.flush()
        self._closed = True
        self._update_events()

    @property
    def is_writable(self) -> bool:
        """Whether the broker accepts publishes and the transport has room. True once the writer is closed."""
        return self._writable.is_set()

    def when_writable(self, callback: Callable[[], None]) -> None:
        """Call back once, as soon as the connection is writable."""
        self._when_writable.append(callback)
        self._update_events()

    async def writable(self) -> None:
        """Wait until the broker accepts publishes and the transport has room, or until the writer is closed."""
        # All waiting senders wake together, and the first of them may fill the transport again.
        while not self._writable.is_set():
            await self._writable.wait()

    async def drained(self) -> None:
        """Wait until the transport has room, even while the broker blocks publishing, or until the writer is closed."""
        while not self._drained.is_set():
            await self._drained.wait()

    def _update_events(self) -> None:
        _set_or_clear(self._drained, self._closed or not self._is_full)
        _set_or_clear(self._writable, self._closed or not (self._is_full or self.blocked_by is not None))
        if self._writable.is_set():
            callbacks, self._when_writable = self._when_writable, []
            for callback in callbacks:
                callback()


def _set_or_clear(event: asyncio.Event, value: bool) -> None:
    if value:
        event.set()
    else:
        event.clear()
