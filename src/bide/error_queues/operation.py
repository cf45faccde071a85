"""A running operation on the selected messages of a queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from bide.client.client import Client
from bide.error_queues.browsed_message import BrowsedMessage
from bide.error_queues.browser import QueueBrowser
from bide.error_queues.operation_result import OperationResult
from bide.error_queues.operator_log import IDS_PER_RECORD, OperatorLogWriter
from bide.errors import BideError, InvalidInputError, PublishRefusedError, TargetNotFoundError, UnroutableError
from bide.messages.prepared import PreparedMessage
from bide.recoverability.failed import FailedMessage
from bide.recoverability.selection import Selection

WINDOW: Final = 200
"""How many copies may be unconfirmed at the same time. A crash can repeat these, and those that were confirmed just
before, because acks are sent in batches."""

_BATCH_SECONDS: Final = 1.0
"""Messages that are discarded at a pace are recorded together if they leave within this time."""

HOLD: Final = 30.0
"""Seconds for which one pass over the queue holds messages that leave at a pace.

Between two passes, other consumers can receive them.

The broker closes the channel of a consumer that holds a message for longer than its ``consumer_timeout``, by default 30
minutes.
"""

Progress = Callable[[int, int], None]
"""Called with the number of finished messages and the total: once at the start, and after each message."""

Pace = Callable[[FailedMessage, int], float | None]
"""Returns when a message leaves, in seconds since the start, or None to leave it in the queue.

The arguments are the message and its number from 0. It can be called more than once for a message. Messages leave in
the order of the queue.
"""

_MESSAGE_ERRORS: Final = (TargetNotFoundError, UnroutableError, PublishRefusedError, InvalidInputError)
"""Errors that concern one message, and not other messages."""


@dataclass(slots=True)
class Operation:
    """An operation on the selected messages, with up to :data:`WINDOW` unconfirmed copies.

    Attributes:
        name: the name of the operation.
        client: sends the copies.
        log_writer: records the ids of processed messages; None for no record.
        selection: selects the messages.
        copy: makes the copy that replaces a message, from the message and its number; None discards the messages.
        pace: decides when each message leaves; None for as soon as possible.
        progress: called after each message.
        total: number of selected messages, or 0 if they were not counted. With a pace, no more than these leave.
        seen: number of messages that were browsed.
        done: number of messages that were processed.
        queues: number of messages sent, by queue.
        kept: number of selected messages that stay in the queue, by reason.
        kept_error: why the first of them stays; None if all were processed.
        found: the ids of the selection that were found.
    """

    name: str
    client: Client
    log_writer: OperatorLogWriter | None
    selection: Selection
    copy: Callable[[FailedMessage, int], PreparedMessage | None] | None
    pace: Pace | None
    progress: Progress | None
    total: int
    seen: int = 0
    done: int = 0
    queues: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    kept_error: BideError | None = None
    found: set[str] = field(default_factory=set)
    _look: QueueBrowser = field(init=False)
    _started_at: datetime = field(init=False)
    _started: float = field(init=False)
    _processed_ids: set[str] = field(default_factory=set)
    _kept_ids: Counter[str] = field(default_factory=Counter)
    _chosen: int = 0
    _ids: list[str] = field(default_factory=list)
    _held: list[BrowsedMessage] = field(default_factory=list)
    _held_at: float = 0.0
    _sending: set[asyncio.Task[None]] = field(default_factory=set)
    _failed: BaseException | None = None

    def __post_init__(self) -> None:
        self._started_at = self.client.now()
        self._started = asyncio.get_running_loop().time()
        if self.progress is not None and self.total:
            self.progress(0, self.total)

    async def process(self, browser: QueueBrowser) -> float | None:
        """Process the selected messages that a browser yields, each when it is due.

        Returns:
            None if the operation is complete; otherwise the seconds until the next message is due, if that is too long
            to hold messages.

        Raises:
            BrokerError: the broker refuses, or cannot be reached.
        """
        self._look = browser
        try:
            return await self._process(browser)
        finally:
            # Unconfirmed copies are settled and recorded before a cancellation continues.
            await _to_its_end(self._finish())

    async def _process(self, browser: QueueBrowser) -> float | None:
        loop = asyncio.get_running_loop()
        latest, gone, seen = loop.time() + HOLD, self.done, 0
        kept_ids = self._kept_ids.copy()
        async for held in browser:
            message = held.message
            if self._failed_again(message):
                await browser.release(held)
                continue
            seen += 1
            self.seen = max(self.seen, gone + seen)
            if kept_ids[message.id]:
                kept_ids[message.id] -= 1
                await browser.release(held)
                continue
            if not self.selection.holds(message, self._started_at):
                await browser.release(held)
                continue
            if self.pace is not None:
                if self.total and self._chosen >= self.total:
                    return None
                after = self.pace(message, self._chosen)
                if after is None:
                    await browser.release(held)
                    continue
                due = self._started + after
                # Each pass processes at least one message.
                if due > latest or (loop.time() > latest and self.done > gone):
                    await browser.release(held)
                    return max(due - loop.time(), 0.0)
                if self._held and due > self._held_at + _BATCH_SECONDS:
                    await self._drop()
                await asyncio.sleep(max(due - loop.time(), 0.0))  # until this message is due
            await self._process_one(held)
            self.found |= self.selection.ids & {message.id, message.message_id}
        return None

    def result(self) -> OperationResult:
        """The result so far."""
        missing = tuple(sorted(self.selection.ids - self.found))
        return OperationResult(
            done=self.done,
            queues=dict(self.queues),
            kept=dict(self.kept),
            seen=self.seen,
            missing=missing,
            error=self.kept_error,
        )

    @property
    def left(self) -> int | None:
        """Number of selected messages that were not processed yet, or None if they were not counted."""
        return max(self.total - self.done - self.kept.total(), 0) if self.total else None

    def _failed_again(self, message: FailedMessage) -> bool:
        """Whether this operation sent the message back and it has failed again already.

        A copy that another client made meanwhile does not have this operation's name. Its time of failure shows it.
        """
        if message.history.run == self.name:
            return True
        return (
            message.id in self._processed_ids
            and message.failed_at is not None
            and message.failed_at >= self._started_at
        )

    async def _process_one(self, held: BrowsedMessage) -> None:
        """Process one message, as soon as fewer than ``WINDOW`` copies are unconfirmed."""
        self._processed_ids.add(held.message.id)
        position, self._chosen = self._chosen, self._chosen + 1
        if self.copy is None:
            if not self._held:
                self._held_at = asyncio.get_running_loop().time()
            self._held.append(held)
            if len(self._held) >= IDS_PER_RECORD:
                await self._drop()
            return
        try:
            copy = self.copy(held.message, position)
        except InvalidInputError as error:
            await self._keep(held, error)
            return
        if copy is None:
            await self._look.release(held)
            return
        while len(self._sending) >= WINDOW:
            await asyncio.wait(self._sending, return_when=asyncio.FIRST_COMPLETED)
        self._raise()
        task = asyncio.create_task(self._send(held, copy))
        self._sending.add(task)
        task.add_done_callback(self._sent)
        if len(self._ids) >= IDS_PER_RECORD:
            await self._record()

    async def _finish(self) -> None:
        """Wait for the unconfirmed copies."""
        if self._sending:
            await asyncio.wait(set(self._sending))
        if self._failed is None:
            await self._drop()
        await self._record()
        self._raise()

    async def _send(self, held: BrowsedMessage, copy: PreparedMessage) -> None:
        try:
            await self.client.forward(copy)
        except _MESSAGE_ERRORS as error:
            await self._keep(held, _kept_error(error, str(copy.target)[2:]))
            return
        except BideError:
            await self._look.release(held)
            raise
        self._look.ack(held)
        self._ids.append(held.message.id)
        self.queues[str(copy.target)[2:]] += 1
        self._count()

    async def _keep(self, held: BrowsedMessage, error: BideError) -> None:
        self.kept_error = self.kept_error or error
        self.kept[str(error)] += 1
        self._kept_ids[held.message.id] += 1
        await self._look.release(held)

    async def _drop(self) -> None:
        # A cancellation in between would leave messages in the queue that are recorded as discarded.
        await _to_its_end(self._record_and_drop())

    async def _record_and_drop(self) -> None:
        held, self._held = self._held, []
        self._ids += [one.message.id for one in held]
        await self._record()
        for one in held:
            self._look.ack(one)
            self._count()

    async def _record(self) -> None:
        ids, self._ids = self._ids, []
        if self.log_writer is not None and ids:
            await self.log_writer.ids(ids)

    def _count(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, max(self.total, self.done))

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed = self._failed or error

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed


def evenly(period: timedelta, total: int) -> Pace | None:
    """The pace of messages that leave evenly spread over a time; None for all at once."""
    between = period.total_seconds() / max(total, 1)
    return (lambda _, position: between * position) if period else None


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Do work, and finish it before a cancellation continues."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _kept_error(error: BideError, queue: str) -> BideError:
    """Why a message stays, in the same words for all messages with that reason."""
    if isinstance(error, UnroutableError | TargetNotFoundError):
        return TargetNotFoundError(f"the queue {queue!r} does not exist: declare it, or name another with to=...")
    if isinstance(error, PublishRefusedError):
        return PublishRefusedError(f"the queue {queue!r} refuses messages: it is full, or has no leader")
    return error
