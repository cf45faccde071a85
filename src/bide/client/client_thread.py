"""The thread and event loop of a synchronous client."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from bide.durations import DelayLike, parse_delay
from bide.errors import ClosedError, InvalidDelayError, InvalidInputError

_STOP_TIMEOUT: Final = 1.0
"""Seconds to wait for the calls of other threads to end, after the connections are closed."""

_Result = TypeVar("_Result")


class ClientThread:
    """A thread with an event loop, in which a client and its connections live."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bide", daemon=True)
        self._thread.start()
        self._stopped = False
        self._submit_lock = threading.Lock()

    @property
    def belongs_to_parent(self) -> bool:
        """Whether this process was forked after the thread was started: the thread exists only in the parent."""
        return os.getpid() != self._pid

    def stop(self) -> None:
        """End the thread. Calls in other threads fail."""
        with self._submit_lock:
            if self._stopped:
                return
            self._stopped = True
            # No more work is submitted to the loop after this.
            ended = asyncio.run_coroutine_threadsafe(_end_other_tasks(), self._loop)
        ended.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def wait_for(self, work: Coroutine[Any, Any, _Result], timeout: DelayLike | None = None) -> _Result:
        """Run a coroutine in the client's thread.

        Raises:
            ClosedError: the client was closed, meanwhile or before, or belongs to another process.
            TimeoutError: the coroutine took longer than ``timeout`` and was cancelled.
            InvalidDelayError: ``timeout`` is invalid; the coroutine was not started.
            InvalidInputError: it was called in the client's thread.
        """
        try:
            limit = None if timeout is None else parse_delay(timeout).total_seconds()
        except InvalidDelayError:
            work.close()
            raise
        future = self.submit(work)
        try:
            return future.result(limit)
        except concurrent.futures.CancelledError:
            raise ClosedError("the client was closed") from None
        except BaseException:
            # If the caller is interrupted or times out, the coroutine must not continue.
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        """Start a coroutine in the client's thread.

        Raises:
            ClosedError: the client was closed, or belongs to another process.
            InvalidInputError: it was called in the client's thread.
        """
        if self.belongs_to_parent:
            work.close()
            raise ClosedError("this client belongs to the parent process: create another one after the fork")
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidInputError(
                "this client was called in its own thread, where the call would wait for itself: use its attribute "
                "'client' there"
            )
        with self._submit_lock:
            if self._stopped:
                work.close()
                raise ClosedError("the client was closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[[], None]) -> None:
        """Call a function soon in the client's thread.

        Raises:
            ClosedError: the client was closed, or belongs to another process.
        """
        if self.belongs_to_parent:
            raise ClosedError("this client belongs to the parent process: create another one after the fork")
        with self._submit_lock:
            if self._stopped:
                raise ClosedError("the client was closed")
            self._loop.call_soon_threadsafe(function)


async def _end_other_tasks() -> None:
    """Wait for the other tasks of the loop, and cancel those that do not end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if not others:
        return
    _, running = await asyncio.wait(others, timeout=_STOP_TIMEOUT)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
