"""Cancellation of a task, as opposed to a ``CancelledError`` that user code let escape."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


def is_cancelled() -> bool:
    """Whether the current task was cancelled. If not, a ``CancelledError`` is a failure of the code that raised it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def from_within(what: str, error: asyncio.CancelledError) -> RuntimeError:
    """The failure to report for a ``CancelledError`` that user code let escape."""
    failure = RuntimeError(f"{what} was cancelled from within")
    failure.__cause__ = error
    return failure


async def outcome_of(
    handler: Callable[[_Argument], Awaitable[_Result]], argument: _Argument, *, what: str = "the handler"
) -> tuple[_Result, None] | tuple[None, Exception]:
    """Run a handler and return its result, or its exception with a traceback that starts at the handler.

    The exception is returned so that callers deal with it outside of an ``except`` block. Inside one, it would be the
    context of whatever they raise, and logs would print it too.
    """
    try:
        return await handler(argument), None
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        return None, from_within(what, error)
    except Exception as error:  # noqa: BLE001 (any exception of a handler is its failure)
        trace = error.__traceback__
        # with_traceback works where an assignment to __traceback__ fails, as in a frozen dataclass.
        return None, error.with_traceback(trace.tb_next if trace is not None else None)


async def outcome_apart(
    handler: Callable[[_Argument], Awaitable[_Result]], argument: _Argument
) -> tuple[_Result, None] | tuple[None, Exception]:
    """Run a handler in its own task, and return its result or its exception as :func:`outcome_of` does.

    A handler that cancels its own task has failed. Each cancellation of the current task is passed on to the handler's
    task, and raised here once that task has ended.
    """
    task = asyncio.create_task(outcome_of(handler, argument))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
            task.cancel()
    if cancelled is not None:
        if not task.cancelled():
            # Retrieve the exception, or asyncio logs it when the task is collected. The event loop has raised
            # SystemExit and KeyboardInterrupt already.
            task.exception()
        raise cancelled
    try:
        return task.result()
    except asyncio.CancelledError as error:
        return None, from_within("the handler", error)
