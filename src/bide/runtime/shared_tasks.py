"""Tasks that several callers wait for and that run once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any, TypeVar

from bide.errors import ClosedError
from bide.runtime.cancellation import is_cancelled

_Result = TypeVar("_Result")


class SharedTasks:
    """Tasks that outlive their callers: a caller that times out leaves its task for later callers to wait for.

    A broker that stalls therefore gets each request once, not once per caller.
    """

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[Any]] = {}

    async def run(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """Wait for the task of this key, and start it if none is running. A caller that times out leaves it running.

        Raises:
            ClosedError: :meth:`stop` ended the task.
            Exception: any exception of the task.
        """
        task: asyncio.Task[_Result] | None = self._tasks.get(key)
        if task is None or task.done():
            task = self._tasks[key] = asyncio.create_task(make())
            task.add_done_callback(partial(self._on_done, key))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise ClosedError("the client was closed") from error

    async def stop(self) -> None:
        """End all tasks."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _on_done(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if not task.cancelled():
            # If all callers have timed out, none of them retrieves the exception, and asyncio would log it.
            task.exception()
