"""Heartbeats of a connection, sent and monitored to detect a dead peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from bide.amqp import codec
from bide.amqp.writer import Writer

_MAX_SILENT_BEATS: Final = 4
"""The number of half intervals in a row without a byte after which the peer counts as dead."""


class Heartbeat:
    """Sends heartbeats, and detects that the peer is silent.

    Args:
        on_silence: called once, with the seconds since bytes were last received.

    Attributes:
        received_at: when bytes were last received, by the loop's clock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, writer: Writer, on_silence: Callable[[float], None]) -> None:
        self._loop = loop
        self._writer = writer
        self._on_silence = on_silence
        self._half_interval = 0.0
        self._beat_handle: asyncio.TimerHandle | None = None
        self._silent_beats = 0
        self._last_beat_at = loop.time()
        self.received_at = loop.time()

    def start(self, seconds: int) -> None:
        """Start heartbeats with this interval; 0 disables them."""
        if seconds:
            self._half_interval = seconds / 2
            self._beat_handle = self._loop.call_later(self._half_interval, self._beat)

    def stop(self) -> None:
        """Stop heartbeats."""
        if self._beat_handle is not None:
            self._beat_handle.cancel()

    def _beat(self) -> None:
        now = self._loop.time()
        # Silent half intervals are counted, not seconds: a blocked event loop cannot receive anything.
        self._silent_beats = 0 if self.received_at > self._last_beat_at else self._silent_beats + 1
        self._last_beat_at = now
        if self._silent_beats >= _MAX_SILENT_BEATS:
            self._on_silence(now - self.received_at)
            return
        if now - self._writer.sent_at >= self._half_interval:
            self._writer.send(codec.HEARTBEAT_FRAME)
        self._beat_handle = self._loop.call_later(self._half_interval, self._beat)
