"""One message in the endpoint's hands: handled, and settled by what its handler and the retry policy say."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from bide.durations import format_delay
from bide.endpoint.dedup import FailedAttempts, HandledMessages
from bide.endpoint.event import Event, Kind
from bide.endpoint.handlers import Handlers, beyond_us
from bide.endpoint.limiter import Limiter
from bide.endpoint.observer import Observer
from bide.endpoint.settings import EndpointSettings
from bide.errors import BrokerError, ClosedError, DeliveryLostError, InvalidInputError, PoisonMessageError
from bide.recoverability import copies
from bide.recoverability.decision import Decision, Discard, Park, RetryLater, RetryNow
from bide.recoverability.exception_text import MESSAGE_BYTES, STACK_BYTES, ExceptionText
from bide.recoverability.failed import group_of, message_type
from bide.recoverability.failure import Failure
from bide.recoverability.history import History, expiry_of
from bide.recoverability.report import FailureReport
from bide.runtime.backoff import Backoff
from bide.runtime.cancellation import from_within, is_cancelled, outcome_of
from bide.runtime.logs import logger

if TYPE_CHECKING:
    from bide.client.message import Message
    from bide.messages.prepared import PreparedMessage

log = logger(__name__)

HOST: Final = socket.gethostname()

_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 15.0
_BOUNDS: Final = ((MESSAGE_BYTES, STACK_BYTES), (1024, 2048), (256, 0))
"""How much of an exception is kept: less where the message's own headers leave no room in a frame."""


class Worker:
    """Takes one message at a time to its end; many of its calls run at once.

    Args:
        forward: publishes a message, confirmed.
        now: tells the time.
        deduplicate: how long a handled message's id is remembered; None does not look for duplicates.
    """

    def __init__(
        self,
        rules: EndpointSettings,
        *,
        handlers: Handlers,
        gate: Limiter,
        forward: Callable[[PreparedMessage], Awaitable[Any]],
        now: Callable[[], datetime],
        observers: Sequence[Observer],
        deduplicate: timedelta | None,
    ) -> None:
        self._rules = rules
        self._handlers = handlers
        self._gate = gate
        self._forward = forward
        self._now = now
        self._observers = observers
        self._attempts = FailedAttempts()
        self._handled = HandledMessages(deduplicate) if deduplicate is not None else None
        # Messages that were handled, or replaced, and whose acknowledgement was lost: the broker delivers them again.
        self._unacknowledged = HandledMessages(timedelta(hours=1))

    async def take(self, message: Message) -> None:
        """Handle a message and settle it."""
        key = (message.message_id, message.history.retries, message.history.deliveries)
        try:
            await self._take(message, key)
        except ClosedError:
            raise
        except Exception as error:
            if message.settled:
                raise
            # Left unsettled it would take up a place until the endpoint stops.
            what = ExceptionText.of(error).stack
            log.error("%s: %s is parked, for want of a way with it: %s", self._rules.endpoint, message.message_id, what)
            event = self._event("parked", message, message.delivery_count + 1)
            await self._park(message, key, message.history, error, event, None)

    async def _take(self, message: Message, key: Any) -> None:
        if message.message_id is not None and message.redelivered and key in self._unacknowledged:
            await self._settle(message.ack, key)
            return
        if message.expired:
            await self._expire(message)
            return
        seen = self._attempts.of(key)
        if message.redelivered and not message.counted and not seen:
            # The queue does not count, and we do not know why it comes back: perhaps a process died with it. The copy
            # counts, so that a message which kills its process does not do so for ever.
            await self._replace(message, key)
            return
        attempt = _attempt(message, len(seen))
        if attempt > self._rules.poison_after:
            await self._give_up(message, key, attempt)
            return
        if self._handled is None or message.message_id is None:
            await self._handle(message, key, attempt)
            return
        if not await self._handled.begin(message.message_id):
            await self._tell(self._event("duplicate", message, attempt))
            await self._settle(message.ack, key)
            return
        try:
            if await self._handle(message, key, attempt):
                self._handled.add(message.message_id)
        finally:
            self._handled.end(message.message_id)

    async def _handle(self, message: Message, key: Any, attempt: int) -> bool:
        """Call the handler; True if the message was handled."""
        started = self._now()
        if (error := await self._failure(message)) is not None:
            await self._failed(message, key, attempt, started, error)
            return False
        self._gate.succeeded()
        self._attempts.forget(key)
        await self._tell(self._event("processed", message, attempt, started=started))
        await self._settle(message.ack, key)
        return True

    async def _failure(self, message: Message) -> BaseException | None:
        """Call the handler; what it raises, if that is a failure of its own."""
        entered = [(one, context) for one in self._observers if (context := self._entered(one, message)) is not None]
        error = await self._raised(message)
        for observer, context in reversed(entered):
            self._leave(observer, context, error)
        if error is None:
            return None
        if isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit):
            # The program ends, and gives the message back with its connection.
            raise error
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            # We are stopping: the message returns to its queue when the channel closes.
            raise error
        # Not by assignment, which an exception may refuse: a frozen dataclass does.
        error = error.with_traceback(beyond_us(error.__traceback__))
        return from_within("the handler", error) if isinstance(error, asyncio.CancelledError) else error

    async def _raised(self, message: Message) -> BaseException | None:
        """What the handler raises.

        Dealt with where it is caught, that would be the context of whatever is raised there, which logs print.
        """
        try:
            await self._handlers.handle(message)
        except BaseException as error:  # noqa: BLE001 (whatever a handler raises)
            return error
        return None

    def _entered(self, observer: Observer, message: Message) -> AbstractContextManager[None] | None:
        """What an observer has around the handler, unless the observer fails: that must not stop messages."""
        try:
            context = observer.handling(message, endpoint=self._rules.endpoint, queue=self._rules.queue)
            context.__enter__()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 (told below)
            failure = error
        else:
            return context
        self._complain(observer, "failed", failure)
        return None

    def _leave(self, observer: Observer, context: AbstractContextManager[None], error: BaseException | None) -> None:
        try:
            if error is None:
                context.__exit__(None, None, None)
            else:
                context.__exit__(type(error), error, error.__traceback__)
        except (Exception, asyncio.CancelledError) as broken:  # noqa: BLE001 (told below: the message goes its way)
            failure = broken
        else:
            return
        self._complain(observer, "failed", failure)

    def _complain(self, observer: Observer, what: str, error: Exception | asyncio.CancelledError) -> None:
        if isinstance(error, asyncio.CancelledError):
            # Nothing of ours is awaited where it comes from: it is the observer's own.
            error = from_within("the observer", error)
        found = ExceptionText.of(error)
        name = type(observer).__name__
        log.error("%s: %s %s: %s: %s", self._rules.endpoint, name, what, found.type, found.message, exc_info=error)

    async def _failed(self, message: Message, key: Any, attempt: int, started: datetime, error: BaseException) -> None:
        now = self._now()
        times = self._attempts.add(key, now) if message.message_id is not None else (now,)
        history = message.history.with_failures(times, attempts=attempt, expires_at=_expiry(message))
        failure = Failure(
            endpoint=self._rules.endpoint,
            queue=self._rules.queue,
            message_id=message.message_id,
            message_type=message_type(message.raw.values),
            headers=message.headers,
            error=error,
            attempt=attempt,
            delayed_retries=history.retries,
            first_failed_at=history.first_failed_at or now,
            failed_at=now,
            expires_at=history.expires_at,
        )
        decision = self._decide(failure)
        if isinstance(decision, RetryNow) and attempt >= self._rules.poison_after:
            # The next delivery would be taken for that of a poison message, and nobody would know of this exception.
            decision = Park()
        explanation = ExceptionText.of(error)
        event = replace(
            self._event("failed", message, attempt, started=started),
            exception=explanation.type,
            text=explanation.message,
            group=group_of(explanation.type, explanation.frame),
        )
        wait = decision.delay if isinstance(decision, RetryLater) else timedelta(0)
        if history.expires_at is not None and wait > history.expires_at - now and not isinstance(decision, Park):
            await self._expire(message, event)
        elif isinstance(decision, RetryNow):
            log.info("%s: %s failed (attempt %d): %s", self._rules.endpoint, message.message_id, attempt, event.text)
            await self._tell(event)
            if message.counted and not message.redelivered:
                # The sender's copy of another queue's count, which would be taken for this queue's. Ours has none.
                await self._replace(message, key)
            else:
                await self._settle(message.requeue, None)
        elif isinstance(decision, RetryLater):
            await self._retry_later(message, key, history, wait, error, event)
        elif isinstance(decision, Discard):
            log.warning("%s: %s is discarded: %s", self._rules.endpoint, message.message_id, decision.reason)
            await self._tell(replace(event, kind="discarded"))
            await self._settle(message.ack, key)
        else:
            await self._park(message, key, history, error, event, decision.queue)
        await self._gate.failed()

    def _decide(self, failure: Failure) -> Decision:
        try:
            decision: object = self._rules.policy(failure)
        except Exception:
            log.exception("%s: the retry policy itself failed: the message is parked", self._rules.endpoint)
            return Park()
        if isinstance(decision, RetryNow | RetryLater | Park | Discard):
            return decision
        log.error("%s: the retry policy returned %r: the message is parked", self._rules.endpoint, decision)
        return Park()

    async def _retry_later(
        self, message: Message, key: Any, history: History, delay: timedelta, error: BaseException, event: Event
    ) -> None:
        copy = copies.later(
            message.as_sent(),
            message.body,
            queue=self._rules.queue,
            history=history,
            places=self._rules.places,
            delay=delay,
            now=event.ended_at,
            nservicebus=self._rules.nservicebus,
            sent_by=message.sent_by,
        )
        log.warning(
            "%s: %s failed, and is tried again in %s: %s",
            event.endpoint,
            message.message_id,
            format_delay(delay),
            event.text,
        )
        try:
            await self._send(copy)
        except InvalidInputError as refused:
            # Longer than the infrastructure holds, or no room for more headers.
            log.error("%s: %s cannot be retried later: %s", event.endpoint, message.message_id, refused)
            await self._park(message, key, history, error, event, None)
            return
        await self._tell(replace(event, kind="retried", delay=delay, to=self._rules.queue))
        await self._settle(message.ack, key)

    async def _park(
        self, message: Message, key: Any, history: History, error: BaseException, event: Event, queue: str | None
    ) -> None:
        queue = queue or self._rules.error_queue
        history = replace(history, first_due=copies.senders_due(message.as_sent(), history))
        for message_bytes, stack_bytes in _BOUNDS:
            report = FailureReport(
                endpoint=self._rules.endpoint,
                queue=self._rules.queue,
                failed_at=event.ended_at,
                explanation=ExceptionText.of(error, message_bytes=message_bytes, stack_bytes=stack_bytes),
                history=history,
                host=HOST,
                process=os.getpid(),
            )
            copy = copies.parked(
                message.as_sent(),
                message.body,
                queue=queue,
                headers=report.headers(nservicebus=self._rules.nservicebus),
                sent_by=message.sent_by,
            )
            try:
                await self._send(copy)
            except InvalidInputError as refused:
                log.warning("%s: %s is parked with less of its story: %s", event.endpoint, message.message_id, refused)
            else:
                break
        else:
            # Its own headers fill the frame. It must not stay in hand, where nothing would come after it.
            log.critical("%s: %s is parked without its story", event.endpoint, message.message_id)
            await self._send(copies.raw(message.as_sent(), message.body, queue=queue))
        what = ExceptionText.of(error)
        log.error(
            "%s: %s failed for good, and is parked in %s: %s", event.endpoint, event.message_id, queue, what.message
        )
        event = replace(event, exception=what.type, text=what.message, group=group_of(what.type, what.frame))
        await self._tell(replace(event, kind="parked", to=queue))
        await self._settle(message.ack, key)

    async def _give_up(self, message: Message, key: Any, attempt: int) -> None:
        error = PoisonMessageError(
            f"the message was delivered {attempt - 1} times without an end: the processes that had it died, or were "
            f"stopped (limit: {self._rules.poison_after})"
        )
        # It was not raised here: a stack trace of this place would say nothing.
        history = message.history.with_failures((), attempts=attempt - 1, expires_at=_expiry(message))
        await self._park(message, key, history, error, self._event("parked", message, attempt - 1), None)

    async def _replace(self, message: Message, key: Any) -> None:
        sent, history = message.as_sent(), message.history
        # The copy has no due time of its own by which it could be seen to be late.
        delayed = copies.senders_due(sent, history) is not None
        expires_at = _expiry(message) if delayed else history.expires_at
        history = replace(history, deliveries=history.deliveries + 1, expires_at=expires_at)
        copy = copies.counted(
            sent,
            message.body,
            queue=self._rules.queue,
            history=history,
            places=self._rules.places,
            sent_by=message.sent_by,
        )
        await self._send(copy)
        await self._settle(message.ack, key)

    async def _expire(self, message: Message, event: Event | None = None) -> None:
        event = event or self._event("expired", message, message.delivery_count + 1)
        log.info("%s: %s is past its expiration, and not tried again", event.endpoint, message.message_id)
        await self._tell(replace(event, kind="expired"))
        # As the broker does with an expired message: dead-lettered where the queue says so, else dropped.
        await self._settle(message.reject, None)

    async def _send(self, copy: PreparedMessage) -> None:
        """Publish until the broker has it: the message stays in hand meanwhile, so nothing is lost.

        Raises:
            InvalidInputError: it can never be sent.
        """
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            try:
                await self._forward(copy)
            except ClosedError:
                raise
            except BrokerError as error:
                log.error("%s: cannot pass on %s yet: %s", self._rules.endpoint, copy.message_id, error)
                await asyncio.sleep(backoff.next())
            else:
                return

    async def _settle(self, how: Callable[[], Awaitable[None]], key: Any | None) -> None:
        """Settle the message; what is done with is remembered by its key where the broker will deliver it again."""
        try:
            await how()
        except DeliveryLostError as error:
            log.info("%s: %s", self._rules.endpoint, error)
            if key is not None:
                self._unacknowledged.add(key)
        except InvalidInputError:
            log.debug("%s: the handler settled its message itself", self._rules.endpoint)
        if key is not None:
            self._attempts.forget(key)

    async def _tell(self, event: Event) -> None:
        for observer in self._observers:
            _, failure = await outcome_of(observer.happened, event, what="the observer")
            if failure is not None:
                self._complain(observer, f"was not told of {event.kind}", failure)

    def _event(self, kind: Kind, message: Message, attempt: int, *, started: datetime | None = None) -> Event:
        return Event(
            kind=kind,
            endpoint=self._rules.endpoint,
            queue=self._rules.queue,
            host=HOST,
            process=os.getpid(),
            message_id=message.message_id,
            message_type=message_type(message.raw.values),
            attempt=attempt,
            retries=message.history.retries,
            sent_at=message.sent_at,
            due_at=copies.senders_due(message.as_sent(), message.history),
            delivered_at=message.received_at,
            started_at=started,
            ended_at=self._now(),
            lateness=None if message.history.retries else message.lateness,
        )


def _attempt(message: Message, failed_here: int) -> int:
    """The number of the attempt that comes now, since the last delayed retry."""
    # What stands in the headers of a first delivery is not this queue's count.
    before = message.delivery_count if message.counted and message.redelivered else failed_here
    return message.history.deliveries + before + 1


def _expiry(message: Message) -> datetime | None:
    try:
        return message.history.expires_at or expiry_of(
            expiration=message.expiration,
            due=copies.senders_due(message.as_sent(), message.history),
            sent_at=message.sent_at,
            received_at=message.received_at,
        )
    except OverflowError:
        # After the year 9999: a timestamp that is none.
        return None
