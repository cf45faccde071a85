"""The thread of an index, for everything that may take long."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from bide.errors import ScheduleIndexError
from bide.gate.index import unusable_index

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


class IndexThread:
    """Runs the calls of an index one by one: in a thread, or in the event loop if they are brief.

    At 1,000 cancels per second, nearly each batch has one record. The way to a thread and back took longer than the
    change: half of the cancels took 20 ms, and take 4 ms in the event loop.

    Args:
        path: the file of the index, for errors.
        executor: runs one call at a time, and is shut down at the end.
    """

    def __init__(self, path: Path, executor: Executor) -> None:
        self._path = path
        self._executor = executor
        self._latest: asyncio.Future[Any] | None = None
        """The result of the last call in the thread."""

    async def run(self, function: Callable[_P, _Result], *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        """Call a function in the thread, after the calls before.

        Raises:
            InvalidInputError: the index cannot be used, for example because the disk is full.
            ScheduleIndexError: the index is damaged.
        """
        latest = asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))
        self._latest = latest
        with self._named_errors():
            # A call goes on when its caller is cancelled, so that the end of the last call shows that none is left.
            return await asyncio.shield(latest)

    async def run_brief(self, function: Callable[_P, _Result], *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        """Call a function that takes a few milliseconds at most: at once if the thread is free.

        Raises:
            InvalidInputError, ScheduleIndexError: as for :meth:`run`.
        """
        if self._latest is not None and not self._latest.done():
            return await self.run(function, *args, **kwargs)
        with self._named_errors():
            return function(*args, **kwargs)

    def end(self) -> None:
        """End the thread after its calls."""
        self._executor.shutdown(wait=False)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise unusable_index(self._path, error) from error
        except sqlite3.DatabaseError as error:
            raise ScheduleIndexError(f"the index {self._path} is damaged: {error}") from error
