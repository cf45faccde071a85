"""The interface of a connection towards its channels."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Protocol


class FrameSink(Protocol):
    """The part of a :class:`bide.amqp.connection.Connection` that channels and their consumers use."""

    loop: asyncio.AbstractEventLoop
    frame_max: int

    @property
    def address(self) -> str:
        """The broker's host and port."""

    @property
    def is_open(self) -> bool:
        """Whether the connection can be used."""

    def now(self) -> datetime:
        """The time in UTC."""

    def send(self, *frames: bytes) -> None:
        """Queue frames for the socket."""

    async def writable(self) -> None:
        """Wait until broker and socket accept more."""

    async def drained(self) -> None:
        """Wait until the socket accepts more."""

    def abort(self, reason: str) -> None:
        """Close the connection because the broker broke the protocol."""

    def forget(self, number: int) -> None:
        """Free the number of a closed channel."""
