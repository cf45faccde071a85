"""A check that a test leaves no task, unhandled error or socket behind."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.timeouts import TIMEOUT


@asynccontextmanager
async def no_leaks() -> AsyncIterator[None]:
    """Fail if the block leaves tasks behind, or errors that only the event loop got to see."""
    loop = asyncio.get_running_loop()
    errors: list[dict[str, Any]] = []
    before, handler = _tasks(), loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    try:
        yield
        deadline = time.monotonic() + TIMEOUT
        # A task that is cancelled, or a socket that is closed, takes a few turns of the loop to be gone.
        while (left := _tasks() - before) and time.monotonic() < deadline:  # noqa: ASYNC110 (there is no event to wait for)
            await asyncio.sleep(0.01)
        assert left == set()
        # An unhandled error is reported when its future or task is collected.
        gc.collect()
        await asyncio.sleep(0)  # the loop calls the handler
        assert errors == []
    finally:
        loop.set_exception_handler(handler)


def _tasks() -> set[asyncio.Task[Any]]:
    """All tasks but those that run the tests."""
    return {one for one in asyncio.all_tasks() if "TestRunner" not in repr(one.get_coro())}
