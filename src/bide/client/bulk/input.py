"""The input of a bulk publish: an iterable, or an asynchronous iterable that is read ahead."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Final, Protocol

from bide.errors import InvalidInputError
from bide.runtime.cancellation import from_within

NOTHING: Final = object()
"""Returned by :meth:`BulkInput.take` if no message is available now."""

_READ_AHEAD: Final = 1_000

_READ_AHEAD_BYTES: Final = 8 << 20
"""The maximum size of bodies read ahead, in bytes, not counting the last message."""


class BulkInput(Protocol):
    """The messages of the input, taken one by one.

    Attributes:
        error: the exception that the iterable raised, if any.
    """

    error: BaseException | None

    @property
    def ended(self) -> bool:
        """Whether the input has ended."""

    def take(self) -> Any:
        """The next item, or ``NOTHING`` if none is available now."""

    def left(self) -> list[Any]:
        """The items that were read from the input and not taken."""

    async def close(self) -> None:
        """Stop reading."""


class _SyncInput:
    """A synchronous iterable."""

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
        except Exception as error:  # noqa: BLE001 (raised after the results of earlier messages)
            self._has_ended, self.error = True, error
        return NOTHING

    def left(self) -> list[Any]:
        return []

    async def close(self) -> None:
        self._has_ended = True


class _AsyncInput:
    """An asynchronous iterable, read by a separate task, so that waiting for it does not hold up sending.

    Args:
        on_change: called when an item is available again, or the input has ended.
    """

    def __init__(self, items: AsyncIterable[Any], on_change: Callable[[], None]) -> None:
        self._items = items
        self._on_change = on_change
        self._available: deque[Any] = deque()
        self._available_bytes = 0
        self._has_room = asyncio.Event()
        self._is_stopped = False
        self._has_ended = False
        self.error: BaseException | None = None
        self._task = asyncio.create_task(self._read())

    @property
    def ended(self) -> bool:
        return self._has_ended and not self._available

    def take(self) -> Any:
        if not self._available:
            return NOTHING
        item = self._available.popleft()
        self._available_bytes -= body_bytes(item)
        if len(self._available) <= _READ_AHEAD // 2 and self._available_bytes <= _READ_AHEAD_BYTES // 2:
            self._has_room.set()
        return item

    def left(self) -> list[Any]:
        # Stop first: an item that is read after this would be in no list.
        self._stop()
        return list(self._available)

    async def close(self) -> None:
        self._stop()
        await asyncio.gather(self._task, return_exceptions=True)

    def _stop(self) -> None:
        # Cancel once: a second cancellation would disturb the cleanup of the input.
        if not self._is_stopped:
            self._is_stopped = True
            self._task.cancel()

    async def _read(self) -> None:
        try:
            await self._read_on()
        except BaseException as error:
            if self._is_stopped:
                raise
            # If the input cancels this task, for example by its own timeout, this is an error, not the input's end.
            self.error = from_within("the input", error) if isinstance(error, asyncio.CancelledError) else error
            if not isinstance(error, Exception | asyncio.CancelledError):
                raise
        finally:
            self._has_ended = True
            self._on_change()

    async def _read_on(self) -> None:
        items = aiter(self._items)
        generator = items if isinstance(items, AsyncGenerator) else None
        step: Callable[[], Awaitable[Any]] = items.__anext__
        try:
            while not self._is_stopped:
                item = await step()
                step = items.__anext__
                self._available.append(item)
                self._available_bytes += body_bytes(item)
                self._on_change()
                if len(self._available) >= _READ_AHEAD or self._available_bytes >= _READ_AHEAD_BYTES:
                    self._has_room.clear()
                    try:
                        await self._has_room.wait()
                    except asyncio.CancelledError as error:
                        if generator is None or self._is_stopped:
                            raise
                        # The generator waits at its yield. A cancellation by its own code is handled there.
                        step = partial(generator.athrow, error)
        except StopAsyncIteration:
            pass
        finally:
            if generator is not None:
                # Without this, the generator's cleanup would only run when the generator is garbage collected.
                await generator.aclose()


def body_bytes(outgoing: Any) -> int:
    """The size of a message's body if it is known without encoding it; otherwise 0."""
    body = getattr(outgoing, "body", None)
    if body is None:
        body = getattr(outgoing, "json", None)
    return len(body) if isinstance(body, bytes | bytearray | memoryview | str) else 0


def open_input(items: Iterable[Any] | AsyncIterable[Any], on_change: Callable[[], None]) -> BulkInput:
    """Start reading an iterable of either kind.

    Raises:
        InvalidInputError: the object is not an iterable.
    """
    if isinstance(items, AsyncIterable):
        return _AsyncInput(items, on_change)
    if isinstance(items, Iterable):
        return _SyncInput(items)
    raise InvalidInputError(f"the messages are of type {type(items).__name__}: give an iterable of them")
