"""The observers of one endpoint, whose errors must not stop messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from bide.endpoint.event import Event
from bide.endpoint.observer import Observer
from bide.recoverability.exception_text import ExceptionText
from bide.runtime.cancellation import from_within, outcome_of
from bide.runtime.logs import logger

if TYPE_CHECKING:
    from bide.client.message import Message

log = logger(__name__)


class Observers:
    """Calls the observers of an endpoint, and logs their errors.

    Args:
        observers: the observers, in the order in which they are called.
        endpoint: the endpoint's name.
        queue: the queue that its messages come from.
    """

    def __init__(self, observers: Sequence[Observer], *, endpoint: str, queue: str) -> None:
        self._observers = observers
        self._endpoint = endpoint
        self._queue = queue

    def enter(self, message: Message) -> Callable[[BaseException | None], None]:
        """Enter the contexts of all observers, and return a function that leaves them with the handler's error."""
        entered = [(one, context) for one in self._observers if (context := self._enter(one, message)) is not None]

        def leave(error: BaseException | None) -> None:
            for observer, context in reversed(entered):
                self._exit(observer, context, error)

        return leave

    async def notify(self, event: Event) -> None:
        """Report an event to all observers."""
        for observer in self._observers:
            _, failure = await outcome_of(observer.happened, event, what="the observer")
            if failure is not None:
                self._log(observer, f"failed on the event {event.kind!r}", failure)

    def _enter(self, observer: Observer, message: Message) -> AbstractContextManager[None] | None:
        try:
            context = observer.handling(message, endpoint=self._endpoint, queue=self._queue)
            context.__enter__()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 (logged below)
            failure = error
        else:
            return context
        self._log(observer, "failed", failure)
        return None

    def _exit(self, observer: Observer, context: AbstractContextManager[None], error: BaseException | None) -> None:
        try:
            if error is None:
                context.__exit__(None, None, None)
            else:
                context.__exit__(type(error), error, error.__traceback__)
        except (Exception, asyncio.CancelledError) as raised:  # noqa: BLE001 (logged below)
            failure = raised
        else:
            return
        self._log(observer, "failed", failure)

    def _log(self, observer: Observer, what: str, error: Exception | asyncio.CancelledError) -> None:
        if isinstance(error, asyncio.CancelledError):
            # bide cancels nothing while an observer runs, so the observer let its own cancellation escape.
            error = from_within("the observer", error)
        text = ExceptionText.of(error)
        name = type(observer).__name__
        log.error("%s: %s %s: %s: %s", self._endpoint, name, what, text.type, text.message, exc_info=error)
