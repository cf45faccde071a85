"""Where the messages of a bulk publish come from: an iterable, or an asynchronous one that is read ahead a little."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Final, Protocol

from bide.errors import InvalidInputError
from bide.runtime.cancellation import from_within

NOTHING: Final = object()
"""What a source has to give where nothing is at hand."""

_READ_AHEAD: Final = 1_000

_BYTES_AHEAD: Final = 8 << 20
"""Bytes of bodies that are read ahead at most, but for the last message."""


class BulkInput(Protocol):
    """The input, taken one by one.

    Attributes:
        error: what the iterable raised in the end, if it did.
    """

    error: BaseException | None

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""

    def take(self) -> Any:
        """The next item, or ``NOTHING`` where none is at hand."""

    def left(self) -> list[Any]:
        """What was read from the input and not taken."""

    async def close(self) -> None:
        """Take no more."""


class _Iterated:
    """An ordinary iterable."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)
        self._has_ended = False
        self.error: BaseException | None = None

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
        self._is_stopped = False
        self._has_ended = False
        self.error: BaseException | None = None
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
        self._stop()
        return list(self._at_hand)

    async def close(self) -> None:
        self._stop()
        await asyncio.gather(self._task, return_exceptions=True)

    def _stop(self) -> None:
        # Once: a second time, it would disturb what the input does at its end.
        if not self._is_stopped:
            self._is_stopped = True
            self._task.cancel()

    async def _read(self) -> None:
        try:
            await self._read_on()
        except BaseException as error:
            if self._is_stopped:
                raise
            # Whoever else cancels this task, the input has not come to its end: its own time limit may do so.
            self.error = from_within("the input", error) if isinstance(error, asyncio.CancelledError) else error
            if not isinstance(error, Exception | asyncio.CancelledError):
                raise
        finally:
            self._has_ended = True
            self._on_news()

    async def _read_on(self) -> None:
        items = aiter(self._items)
        generator = items if isinstance(items, AsyncGenerator) else None
        step: Callable[[], Awaitable[Any]] = items.__anext__
        try:
            while not self._is_stopped:
                item = await step()
                step = items.__anext__
                self._at_hand.append(item)
                self._bytes += body_bytes(item)
                self._on_news()
                if len(self._at_hand) >= _READ_AHEAD or self._bytes >= _BYTES_AHEAD:
                    self._has_room.clear()
                    try:
                        await self._has_room.wait()
                    except asyncio.CancelledError as error:
                        if generator is None or self._is_stopped:
                            raise
                        # The generator waits at its yield. What cancels it is inside it and knows why.
                        step = partial(generator.athrow, error)
        except StopAsyncIteration:
            pass
        finally:
            if generator is not None:
                # Left where it is, it would do what it does at its end whenever it is collected.
                await generator.aclose()


def body_bytes(outgoing: Any) -> int:
    """The size of a message's body as far as it can be told without encoding it; 0 of anything else."""
    body = getattr(outgoing, "body", None)
    if body is None:
        body = getattr(outgoing, "json", None)
    return len(body) if isinstance(body, bytes | bytearray | memoryview | str) else 0


def source_of(items: Iterable[Any] | AsyncIterable[Any], on_news: Callable[[], None]) -> BulkInput:
    """The source for an iterable of either kind.

    Raises:
        InvalidInputError: it is no iterable.
    """
    if isinstance(items, AsyncIterable):
        return _ReadAhead(items, on_news)
    if isinstance(items, Iterable):
        return _Iterated(items)
    raise InvalidInputError(f"the messages are of type {type(items).__name__}: give an iterable of them")
