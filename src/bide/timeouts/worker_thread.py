"""A thread for the blocking calls of a database driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class WorkerThread:
    """One thread, which runs one call after the other. The end of the block waits for the running call."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bide-database")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def run(
        self, function: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> asyncio.Future[_Result]:
        """Queue a call. Cancelling the future does not interrupt a call that has started."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))
