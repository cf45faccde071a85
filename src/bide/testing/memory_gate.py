"""A gate on the broker in memory."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from bide.amqp.url import BrokerUrl
from bide.gate.worker import Gate

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


class _AtOnce(Executor):
    """Runs each call in the thread that submits it, so that tests do not depend on other threads."""

    def submit(self, fn: Callable[_P, _Result], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_Result]:
        future = Future[_Result]()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 (it is raised where the result is awaited)
            future.set_exception(error)
        return future


class _Gate(Gate):
    def _make_executor(self) -> Executor:
        return _AtOnce()

    @property
    def is_ready(self) -> bool:
        """Whether each partition has a leader, this gate or another one, that answers questions."""
        return bool(self._partitions) and all(one.leadership.leader is not None for one in self._partitions)


class MemoryGate:
    """A gate that delivers schedules while the context is open: ``async with``, or ``with`` in a synchronous test.

    Args:
        url: the URL of the broker.
        allow: see :class:`bide.Gate`.
        options: other options of :class:`bide.Gate`.
    """

    def __init__(self, url: BrokerUrl, *, allow: Iterable[str], **options: Any) -> None:
        self._url = url
        self._allow = allow
        self._options = options
        self._stack: ExitStack
        self._gate: _Gate
        self._running: asyncio.Task[Any]
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread

    async def __aenter__(self) -> Self:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bide-gate-"))
            self._gate = _Gate(self._url, allow=self._allow, state=folder, **self._options)
            self._running = asyncio.create_task(self._gate.run())
            while not self._gate.is_ready and not self._running.done():  # noqa: ASYNC110 (there is no event to wait for)
                await asyncio.sleep(0)  # the gate starts meanwhile
            if self._running.done():
                self._running.result()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.stop()
        try:
            await self._running
        finally:
            self._stack.close()

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bide-memory-gate", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self.__aenter__(), self._loop).result()
        except BaseException:
            self._end_thread()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self.__aexit__(kind, error, trace), self._loop).result()
        finally:
            self._end_thread()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
