"""Processing of one message: call the handler, apply the retry policy, settle."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from bide.client.forwarder import Forwarder
from bide.durations import format_delay
from bide.endpoint.dedup import FailedAttempts, HandledMessages
from bide.endpoint.event import Event, Kind
from bide.endpoint.handlers import Handlers, without_bide_frames
from bide.endpoint.limiter import Limiter
from bide.endpoint.observer import Observer
from bide.endpoint.observers import Observers
from bide.endpoint.service_control import ProcessingReports
from bide.endpoint.settings import EndpointSettings
from bide.errors import (
    ClosedError,
    DeliveryLostError,
    InvalidInputError,
    PoisonMessageError,
)
from bide.recoverability import copies
from bide.recoverability.decision import Decision, Discard, Park, RetryLater, RetryNow
from bide.recoverability.exception_text import MESSAGE_BYTES, STACK_BYTES, ExceptionText
from bide.recoverability.failed import group_of
from bide.recoverability.failure import Failure
from bide.recoverability.history import History, expiry_of
from bide.recoverability.message_types import message_type
from bide.recoverability.report import FailureReport
from bide.runtime.cancellation import from_within, is_cancelled
from bide.runtime.host import HOST, host_id
from bide.runtime.logs import logger

if TYPE_CHECKING:
    from bide.client.message import Message
    from bide.messages.prepared import PreparedMessage

log = logger(__name__)

_TEXT_LIMITS: Final = ((MESSAGE_BYTES, STACK_BYTES), (1024, 2048), (256, 0))
"""Bytes of an exception's message and stack trace to keep. The smaller limits are for messages whose own headers leave
too little room in a frame."""


class Worker:
    """Processes messages; many calls run at the same time.

    Args:
        settings: how the endpoint treats its messages.
        handlers: the handlers by message type.
        limiter: records every success and failure.
        forward: publishes a message and waits for the confirm.
        now: returns the current time.
        observers: receive every event.
        deduplicate: how long the id of a handled message is remembered; None does not look for duplicates.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        *,
        handlers: Handlers,
        limiter: Limiter,
        forward: Callable[[PreparedMessage], Awaitable[Any]],
        now: Callable[[], datetime],
        observers: Sequence[Observer],
        deduplicate: timedelta | None,
    ) -> None:
        self._settings = settings
        self._handlers = handlers
        self._limiter = limiter
        self._forwarder = Forwarder(settings.endpoint, forward)
        self._reports = ProcessingReports(settings, self._forwarder, now=now)
        self._now = now
        self._observers = Observers(observers, endpoint=settings.endpoint, queue=settings.queue)
        self._reports_success = bool(observers or settings.audit_queue)
        self._attempts = FailedAttempts()
        self._handled = HandledMessages(deduplicate) if deduplicate is not None else None
        # Messages that were handled or replaced, but whose ack was lost, so that the broker will deliver them again.
        self._unacknowledged = HandledMessages(timedelta(hours=1))

    async def process(self, message: Message) -> None:
        """Handle a message and settle it."""
        history = message.history
        key = (message.message_id, history.retries, history.deliveries)
        try:
            await self._process(message, key)
        except ClosedError:
            raise
        except Exception as error:
            if message.settled:
                raise
            # An unsettled message would occupy a concurrency slot until the endpoint stops.
            log.error(
                "%s: parking %s after an unexpected error in the retry pipeline: %s",
                self._settings.endpoint,
                message.message_id,
                ExceptionText.of(error).stack,
            )
            event = self._event("parked", message, message.delivery_count + 1)
            await self._park(message, key, message.history, error, event, None)

    async def _process(self, message: Message, key: Any) -> None:
        if message.redelivered and message.message_id is not None and key in self._unacknowledged:
            await self._settle(message.ack, key)
            return
        if message.expired:
            await self._expire(message)
            return
        failed_here = self._attempts.of(key)
        if message.redelivered and not message.counted and not failed_here:
            # The queue does not count deliveries, and the reason for this redelivery is unknown: the message may have
            # killed a process. The copy counts deliveries, so that such a message is parked in the end.
            await self._replace(message, key)
            return
        attempt = _attempt(message, len(failed_here))
        if attempt > self._settings.poison_after:
            await self._park_poison(message, key, attempt)
            return
        if self._handled is None or message.message_id is None:
            await self._handle(message, key, attempt)
            return
        if not await self._handled.begin(message.message_id):
            await self._observers.notify(self._event("duplicate", message, attempt))
            await self._reports.confirm_retry(message)
            await self._settle(message.ack, key)
            return
        try:
            if await self._handle(message, key, attempt):
                self._handled.add(message.message_id)
        finally:
            self._handled.end(message.message_id)

    async def _handle(self, message: Message, key: Any, attempt: int) -> bool:
        """Call the handler, and settle the message by the result; True if the handler succeeded."""
        started = self._now()
        if (error := await self._run_handler(message)) is not None:
            await self._failed(message, key, attempt, started, error)
            return False
        self._limiter.succeeded()
        self._attempts.forget(key)
        # Making an event takes longer than the rest of this method.
        event = self._event("processed", message, attempt, started=started) if self._reports_success else None
        if event is not None:
            await self._observers.notify(event)
        confirmed = await self._reports.confirm_retry(message)
        if event is not None:
            await self._reports.audit(message, event, confirmed=confirmed)
        await self._settle(message.ack, key)
        return True

    async def _run_handler(self, message: Message) -> BaseException | None:
        """Call the handler inside the observers' contexts. Returns its failure; raises if this process is stopping."""
        leave = self._observers.enter(message)
        error: BaseException | None = None
        try:
            await self._handlers.handle(message)
        except BaseException as raised:  # noqa: BLE001 (a handler can raise anything)
            # Processed outside of this block, which would make it the context of every later exception, also in logs.
            error = raised
        leave(error)
        if error is None:
            return None
        if isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit):
            # The program ends; closing the connection requeues the message.
            raise error
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            # The endpoint is stopping; closing the channel requeues the message.
            raise error
        # Not assigned to __traceback__, because an exception that is a frozen dataclass refuses assignments.
        error = error.with_traceback(without_bide_frames(error.__traceback__))
        return from_within("the handler", error) if isinstance(error, asyncio.CancelledError) else error

    async def _failed(self, message: Message, key: Any, attempt: int, started: datetime, error: BaseException) -> None:
        now = self._now()
        times = self._attempts.add(key, now) if message.message_id is not None else (now,)
        history = message.history.with_failures(times, attempts=attempt, expires_at=_expiry(message))
        failure = Failure(
            endpoint=self._settings.endpoint,
            queue=self._settings.queue,
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
        if isinstance(decision, RetryNow) and attempt >= self._settings.poison_after:
            # The next delivery would be parked as poison without calling the handler, and this exception would be lost.
            decision = Park()
        text = ExceptionText.of(error)
        event = replace(
            self._event("failed", message, attempt, started=started),
            exception=text.type,
            text=text.message,
            group=group_of(text.type, text.frame),
        )
        wait = decision.delay if isinstance(decision, RetryLater) else timedelta(0)
        if history.expires_at is not None and wait > history.expires_at - now and not isinstance(decision, Park):
            await self._expire(message, event)
        elif isinstance(decision, RetryNow):
            log.info("%s: %s failed (attempt %d): %s", event.endpoint, message.message_id, attempt, text.line)
            await self._observers.notify(event)
            if message.counted and not message.redelivered:
                # The sender copied another queue's count, which would be mistaken for this queue's count.
                await self._replace(message, key)
            else:
                await self._settle(message.requeue, None)
        elif isinstance(decision, RetryLater):
            pause = format_delay(wait)
            log.warning("%s: %s failed, next attempt in %s: %s", event.endpoint, message.message_id, pause, text.line)
            await self._retry_later(message, key, history, wait, error, event)
        elif isinstance(decision, Discard):
            log.warning("%s: discarding %s: %s", self._settings.endpoint, message.message_id, decision.reason)
            await self._observers.notify(replace(event, kind="discarded"))
            await self._settle(message.ack, key)
        else:
            await self._park(message, key, history, error, event, decision.queue)
        await self._limiter.failed()

    def _decide(self, failure: Failure) -> Decision:
        try:
            decision: object = self._settings.policy(failure)
        except Exception:
            log.exception("%s: the retry policy failed; parking the message", self._settings.endpoint)
            return Park()
        if isinstance(decision, RetryNow | RetryLater | Park | Discard):
            return decision
        log.error("%s: the retry policy returned %r; parking the message", self._settings.endpoint, decision)
        return Park()

    async def _retry_later(
        self, message: Message, key: Any, history: History, delay: timedelta, error: BaseException, event: Event
    ) -> None:
        copy = copies.delayed_retry(
            message.as_sent(),
            message.body,
            queue=self._settings.queue,
            history=history,
            max_failure_times=self._settings.max_failure_times,
            delay=delay,
            now=event.ended_at,
            nservicebus=self._settings.nservicebus,
            sent_by=message.sent_by,
        )
        try:
            await self._forwarder.send(copy)
        except InvalidInputError as refused:
            # The delay is too long for the infrastructure, or the headers of the copy do not fit into a frame.
            log.error("%s: %s cannot be retried later: %s", event.endpoint, message.message_id, refused)
            await self._park(message, key, history, error, event, None)
            return
        await self._observers.notify(replace(event, kind="retried", delay=delay, to=self._settings.queue))
        await self._settle(message.ack, key)

    async def _park(
        self, message: Message, key: Any, history: History, error: BaseException, event: Event, queue: str | None
    ) -> None:
        queue = queue or self._settings.error_queue
        history = replace(history, first_due=copies.senders_due(message.as_sent(), history))
        for message_bytes, stack_bytes in _TEXT_LIMITS:
            report = FailureReport(
                endpoint=self._settings.endpoint,
                queue=self._settings.queue,
                failed_at=event.ended_at,
                explanation=ExceptionText.of(error, message_bytes=message_bytes, stack_bytes=stack_bytes),
                history=history,
                host=HOST,
                process=os.getpid(),
                host_id=host_id(self._settings.endpoint),
            )
            copy = copies.parked(
                message.as_sent(),
                message.body,
                queue=queue,
                headers=report.headers(nservicebus=self._settings.nservicebus),
                sent_by=message.sent_by,
            )
            try:
                await self._forwarder.send(copy)
            except InvalidInputError as refused:
                log.warning("%s: shortening the failure headers of %s: %s", event.endpoint, message.message_id, refused)
            else:
                break
        else:
            # The message's own headers fill the frame. Unsettled, it would occupy a concurrency slot for good.
            log.critical(
                "%s: parking %s without failure headers: its own headers already fill the frame",
                event.endpoint,
                message.message_id,
            )
            await self._forwarder.send(copies.raw(message.as_sent(), message.body, queue=queue))
        text = ExceptionText.of(error)
        log.error("%s: %s failed and was parked in %s: %s", event.endpoint, event.message_id, queue, text.line)
        event = replace(event, exception=text.type, text=text.message, group=group_of(text.type, text.frame))
        await self._observers.notify(replace(event, kind="parked", to=queue))
        await self._settle(message.ack, key)

    async def _park_poison(self, message: Message, key: Any, attempt: int) -> None:
        error = PoisonMessageError(
            f"the message was delivered {attempt - 1} times and never settled, because its processes died or stopped "
            f"(limit: {self._settings.poison_after}): fix what kills them before you retry it"
        )
        # The error has no stack trace, because it was not raised.
        history = message.history.with_failures((), attempts=attempt - 1, expires_at=_expiry(message))
        await self._park(message, key, history, error, self._event("parked", message, attempt - 1), None)

    async def _replace(self, message: Message, key: Any) -> None:
        sent, history = message.as_sent(), message.history
        # The copy is sent without a due time, so the end of the expiration could not be computed from the copy.
        delayed = copies.senders_due(sent, history) is not None
        expires_at = _expiry(message) if delayed else history.expires_at
        history = replace(history, deliveries=history.deliveries + 1, expires_at=expires_at)
        copy = copies.counted(
            sent,
            message.body,
            queue=self._settings.queue,
            history=history,
            max_failure_times=self._settings.max_failure_times,
            sent_by=message.sent_by,
        )
        await self._forwarder.send(copy)
        await self._settle(message.ack, key)

    async def _expire(self, message: Message, event: Event | None = None) -> None:
        event = event or self._event("expired", message, message.delivery_count + 1)
        log.info("%s: %s has expired and is not retried", event.endpoint, message.message_id)
        await self._observers.notify(replace(event, kind="expired"))
        # Rejected, so that the queue dead-letters or drops it, as the broker does with expired messages.
        await self._settle(message.reject, None)

    async def _settle(self, settle: Callable[[], Awaitable[None]], key: Any | None) -> None:
        """Settle the message. With a key, it is remembered as finished if the broker is going to deliver it again."""
        try:
            await settle()
        except DeliveryLostError as error:
            log.info("%s: %s", self._settings.endpoint, error)
            if key is not None:
                self._unacknowledged.add(key)
        except InvalidInputError:
            log.debug("%s: the handler settled its message itself", self._settings.endpoint)
        if key is not None:
            self._attempts.forget(key)

    def _event(self, kind: Kind, message: Message, attempt: int, *, started: datetime | None = None) -> Event:
        return Event(
            kind=kind,
            endpoint=self._settings.endpoint,
            queue=self._settings.queue,
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
    """The number of the current attempt since the last delayed retry."""
    # On a first delivery, a count in the headers belongs to another queue.
    before = message.delivery_count if message.redelivered and message.counted else failed_here
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
        # A sender's timestamp near the year 9999, to which the expiration cannot be added.
        return None
