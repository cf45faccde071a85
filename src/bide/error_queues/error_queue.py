"""An error or dead-letter queue, and what can be done with its messages."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from bide.client.client import Client
from bide.delay import recognition
from bide.delay.allowed_targets import ANY_TARGET, AllowedTargets
from bide.delay.protocol import check_name
from bide.durations import DelayLike, format_delay, parse_delay
from bide.error_queues.browser import PREFETCH, QueueBrowser, looking
from bide.error_queues.delay_queues import refuse_delay_queue
from bide.error_queues.delivery_count import DeliveryCountReset
from bide.error_queues.grouping import By, Group, Groups, Summary
from bide.error_queues.operation import WINDOW, Operation, Pace, Progress
from bide.error_queues.operation_result import OperationResult
from bide.error_queues.operator_log import Audit
from bide.errors import (
    BideError,
    InvalidDelayError,
    NotFoundError,
    TargetNotFoundError,
)
from bide.messages.prepared import PreparedMessage
from bide.recoverability import redrive
from bide.recoverability.failed import FailedMessage
from bide.recoverability.selection import Selection
from bide.runtime.logs import logger
from bide.topology import Queue, Topology

log = logger(__name__)

_TO_RECORD: Final = 5.0
"""Seconds that recording an interruption may take."""

ALL: Final = Selection()

KEEP: Final = timedelta(days=30)
"""How long an archive keeps a message."""

_SENDING: Final = frozenset({"retry", "replay", "edit"})
"""Operations that send messages to the queues that they failed on."""

_AHEAD: Final = 5 * WINDOW
"""Messages that the broker sends ahead of those that leave at a pace: more would be kept from others for nothing."""

_LONGEST_KEEP: Final = timedelta(days=3650)


class ErrorQueue:
    """Look at failed messages, and decide what becomes of them.

    Any queue will do: one that :class:`bide.Endpoint` parks in, one of NServiceBus's, or anybody's dead-letter queue.

    Nothing is lost: a message is acknowledged only after the broker has confirmed the copy that takes its place. A
    crash repeats at most the messages that were on their way, and those of the last moment, see :data:`WINDOW`.

    Looking takes nothing out of the queue. But a quorum queue counts it as a delivery of every message in it (before
    RabbitMQ 4.3), and gives a message up at its delivery limit. One that comes near to it is replaced by a copy, which
    stands at the end of the queue.

    Queues of delay infrastructures are refused, because their messages would arrive early, or wait anew. The queue for
    undeliverable messages can be looked at, archived and emptied; ``bide delay resend --allow ...`` sends its messages.

    Args:
        client: opened; it is not closed.
        queue: the queue's name.
        management_url: of the broker's management API, which tells the queue's delivery limit; see
            :class:`bide.Endpoint`. Where it does not answer, RabbitMQ's default limit is assumed.
        audit: record every operation in the stream ``bide.audit``.

    Attributes:
        interrupted: what the last operation had done when it was cancelled, and what it left; None if it was not.

    Raises:
        InvalidNameError: the name cannot be one.
    """

    def __init__(
        self, client: Client, queue: str = "error", *, management_url: str | None = None, audit: bool = True
    ) -> None:
        check_name("queue", queue)
        self.queue = queue
        self._client = client
        self._management_url = management_url
        self._audited = audit
        self._said = False
        self.interrupted: OperationResult | None = None

    @property
    def archive_queue(self) -> str:
        """Where its archived messages are."""
        return f"{self.queue}.archive"

    # -- looking

    async def messages(self, selection: Selection = ALL) -> AsyncGenerator[FailedMessage, None]:
        """The chosen messages, in their order in the queue.

        As long as this goes on nobody else gets them: who breaks out of the loop closes the iterator
        (``contextlib.aclosing``).

        Raises:
            DelayQueueError: it is a queue of a delay infrastructure.
            TargetNotFoundError: there is no such queue.
            BrokerError: the broker cannot be reached, or refuses.
        """
        now = self._client.now()
        async with self._look(await self._renewal(self.queue)) as look:
            async for held in look:
                try:
                    if selection.holds(held.message, now):
                        yield held.message
                finally:
                    # Also where nobody asks for more.
                    await look.release(held)

    async def get(self, name: str) -> FailedMessage:
        """One message, by its id or message id.

        Raises:
            NotFoundError: there is none.
            TargetNotFoundError: there is no such queue.
            BrokerError: the broker cannot be reached, or refuses.
        """
        async with aclosing(self.messages(Selection(ids=frozenset({name})))) as messages:
            async for message in messages:
                return message
        raise NotFoundError(f"no message {name!r} is in the queue {self.queue!r}: 'bide errors list' shows their ids")

    async def groups(self, selection: Selection = ALL, *, by: By = "exception") -> list[Group]:
        """The chosen messages in groups, the largest first.

        Raises:
            BrokerError: as :meth:`messages`.
        """
        groups = Groups(by)
        async for message in self.messages(selection):
            groups.add(message)
        return groups.largest_first()

    async def summary(self, selection: Selection = ALL) -> Summary:
        """The chosen messages in figures.

        Raises:
            BrokerError: as :meth:`messages`.
        """
        summary = Summary()
        async for message in self.messages(selection):
            summary.add(message)
        return summary

    async def count(self, selection: Selection = ALL) -> int:
        """How many are chosen.

        Raises:
            BrokerError: as :meth:`messages`.
        """
        return (await self.summary(selection)).total

    # -- deciding

    async def retry(
        self,
        selection: Selection,
        *,
        to: str | None = None,
        over: DelayLike | None = None,
        allow: Iterable[str] | None = None,
        progress: Progress | None = None,
    ) -> OperationResult:
        """Send the chosen messages back to the queues that they failed on.

        With *over*, messages leave the error queue one after the other, for as long as this runs. When it is cancelled,
        no more of them leave.

        Args:
            to: a queue to send all of them to instead.
            over: spread them evenly over this time.
            allow: patterns of the queues that messages are sent to, see :class:`bide.Relay`; None for any. Anybody who
                may write to the error queue can name any queue in a message's headers. Other messages stay.
            progress: told how far it is.

        Raises:
            InvalidInputError: a value cannot be used.
            BrokerError: the broker cannot be reached, or refuses.
        """
        if to is not None:
            await self._check_target(to)
        allowed = ANY_TARGET if allow is None else AllowedTargets.of(allow)
        period = timedelta(0) if over is None else parse_delay(over)
        total = await self.count(selection) if period or progress else 0
        run = _new_run()

        def copy(message: FailedMessage, _: int) -> PreparedMessage:
            found = redrive.back(message, to=to, run=run)
            allowed.check(found.target)
            return found

        def pace(_: FailedMessage, place: int) -> float:
            return period.total_seconds() * place / max(total, 1)

        details = {
            "to": to,
            "over": None if over is None else format_delay(period),
            "allow": None if allow is None else list(allowed.patterns),
        }
        return await self._move(
            "retry", self.queue, selection, copy, details, progress, total, pace=pace if period else None, run=run
        )

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
        """Send messages back to the queues that they failed on, each at a time of its own.

        They leave the error queue in its order, so that none leaves before those that stand before it. When this is
        cancelled, no more of them leave.

        Args:
            due: says when a message is due there, in the past for at once, or None to leave it where it is. It may be
                asked more than once about a message that it chooses.
            taken: told of each message that is sent, or cannot be, before *due* is asked about the next one.
            to: a queue to send all of them to instead.
            total: messages to move, after which the operation ends; 0 if not known.
            details: why these, for the record.
            progress: told how far it is.

        Raises:
            InvalidInputError: a value cannot be used.
            BrokerError: the broker cannot be reached, or refuses.
        """
        if to is not None:
            await self._check_target(to)
        run, begin = _new_run(), self._client.now()

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
        """Send one message back with another body or other headers; returns its new message id.

        Args:
            name: its id or message id.
            body: None keeps the old one.
            headers: set in addition to, or in place of, the old ones.
            without: headers that are taken away.
            to: another queue than the one that it failed on.
            allow: patterns of the queues that it may go to, as in :meth:`retry`.

        Raises:
            NotFoundError: there is no such message.
            TargetNotAllowedError: no pattern matches its queue.
            ReservedHeaderError: a header is bide's or the broker's own.
            InvalidInputError: nothing would change, or nothing tells where it failed.
            BrokerError: the broker cannot be reached, or refuses.
        """
        allowed = ANY_TARGET if allow is None else AllowedTargets.of(allow)
        await self._renewal(self.queue, sends=True)
        if to is not None:
            await self._check_target(to)
        old = await self.get(name)
        new = redrive.edited(old, body=body, headers=headers or {}, without=without, to=to)
        allowed.check(new.target)
        details = {"headers": sorted(headers or {}), "without": sorted(without), "body": body is not None,
                   "to": to, "new_message_id": new.message_id}  # fmt: skip
        first = True

        def copy(_: FailedMessage, __: int) -> PreparedMessage | None:
            # Another with the same message id may have failed in another queue: that one is not meant.
            nonlocal first
            chosen, first = first, False
            return new if chosen else None

        moved = await self._move("edit", self.queue, Selection(ids=frozenset({old.id})), copy, details, None, 1)
        for reason in moved.kept:
            raise TargetNotFoundError(f"the message {name!r} was not sent, and is still in {self.queue!r}: {reason}")
        if not moved.done:
            raise NotFoundError(f"the message {name!r} left the queue {self.queue!r} in the meantime")
        return new.message_id

    async def archive(
        self, selection: Selection, *, keep: DelayLike = KEEP, progress: Progress | None = None
    ) -> OperationResult:
        """Put the chosen messages aside, into :attr:`archive_queue`; the broker drops them after a while.

        Args:
            keep: how long it keeps them, at least 1 s.
            progress: told how far it is.

        Raises:
            InvalidInputError: a value cannot be used.
            BrokerError: the broker cannot be reached, or refuses.
        """
        retention = parse_delay(keep)
        if not timedelta(seconds=1) <= retention <= _LONGEST_KEEP:
            raise InvalidDelayError(
                f"an archive keeps messages for 1 s to {format_delay(_LONGEST_KEEP)}, not {format_delay(retention)}"
            )
        if not await self._client.exists(self.archive_queue):
            await self._client.declare(Topology(queues=[Queue.quorum(self.archive_queue)]))
        now = self._client.now()
        total = await self.count(selection) if progress else 0

        def copy(message: FailedMessage, _: int) -> PreparedMessage:
            return redrive.archived(message, queue=self.archive_queue, keep=retention, now=now)

        details = {"keep": format_delay(retention)}
        return await self._move("archive", self.queue, selection, copy, details, progress, total)

    async def unarchive(self, selection: Selection, *, progress: Progress | None = None) -> OperationResult:
        """Put the chosen messages of :attr:`archive_queue` back into the error queue.

        Raises:
            TargetNotFoundError: there is no archive.
            BrokerError: the broker cannot be reached, or refuses.
        """
        await self._renewal(self.queue)
        archive = ErrorQueue(self._client, self.archive_queue, management_url=self._management_url)
        total = await archive.count(selection) if progress else 0

        def copy(message: FailedMessage, _: int) -> PreparedMessage:
            return redrive.unarchived(message, queue=self.queue)

        return await self._move("unarchive", self.archive_queue, selection, copy, {}, progress, total)

    async def discard(self, selection: Selection, *, progress: Progress | None = None) -> OperationResult:
        """Drop the chosen messages for good. Their ids are recorded before they go.

        Raises:
            BrokerError: the broker cannot be reached, or refuses.
        """
        total = await self.count(selection) if progress else 0
        return await self._move("discard", self.queue, selection, None, {}, progress, total)

    # -- the machinery

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
        pace: Pace | None = None,
        run: str | None = None,
    ) -> OperationResult:
        self.interrupted = None
        renewal = await self._renewal(queue, sends=operation in _SENDING)
        name = run or _new_run()
        audit = Audit(self._client, operation=operation, queue=self.queue, run=name) if self._audited else None
        if audit is not None:
            given = {name: value for name, value in details.items() if value is not None}
            await audit.begin({"selection": selection.to_dict(), **given})
        work = Operation(name, self._client, audit, selection, copy, pace, progress, total)
        try:
            while True:
                async with self._look(renewal, prefetch=PREFETCH if pace is None else _AHEAD) as look:
                    wait = await work.go_through(look)
                if wait is None:
                    break
                await asyncio.sleep(wait)
                renewal = renewal.anew()
        except asyncio.CancelledError:
            self.interrupted = replace(work.moved(), left=work.left)
            if audit is not None:
                try:
                    async with asyncio.timeout(_TO_RECORD):
                        await audit.interrupt({**self.interrupted.to_dict(), "left": work.left})
                except (BideError, TimeoutError) as error:
                    # The broker may be the reason for the interruption: the caller is told all the same.
                    log.warning("the interruption of %s was not recorded: %s", operation, error)
            raise
        moved = work.moved()
        if audit is not None:
            await audit.end(moved.to_dict())
        return moved

    async def _renewal(self, queue: str, *, sends: bool = False) -> DeliveryCountReset:
        """What a look at a queue needs to know of it.

        Args:
            sends: whether its messages are to be sent where they failed.

        Raises:
            DelayQueueError: it is a queue of a delay infrastructure.
        """
        return await refuse_delay_queue(self._client, queue, self._management_url, sends=sends)

    async def _check_target(self, queue: str) -> None:
        """Refuse a queue that messages cannot be sent to.

        Raises:
            InvalidNameError: the name cannot be one.
            DelayQueueError: it is a queue of a delay infrastructure.
        """
        check_name("queue", queue)
        found = await DeliveryCountReset.of(self._client, queue, self._management_url)
        recognition.refuse_target(queue, found.arguments)

    @asynccontextmanager
    async def _look(self, renewal: DeliveryCountReset, *, prefetch: int = PREFETCH) -> AsyncIterator[QueueBrowser]:
        queue = renewal.queue
        async with looking(self._client.url, queue, renewal, prefetch=prefetch) as look:
            if look.others and not self._said:
                self._said = True
                log.warning("%r has other consumers (%d): messages that they hold are not seen", queue, look.others)
            yield look


def _new_run() -> str:
    """A name for an operation."""
    return secrets.token_hex(6)
