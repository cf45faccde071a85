"""The part of a connection that a channel uses."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Protocol


class FrameSink(Protocol):
    """A connection, as its channels and their consumers use it; see :class:`bide.amqp.connection.Connection`."""

    loop: asyncio.AbstractEventLoop
    frame_max: int

    @property
    def address(self) -> str:
        """The broker's host and port."""

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""

    def now(self) -> datetime:
        """The time in UTC."""

    def send(self, *frames: bytes) -> None:
        """Queue frames for the socket."""

    async def writable(self) -> None:
        """Wait until the broker and the socket take more."""

    async def drained(self) -> None:
        """Wait until the socket takes more."""

    def abort(self, reason: str) -> None:
        """Give the connection up because the broker broke the rules."""

    def forget(self, number: int) -> None:
        """The number of a closed channel is free again."""
