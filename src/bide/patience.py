"""Time limits that stand still while the delay infrastructure is put on the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

TIME_TO_APPLY: Final = 180.0
"""Seconds that putting a whole infrastructure on a broker may take in all, before time limits count it.

Onto a broker that has a core for itself it takes seconds, and onto one of many on a busy machine more than a minute.
"""


class Applying:
    """Whether somebody puts the infrastructure on the broker at the moment, and whose time that is not to cost."""

    def __init__(self) -> None:
        self._limits: set[Patience] = set()
        self._begun = 0

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Around the putting of it."""
        self._begun += 1
        if self._begun == 1:
            for limit in self._limits:
                limit.pause()
        try:
            yield
        finally:
            self._begun -= 1
            if not self._begun:
                for limit in self._limits:
                    limit.resume()

    def join(self, limit: Patience) -> None:
        """A time limit is in force."""
        self._limits.add(limit)
        if self._begun:
            limit.pause()

    def leave(self, limit: Patience) -> None:
        """It is no more."""
        self._limits.remove(limit)
        if self._begun:
            limit.resume()


class Patience:
    """A time limit, as ``asyncio.timeout_at``, that stands still meanwhile: ``async with Patience(...):``.

    Args:
        end: when it is over, by the clock of the event loop.
        allowance: seconds that it may stand still in all.

    Attributes:
        end: as it looks now.
        allowance: what is left of it.
    """

    __slots__ = ("_applying", "_limit", "_since", "allowance", "end")

    def __init__(self, applying: Applying, end: float, allowance: float) -> None:
        self._applying = applying
        self._limit = asyncio.timeout_at(end)
        self._since: float | None = None
        self.end = end
        self.allowance = allowance

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._applying.join(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._applying.leave(self)
        await self._limit.__aexit__(kind, error, trace)

    def pause(self) -> None:
        """From now on it stands still, as long as it may."""
        self._since = asyncio.get_running_loop().time()
        self._move(self.end + self.allowance)

    def resume(self) -> None:
        """It goes on."""
        if self._since is not None:
            stood = min(asyncio.get_running_loop().time() - self._since, self.allowance)
            self._since = None
            self.allowance -= stood
            self.end += stood
            self._move(self.end)

    def _move(self, end: float) -> None:
        # A limit that has just struck cannot be moved any more.
        if not self._limit.expired():
            self._limit.reschedule(end)
