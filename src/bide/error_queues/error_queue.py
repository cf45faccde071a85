"""Error and dead-letter queues, and the operations on their messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from bide.client.client import Client
from bide.delay.allowed_targets import ANY_TARGET, AllowedTargets
from bide.delay.protocol import check_name
from bide.durations import DelayLike, format_delay, parse_delay
from bide.error_queues.browser import PREFETCH, QueueBrowser, browse
from bide.error_queues.delay_queues import refuse_delay_queue, refuse_delay_target
from bide.error_queues.delivery_count import DeliveryCountReset
from bide.error_queues.grouping import By, Group, Groups, Summary
from bide.error_queues.operation import WINDOW, Operation, Pace, Progress, evenly
from bide.error_queues.operation_result import OperationResult
from bide.error_queues.operator_log import OperatorLogWriter, new_run
from bide.errors import (
    BideError,
    InvalidDelayError,
    InvalidInputError,
    NotFoundError,
    PublishRefusedError,
    TargetNotFoundError,
)
from bide.messages.prepared import PreparedMessage
from bide.recoverability import redrive
from bide.recoverability.failed import FailedMessage
from bide.recoverability.selection import Selection
from bide.runtime.logs import logger
from bide.topology import Queue, Topology

log = logger(__name__)

ALL: Final = Selection()

KEEP: Final = timedelta(days=30)
"""How long an archive keeps a message by default."""

_SENDING: Final = frozenset({"retry", "replay", "edit"})
"""Operations that send messages to the queues that they failed on."""

_PACED_PREFETCH: Final = 5 * WINDOW
"""Prefetch for messages that leave at a pace: a larger one would keep more messages from other consumers."""

_MAX_KEEP: Final = timedelta(days=3650)


class ErrorQueue:
    """Browses failed messages, and retries, edits, archives or discards them.

    It works on the error queue of a :class:`bide.Endpoint` or of NServiceBus, and on any dead-letter queue.

    Nothing is lost: a message is acknowledged only after the broker has confirmed the copy that replaces it. A crash
    can repeat the copies that were unconfirmed and those confirmed just before, see :data:`WINDOW`.

    Browsing takes nothing out of the queue. But before RabbitMQ 4.3 a quorum queue counts browsing as a delivery of
    every message in it, and drops or dead-letters a message that reaches the delivery limit. A message that comes close
    to the limit is therefore replaced by a copy at the end of the queue.

    Queues of delay infrastructures are refused, because their messages would be delivered early or wait again. The
    undeliverable queue is accepted, except for retries: :mod:`~bide.error_queues.undeliverable` sends its messages.

    Args:
        client: an open client; it is not closed.
        queue: the queue's name.
        management_url: URL of the broker's management API, for reading the delivery limit; see
            :class:`bide.Endpoint`. If the API does not answer, RabbitMQ's default limit is assumed.
        audit: record every operation in the stream ``bide.audit``.
        operator: the operator's name in these records; None for the user of the operating system and the host name.

    Attributes:
        interrupted: the partial result of the last operation if it was cancelled, or failed after some messages.

    Raises:
        InvalidNameError: *queue* cannot be the name of a queue.
    """

    def __init__(
        self,
        client: Client,
        queue: str = "error",
        *,
        management_url: str | None = None,
        audit: bool = True,
        operator: str | None = None,
    ) -> None:
        check_name("queue", queue)
        self.queue = queue
        self._client = client
        self._management_url = management_url
        self._audited = audit
        self._operator = operator
        self._warned = False
        self.interrupted: OperationResult | None = None

    @property
    def archive_queue(self) -> str:
        """The name of the queue of archived messages."""
        return f"{self.queue}.archive"

    # -- browsing

    async def messages(self, selection: Selection = ALL) -> AsyncGenerator[FailedMessage, None]:
        """Iterate over the selected messages, in the order of the queue.

        Until the iteration ends, no other consumer gets messages of the queue. If you leave the loop early, close the
        iterator (``contextlib.aclosing``).

        Raises:
            DelayQueueError: the queue belongs to a delay infrastructure.
            TargetNotFoundError: the queue does not exist.
            BrokerError: the broker refuses, or cannot be reached.
        """
        now = self._client.now()
        async with self._look(await self._count_reset(self.queue)) as browser:
            async for held in browser:
                try:
                    if selection.holds(held.message, now):
                        yield held.message
                finally:
                    # Also if the caller leaves the loop here.
                    await browser.release(held)

    async def get(self, name: str) -> FailedMessage:
        """Find a message by its id or message id.

        Raises:
            NotFoundError: the queue has no such message.
            TargetNotFoundError: the queue does not exist.
            BrokerError: the broker refuses, or cannot be reached.
        """
        async with aclosing(self.messages(Selection(ids=frozenset({name})))) as messages:
            async for message in messages:
                return message
        raise NotFoundError(f"the queue {self.queue!r} has no message {name!r}: ErrorQueue.messages(...) lists the ids")

    async def groups(self, selection: Selection = ALL, *, by: By = "exception") -> list[Group]:
        """Group the selected messages by exception, type or key, the largest group first.

        Raises:
            BrokerError: as :meth:`messages`.
        """
        groups = Groups(by)
        async for message in self.messages(selection):
            groups.add(message)
        return groups.largest_first()

    async def summary(self, selection: Selection = ALL) -> Summary:
        """Count the selected messages by queue, reason, exception and other properties.

        Raises:
            BrokerError: as :meth:`messages`.
        """
        summary = Summary()
        async for message in self.messages(selection):
            summary.add(message)
        return summary

    async def count(self, selection: Selection = ALL) -> int:
        """Count the selected messages.

        Raises:
            BrokerError: as :meth:`messages`.
        """
        return (await self.summary(selection)).total

    # -- operations

    async def retry(
        self,
        selection: Selection,
        *,
        to: str | None = None,
        over: DelayLike | None = None,
        allow: Iterable[str] | None = None,
        progress: Progress | None = None,
    ) -> OperationResult:
        """Send the selected messages back to the queues that they failed on.

        With *over*, messages leave the error queue one after the other while this call runs. If it is cancelled, the
        rest stay.

        Args:
            to: a queue to send all of them to instead.
            over: spread the messages evenly over this time.
            allow: patterns of the queues that messages may be sent to, see :class:`bide.Relay`; None allows all. Every
                client that may write to the error queue can put any queue into a message's headers. Messages for other
                queues stay.
            progress: called with the number of finished messages and the total.

        Raises:
            InvalidInputError: an argument is invalid.
            BrokerError: the broker refuses, or cannot be reached.
        """
        if to is not None:
            await refuse_delay_target(self._client, to, self._management_url)
        allowed = ANY_TARGET if allow is None else AllowedTargets.of(allow)
        period = None if over is None else parse_delay(over)
        total = await self.count(selection) if period or progress else 0
        run = new_run()

        def copy(message: FailedMessage, _: int) -> PreparedMessage:
            found = redrive.back(message, to=to, run=run)
            allowed.check(found.target)
            return found

        details = {"to": to, "allow": None if allow is None else list(allowed.patterns)}
        return await self._move("retry", self.queue, selection, copy, details, progress, total, over=period, run=run)

    async def replay(
        self,
        due: Callable[[FailedMessage], datetime | None],
        *,
        taken: Callable[[FailedMessage], None] | None = None,
        to: str | None = None,
        total: int = 0,
        details: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> OperationResult:
        """Send messages back to the queues that they failed on, each at its own time.

        Messages leave the error queue in its order: none leaves before those in front of it. If this call is cancelled,
        the rest stay.

        Args:
            due: returns when a message is to be sent (a time in the past means now), or None to leave it in the queue.
                It can be called more than once for a message.
            taken: called with each message that is sent or cannot be sent, before *due* is called for the next one.
            to: a queue to send all of them to instead.
            total: number of messages after which the operation ends; 0 for no limit.
            details: why these messages were selected, for the operator log.
            progress: called with the number of finished messages and the total.

        Raises:
            InvalidInputError: an argument is invalid.
            BrokerError: the broker refuses, or cannot be reached.
        """
        if to is not None:
            await refuse_delay_target(self._client, to, self._management_url)
        run, begin = new_run(), self._client.now()

        def copy(message: FailedMessage, _: int) -> PreparedMessage:
            if taken is not None:
                taken(message)
            return redrive.back(message, to=to, run=run)

        def pace(message: FailedMessage, _: int) -> float | None:
            return None if (moment := due(message)) is None else (moment - begin).total_seconds()

        return await self._move(
            "replay", self.queue, ALL, copy, {"to": to, **(details or {})}, progress, total, pace=pace, run=run
        )

    async def edit(
        self,
        name: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        without: frozenset[str] = frozenset(),
        to: str | None = None,
        allow: Iterable[str] | None = None,
    ) -> str:
        """Send one message back with another body or other headers, and return its new message id.

        Args:
            name: its id or message id.
            body: the new body; None keeps the old one.
            headers: headers to add or replace.
            without: headers to remove.
            to: a queue to send it to instead of the one that it failed on.
            allow: patterns of the queues that it may be sent to, as in :meth:`retry`.

        Raises:
            NotFoundError: the queue has no such message.
            TargetNotAllowedError: no pattern matches the queue that it would go to.
            ReservedHeaderError: a header belongs to bide or the broker.
            InvalidInputError: nothing would change, the queue that it failed on is unknown, or the message cannot be
                sent.
            TargetNotFoundError: the queue that it would go to does not exist.
            PublishRefusedError: that queue refuses the message.
            BrokerError: the broker refuses, or cannot be reached.
        """
        allowed = ANY_TARGET if allow is None else AllowedTargets.of(allow)
        await self._count_reset(self.queue, sends=True)
        if to is not None:
            await refuse_delay_target(self._client, to, self._management_url)
        old = await self.get(name)
        new = redrive.edited(old, body=body, headers=headers or {}, without=without, to=to)
        allowed.check(new.target)
        details = {"headers": sorted(headers or {}), "without": sorted(without), "body": body is not None,
                   "to": to, "new_message_id": new.message_id}  # fmt: skip
        first = True

        def copy(_: FailedMessage, __: int) -> PreparedMessage | None:
            # The queue can hold several messages with this id, such as copies; only the first of them is edited.
            nonlocal first
            chosen, first = first, False
            return new if chosen else None

        result = await self._move("edit", self.queue, Selection(ids=frozenset({old.id})), copy, details, None, 1)
        if (error := result.error) is not None:
            kind = type(error) if isinstance(error, TargetNotFoundError | PublishRefusedError) else InvalidInputError
            raise kind(f"the message {name!r} was not sent and is still in {self.queue!r}: {error}") from error
        if not result.done:
            raise NotFoundError(f"the message {name!r} left the queue {self.queue!r} in the meantime")
        return new.message_id

    async def archive(
        self,
        selection: Selection,
        *,
        keep: DelayLike = KEEP,
        over: DelayLike | None = None,
        progress: Progress | None = None,
    ) -> OperationResult:
        """Move the selected messages to :attr:`archive_queue`, where the broker deletes them after a time.

        Args:
            keep: how long the archive keeps them, at least 1 s.
            over: spread the messages evenly over this time, as :meth:`retry` does.
            progress: called with the number of finished messages and the total.

        Raises:
            InvalidInputError: an argument is invalid.
            BrokerError: the broker refuses, or cannot be reached.
        """
        retention = parse_delay(keep)
        if not timedelta(seconds=1) <= retention <= _MAX_KEEP:
            raise InvalidDelayError(
                f"an archive keeps messages for 1 s to {format_delay(_MAX_KEEP)}, not {format_delay(retention)}"
            )
        period = None if over is None else parse_delay(over)
        if not await self._client.exists(self.archive_queue):
            await self._client.declare(Topology(queues=[Queue.quorum(self.archive_queue)]))
        total = await self.count(selection) if period or progress else 0

        def copy(message: FailedMessage, _: int) -> PreparedMessage:
            return redrive.archived(message, queue=self.archive_queue, keep=retention, now=self._client.now())

        details = {"keep": format_delay(retention)}
        return await self._move("archive", self.queue, selection, copy, details, progress, total, over=period)

    async def unarchive(self, selection: Selection, *, progress: Progress | None = None) -> OperationResult:
        """Move the selected messages of :attr:`archive_queue` back to the error queue.

        Raises:
            TargetNotFoundError: there is no archive.
            BrokerError: the broker refuses, or cannot be reached.
        """
        await self._count_reset(self.queue)
        archive = ErrorQueue(self._client, self.archive_queue, management_url=self._management_url)
        total = await archive.count(selection) if progress else 0

        def copy(message: FailedMessage, _: int) -> PreparedMessage:
            return redrive.unarchived(message, queue=self.queue)

        return await self._move("unarchive", self.archive_queue, selection, copy, {}, progress, total)

    async def discard(
        self, selection: Selection, *, over: DelayLike | None = None, progress: Progress | None = None
    ) -> OperationResult:
        """Delete the selected messages. Their ids are recorded first.

        Args:
            over: spread the messages evenly over this time, as :meth:`retry` does.
            progress: called with the number of finished messages and the total.

        Raises:
            InvalidInputError: an argument is invalid.
            BrokerError: the broker refuses, or cannot be reached.
        """
        period = None if over is None else parse_delay(over)
        total = await self.count(selection) if period or progress else 0
        return await self._move("discard", self.queue, selection, None, {}, progress, total, over=period)

    async def _move(
        self,
        operation: str,
        queue: str,
        selection: Selection,
        copy: Callable[[FailedMessage, int], PreparedMessage | None] | None,
        details: Mapping[str, Any],
        progress: Progress | None,
        total: int,
        *,
        over: timedelta | None = None,
        pace: Pace | None = None,
        run: str | None = None,
    ) -> OperationResult:
        if over is not None:
            details, pace = {**details, "over": format_delay(over)}, evenly(over, total)
        self.interrupted = None
        count_reset = await self._count_reset(queue, sends=operation in _SENDING)
        name = run or new_run()
        log_writer = None
        if self._audited:
            log_writer = OperatorLogWriter(
                self._client, operation=operation, queue=self.queue, run=name, operator=self._operator
            )
            given = {name: value for name, value in details.items() if value is not None}
            await log_writer.begin({"selection": selection.to_dict(), **given})
        running = Operation(name, self._client, log_writer, selection, copy, pace, progress, total)
        try:
            while True:
                async with self._look(count_reset, prefetch=PREFETCH if pace is None else _PACED_PREFETCH) as browser:
                    wait = await running.process(browser)
                if wait is None:
                    break
                await asyncio.sleep(wait)  # until the next message is due
                count_reset = count_reset.renewed()
        except (asyncio.CancelledError, BideError) as error:
            if running.done or not isinstance(error, BideError):
                self.interrupted = replace(running.result(), left=running.left)
            if log_writer is not None and self.interrupted is not None:
                cause = {"error": str(error)} if isinstance(error, BideError) else {}
                await log_writer.interrupt({**self.interrupted.to_dict(), "left": running.left, **cause})
            raise
        result = running.result()
        if log_writer is not None:
            await log_writer.end(result.to_dict())
        return result

    async def _count_reset(self, queue: str, *, sends: bool = False) -> DeliveryCountReset:
        """Read the arguments and the delivery limit of a queue, and refuse queues of delay infrastructures.

        Args:
            sends: whether the operation sends messages to the queues that they failed on.

        Raises:
            DelayQueueError: the queue belongs to a delay infrastructure.
        """
        return await refuse_delay_queue(self._client, queue, self._management_url, sends=sends)

    @asynccontextmanager
    async def _look(self, count_reset: DeliveryCountReset, *, prefetch: int = PREFETCH) -> AsyncIterator[QueueBrowser]:
        queue = count_reset.queue
        async with browse(self._client.url, queue, count_reset, prefetch=prefetch) as browser:
            if browser.others and not self._warned:
                self._warned = True
                log.warning("%r has other consumers (%d): messages that they hold are not seen", queue, browser.others)
            yield browser
