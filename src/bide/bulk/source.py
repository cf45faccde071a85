"""Where the letters of a bulk publish come from: an iterable, or an asynchronous one that is read ahead a little."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any, Final, Protocol

from bide.cancellation import from_within, is_cancelled
from bide.errors import InvalidInputError

NOTHING: Final = object()
"""What a source has to give where nothing is at hand."""

_READ_AHEAD: Final = 1_000

_BYTES_AHEAD: Final = 8 << 20
"""Bytes of bodies that are read ahead at most, but for the last letter."""


class Source(Protocol):
    """The input, taken one by one.

    Attributes:
        error: what the iterable raised in the end, if it did.
    """

    error: Exception | None

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""

    def take(self) -> Any:
        """The next item, or ``NOTHING`` where none is at hand."""

    def left(self) -> list[Any]:
        """What was read from the input and not taken."""

    async def close(self) -> None:
        """Take no more."""


class _Direct:
    """An ordinary iterable."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)
        self._has_ended = False
        self.error: Exception | None = None

    @property
    def ended(self) -> bool:
        return self._has_ended

    def take(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            self._has_ended = True
        except Exception as error:  # noqa: BLE001 (raised when what was sent before is confirmed)
            self._has_ended, self.error = True, error
        return NOTHING

    def left(self) -> list[Any]:
        return []

    async def close(self) -> None:
        self._has_ended = True


class _ReadAhead:
    """An asynchronous iterable, read by a task of its own, so that waiting for it holds nothing else up.

    Args:
        on_news: called when something is at hand again, or the end.
    """

    def __init__(self, items: AsyncIterable[Any], on_news: Callable[[], None]) -> None:
        self._items = items
        self._on_news = on_news
        self._at_hand: deque[Any] = deque()
        self._bytes = 0
        self._has_room = asyncio.Event()
        self._has_ended = False
        self.error: Exception | None = None
        self._task = asyncio.create_task(self._read())

    @property
    def ended(self) -> bool:
        return self._has_ended and not self._at_hand

    def take(self) -> Any:
        if not self._at_hand:
            return NOTHING
        item = self._at_hand.popleft()
        self._bytes -= body_bytes(item)
        if len(self._at_hand) <= _READ_AHEAD // 2 and self._bytes <= _BYTES_AHEAD // 2:
            self._has_room.set()
        return item

    def left(self) -> list[Any]:
        # From here on nothing more may come, or it would be in no list.
        self._task.cancel()
        return list(self._at_hand)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        try:
            async for item in self._items:
                self._at_hand.append(item)
                self._bytes += body_bytes(item)
                self._on_news()
                if len(self._at_hand) >= _READ_AHEAD or self._bytes >= _BYTES_AHEAD:
                    self._has_room.clear()
                    await self._has_room.wait()
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            self.error = from_within("the input", error)
        except Exception as error:  # noqa: BLE001 (raised when what was sent before is confirmed)
            self.error = error
        finally:
            self._has_ended = True
            self._on_news()


def body_bytes(letter: Any) -> int:
    """The size of a letter's body as far as it can be told without encoding it; 0 of what is no letter."""
    body = getattr(letter, "body", None)
    if body is None:
        body = getattr(letter, "json", None)
    return len(body) if isinstance(body, bytes | bytearray | memoryview | str) else 0


def source_of(items: Iterable[Any] | AsyncIterable[Any], on_news: Callable[[], None]) -> Source:
    """The source for an iterable of either kind.

    Raises:
        InvalidInputError: it is no iterable.
    """
    if isinstance(items, AsyncIterable):
        return _ReadAhead(items, on_news)
    if isinstance(items, Iterable):
        return _Direct(items)
    raise InvalidInputError(f"the letters are of type {type(items).__name__}: give an iterable of them")
