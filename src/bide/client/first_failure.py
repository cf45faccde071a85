"""The first error of the work on one connection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from bide.amqp.connection import Connection


class FirstFailure:
    """The first error that ends the work on a connection: one that callbacks report, or the loss of the connection."""

    def __init__(self, connection: Connection) -> None:
        self._reported: asyncio.Future[BaseException] = connection.loop.create_future()
        self._lost = connection.lost

    @property
    def happened(self) -> bool:
        """Whether an error was reported, or the connection is lost."""
        return self._reported.done() or self._lost.done()

    def report(self, error: BaseException) -> None:
        """End the work with an error. Later errors are ignored."""
        if not self._reported.done():
            self._reported.set_result(error)

    async def wait(self, work: Iterable[asyncio.Future[Any]], *, seconds: float | None = None) -> None:
        """Wait until a part of the work is done, until the first error, or until the time is up. Nothing is raised."""
        ends: set[asyncio.Future[Any]] = {*work, self._reported, self._lost}
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    def check(self) -> None:
        """Raise the error, if there is one.

        Raises:
            BaseException: the reported error, or else the loss of the connection.
        """
        for failure in (self._reported, self._lost):
            if failure.done():
                raise failure.result()
