"""Running a coroutine from synchronous code."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def run_sync(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine and return its result.

    If this thread already runs an event loop, as in a notebook, the coroutine runs in another thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, thread_name_prefix="bide") as thread:
        return thread.submit(asyncio.run, work).result()
