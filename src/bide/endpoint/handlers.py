"""The functions that handle messages, by message type."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import PurePath
from types import TracebackType
from typing import Any, Final, TypeVar

from bide.client.message import Message
from bide.errors import InvalidInputError, UnknownMessageTypeError
from bide.recoverability.failed import message_type

Handler = Callable[[Message], Awaitable[None] | None]
"""An ``async def`` function, which runs in the event loop, or a plain one, which runs in a thread."""

_HERE: Final = PurePath(__file__).parent

AnyHandler = TypeVar("AnyHandler", bound=Callable[[Message], Any])


class Handlers:
    """Which function handles which message.

    Args:
        threads: for so many plain functions at once.
    """

    def __init__(self, threads: int) -> None:
        self._by_type: dict[str | None, Callable[[Message], Any]] = {}
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._by_type)

    def add(self, handler: AnyHandler, type: str | None) -> AnyHandler:
        """Let a function handle the messages of a type; of every type that has no other if it is None.

        Raises:
            InvalidInputError: it is no function, or that type has one already.
        """
        if inspect.isclass(handler) or not callable(handler):
            raise InvalidInputError(f"the handler {handler!r} is no function: give one that takes a bide.Message")
        if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
            # Called, it would do nothing, and the message would be acknowledged.
            raise InvalidInputError(
                f"the handler {_name(handler)} is a generator, which nobody runs: use no yield in it"
            )
        if type in self._by_type:
            what = "every other type" if type is None else f"the type {type!r}"
            raise InvalidInputError(
                f"there is a handler for {what} already, {_name(self._by_type[type])}: register one per type"
            )
        self._by_type[type] = handler
        return handler

    def check(self, message: Message) -> None:
        """See that somebody handles this message.

        Raises:
            UnknownMessageTypeError: nobody does.
        """
        self._of(message)

    async def handle(self, message: Message) -> None:
        """Call the message's handler and wait for its end; what it raises is raised here.

        Raises:
            UnknownMessageTypeError: no handler is registered for its type.
        """
        handler = self._of(message)
        if _is_async(handler):
            await handler(message)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="bide-handler")
        context = copy_context()
        # A thread cannot be cancelled. What it comes to after a cancellation has no one to go to any more.
        work = asyncio.get_running_loop().run_in_executor(self._pool, context.run, _outcome, handler, message)
        result, error = await asyncio.shield(work)
        if error is not None:
            raise error
        if inspect.isawaitable(result):
            await result

    def close(self) -> None:
        """Let the threads go; those that still run end by themselves."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _of(self, message: Message) -> Callable[[Message], Any]:
        kind = message_type(message.raw.values)
        handler = self._by_type.get(kind) or self._by_type.get(None)
        if handler is None:
            known = ", ".join(sorted(repr(one) for one in self._by_type if one is not None)) or "none"
            raise UnknownMessageTypeError(
                f"no handler for the message type {kind!r} (there are: {known}): register one with "
                "@endpoint.handler, or one for every type"
            )
        return handler


def beyond_us(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the handler on, without the calls of bide and the thread pool that led to it."""
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_ours(file: str) -> bool:
    path = PurePath(file)
    return path.parent == _HERE or path.parts[-3:] == ("concurrent", "futures", "thread.py")


def _is_async(handler: Callable[[Message], Any]) -> bool:
    call = getattr(handler, "__call__", None)  # noqa: B004 (whether its __call__ is async)
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)


def _name(handler: Callable[[Message], Any]) -> str:
    return str(getattr(handler, "__qualname__", handler))


def _outcome(handler: Callable[[Message], Any], message: Message) -> tuple[Any, BaseException | None]:
    """What a handler returns or raises. A future does not carry all of that: who waits for a StopIteration waits on."""
    try:
        return handler(message), None
    except BaseException as error:  # noqa: BLE001 (raised again by who waits for it)
        return None, error
