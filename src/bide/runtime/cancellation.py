"""Cancellation of this task, or a ``CancelledError`` that user code let escape."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")


def is_cancelled() -> bool:
    """Whether the current task is to end. If not, a ``CancelledError`` is a failure of the code that it came out of."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def from_within(what: str, error: asyncio.CancelledError) -> RuntimeError:
    """The failure that such a ``CancelledError`` is."""
    failure = RuntimeError(f"{what} was cancelled from within")
    failure.__cause__ = error
    return failure


async def outcome_of(
    handler: Callable[[_Given], Awaitable[_Result]], given: _Given, *, what: str = "the handler"
) -> tuple[_Result, None] | tuple[None, Exception]:
    """What a handler returns, or what it raises, with the stack from the handler on.

    Dealt with where it is caught, that would be the context of whatever is raised there, which logs print.
    """
    try:
        return await handler(given), None
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        return None, from_within(what, error)
    except Exception as error:  # noqa: BLE001 (whatever a handler raises is its failure)
        trace = error.__traceback__
        # Not by assignment, which an exception may refuse: a frozen dataclass does.
        return None, error.with_traceback(trace.tb_next if trace is not None else None)


async def outcome_apart(
    handler: Callable[[_Given], Awaitable[_Result]], given: _Given
) -> tuple[_Result, None] | tuple[None, Exception]:
    """The same of a handler that has a task of its own: cancels it that task, that is a failure like any other.

    If the current task is cancelled, so is the handler's, as often as that is; and this ends when that has ended.
    """
    task = asyncio.create_task(outcome_of(handler, given))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
            task.cancel()
    if cancelled is not None:
        if not task.cancelled():
            # Looked at, or it is logged when the task is collected. What ends a process was raised there already.
            task.exception()
        raise cancelled
    try:
        return task.result()
    except asyncio.CancelledError as error:
        return None, from_within("the handler", error)
