"""Handlers of an endpoint by message type, and how they are called."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import PurePath
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar

from bide.client.message import Message
from bide.errors import InvalidInputError, UnknownMessageTypeError
from bide.recoverability.message_types import message_types

Handler = Callable[[Message], Awaitable[None] | None]
"""An ``async def`` function, which runs in the event loop, or a plain one, which runs in a thread."""

_PACKAGE: Final = PurePath(__file__).parent

AnyHandler = TypeVar("AnyHandler", bound=Callable[[Message], Any])


class _Registered(NamedTuple):
    """A handler, and whether it runs in the event loop."""

    function: Callable[[Message], Any]
    is_async: bool


class Handlers:
    """The handlers of an endpoint by message type.

    Args:
        threads: number of threads for handlers that are plain functions.
    """

    def __init__(self, threads: int) -> None:
        self._by_type: dict[str | None, _Registered] = {}
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._by_type)

    def add(self, handler: AnyHandler, type: str | None) -> AnyHandler:
        """Register the handler of a message type; None stands for all types without a handler of their own.

        Raises:
            InvalidInputError: the handler is not a function, or the type has one already.
        """
        if inspect.isclass(handler) or not callable(handler):
            raise InvalidInputError(f"the handler {handler!r} is not a function: give one that takes a bide.Message")
        if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
            # A call would only create the generator, and the message would be acknowledged unhandled.
            raise InvalidInputError(
                f"the handler {_name(handler)} is a generator, which would never run: remove its yield"
            )
        if type in self._by_type:
            what = "every other type" if type is None else f"the type {type!r}"
            raise InvalidInputError(
                f"there is a handler for {what} already, {_name(self._by_type[type].function)}: register one per type"
            )
        self._by_type[type] = _Registered(handler, _is_async(handler))
        return handler

    def check(self, message: Message) -> None:
        """Check that there is a handler for this message.

        Raises:
            UnknownMessageTypeError: there is none.
        """
        self._of(message)

    def handle(self, message: Message) -> Awaitable[None]:
        """Call the message's handler. The result waits until it ends, and raises its exceptions.

        Raises:
            UnknownMessageTypeError: no handler is registered for its type.
        """
        handler, is_async = self._of(message)
        called: Awaitable[None] = handler(message) if is_async else self._call_in_thread(handler, message)
        return called

    async def _call_in_thread(self, handler: Callable[[Message], Any], message: Message) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="bide-handler")
        context = copy_context()
        # A thread cannot be cancelled. After a cancellation, its result is dropped.
        work = asyncio.get_running_loop().run_in_executor(self._pool, context.run, _outcome, handler, message)
        result, error = await asyncio.shield(work)
        if error is not None:
            raise error
        if inspect.isawaitable(result):
            await result

    def close(self) -> None:
        """Shut the thread pool down without waiting; running handlers continue to their end."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _of(self, message: Message) -> _Registered:
        kinds = message_types(message.raw.values)
        for kind in (*kinds, None):
            if (handler := self._by_type.get(kind)) is not None:
                return handler
        known = ", ".join(sorted(repr(one) for one in self._by_type if one is not None)) or "none"
        raise UnknownMessageTypeError(
            f"no handler for the message type {' or '.join(map(repr, kinds)) or 'None'} (known types: {known}): "
            "register one with @endpoint.handler, or one for every type"
        )


def without_bide_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback that starts at the handler, without the frames of bide and the thread pool."""
    while trace is not None and _is_internal(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_internal(file: str) -> bool:
    path = PurePath(file)
    return path.parent == _PACKAGE or path.parts[-3:] == ("concurrent", "futures", "thread.py")


def _is_async(handler: Callable[[Message], Any]) -> bool:
    call = getattr(handler, "__call__", None)  # noqa: B004 (whether its __call__ is async)
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)


def _name(handler: Callable[[Message], Any]) -> str:
    return str(getattr(handler, "__qualname__", handler))


def _outcome(handler: Callable[[Message], Any], message: Message) -> tuple[Any, BaseException | None]:
    """Return what a handler returns or raises, because a future cannot carry every exception (StopIteration)."""
    try:
        return handler(message), None
    except BaseException as error:  # noqa: BLE001 (the caller raises it again)
        return None, error
