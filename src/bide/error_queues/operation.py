"""One operation under way: the chosen messages, so many of them at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from bide.client.client import Client
from bide.error_queues.browsed_message import BrowsedMessage
from bide.error_queues.browser import QueueBrowser
from bide.error_queues.operation_result import OperationResult
from bide.error_queues.operator_log import IDS_PER_RECORD, Audit
from bide.errors import BideError, InvalidInputError, PublishRefusedError, TargetNotFoundError, UnroutableError
from bide.messages.prepared import PreparedMessage
from bide.recoverability.failed import FailedMessage
from bide.recoverability.selection import Selection

WINDOW: Final = 200
"""Messages on their way at once: so many may be repeated after a crash, and those that were confirmed within the last
moment, because acknowledgements are gathered."""

HOLD: Final = 30.0
"""Seconds for which messages are held while they leave at a pace: others get to see the queue again after that.

The broker closes the channel of a consumer that holds a message for longer than its ``consumer_timeout``: 30 minutes,
unless it was told otherwise.
"""

Progress = Callable[[int, int], None]
"""Called with the number of messages that are done, and of those chosen: at first, and after each one."""

Pace = Callable[[FailedMessage, int], float | None]
"""When a message leaves: seconds after the beginning, from it and its number; None leaves it in the queue.

It may be asked more than once about a message, and messages leave in the order of the queue.
"""

_CANNOT: Final = (TargetNotFoundError, UnroutableError, PublishRefusedError, InvalidInputError)
"""What is wrong with one message, and not with the others."""


@dataclass(slots=True)
class Operation:
    """The chosen messages on their way, :data:`WINDOW` at once.

    Attributes:
        name: of the operation.
        selection: which messages are chosen.
        copy: makes the copy that takes a message's place, from it and its number; None drops the messages.
        pace: when they leave; None for as soon as they can.
        total: how many are chosen, or 0 where they were not counted. At a pace no more than these leave.
        seen: messages that were looked at.
        done: messages that it was done to.
        queues: those that went to a queue, by its name.
        kept: chosen messages that stay, by the reason.
        found: ids of the selection that messages have.
    """

    name: str
    client: Client
    audit: Audit | None
    selection: Selection
    copy: Callable[[FailedMessage, int], PreparedMessage | None] | None
    pace: Pace | None
    progress: Progress | None
    total: int
    seen: int = 0
    done: int = 0
    queues: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    found: set[str] = field(default_factory=set)
    _look: QueueBrowser = field(init=False)
    _begun: datetime = field(init=False)
    _began: float = field(init=False)
    _taken: set[str] = field(default_factory=set)
    _stay: Counter[str] = field(default_factory=Counter)
    _chosen: int = 0
    _ids: list[str] = field(default_factory=list)
    _held: list[BrowsedMessage] = field(default_factory=list)
    _sending: set[asyncio.Task[None]] = field(default_factory=set)
    _failed: BaseException | None = None

    def __post_init__(self) -> None:
        self._begun = self.client.now()
        self._began = asyncio.get_running_loop().time()
        if self.progress is not None and self.total:
            self.progress(0, self.total)

    async def go_through(self, look: QueueBrowser) -> float | None:
        """Take the chosen messages of a look, each when it is due.

        Returns:
            None at the end; else the seconds until the next message is due, which is too long to hold any meanwhile.

        Raises:
            BrokerError: the broker cannot be reached, or refuses.
        """
        self._look = look
        try:
            return await self._go_through(look)
        finally:
            finishing = asyncio.ensure_future(self._finish())
            try:
                await asyncio.shield(finishing)
            except asyncio.CancelledError:
                # What is on its way is settled and recorded all the same.
                await finishing
                raise

    async def _go_through(self, look: QueueBrowser) -> float | None:
        loop = asyncio.get_running_loop()
        latest, gone, seen = loop.time() + HOLD, self.done, 0
        stay = self._stay.copy()
        async for held in look:
            message = held.message
            if self._is_back(message):
                await look.release(held)
                continue
            seen += 1
            self.seen = max(self.seen, gone + seen)
            if stay[message.id]:
                stay[message.id] -= 1
                await look.release(held)
                continue
            if not self.selection.holds(message, self._begun):
                await look.release(held)
                continue
            if self.pace is not None:
                if self.total and self._chosen >= self.total:
                    return None
                after = self.pace(message, self._chosen)
                if after is None:
                    await look.release(held)
                    continue
                due = self._began + after
                # A look that has taken nothing yet takes one message at least.
                if due > latest or (loop.time() > latest and self.done > gone):
                    await look.release(held)
                    return max(due - loop.time(), 0.0)
                await asyncio.sleep(max(due - loop.time(), 0.0))
            await self._take(held)
            self.found |= self.selection.ids & {message.id, message.message_id}
        return None

    def moved(self) -> OperationResult:
        """What came of it so far."""
        missing = tuple(sorted(self.selection.ids - self.found))
        return OperationResult(
            done=self.done, queues=dict(self.queues), kept=dict(self.kept), seen=self.seen, missing=missing
        )

    @property
    def left(self) -> int | None:
        """Chosen messages that it has not come to, or None where they were not counted."""
        return max(self.total - self.done - self.kept.total(), 0) if self.total else None

    def _is_back(self, message: FailedMessage) -> bool:
        """Whether it was sent back by this run, and failed again at once.

        Copies of it that others made meanwhile tell it by their time alone.
        """
        if message.history.run == self.name:
            return True
        return message.id in self._taken and message.failed_at is not None and message.failed_at >= self._begun

    async def _take(self, held: BrowsedMessage) -> None:
        """Do it to one message, as soon as fewer than ``WINDOW`` are on their way."""
        self._taken.add(held.message.id)
        place, self._chosen = self._chosen, self._chosen + 1
        if self.copy is None:
            self._held.append(held)
            if len(self._held) >= IDS_PER_RECORD:
                await self._drop()
            return
        try:
            copy = self.copy(held.message, place)
        except InvalidInputError as error:
            await self._keep(held, str(error))
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
        """Wait for those on their way."""
        if self._sending:
            await asyncio.wait(set(self._sending))
        if self._failed is None:
            await self._drop()
        await self._record()
        self._raise()

    async def _send(self, held: BrowsedMessage, copy: PreparedMessage) -> None:
        try:
            await self.client.forward(copy)
        except _CANNOT as error:
            await self._keep(held, _reason(error, str(copy.target)[2:]))
            return
        except BideError:
            await self._look.release(held)
            raise
        self._look.ack(held)
        self._ids.append(held.message.id)
        self.queues[str(copy.target)[2:]] += 1
        self._count()

    async def _keep(self, held: BrowsedMessage, reason: str) -> None:
        self.kept[reason] += 1
        self._stay[held.message.id] += 1
        await self._look.release(held)

    async def _drop(self) -> None:
        held, self._held = self._held, []
        self._ids += [one.message.id for one in held]
        await self._record()
        for one in held:
            self._look.ack(one)
            self._count()

    async def _record(self) -> None:
        ids, self._ids = self._ids, []
        if self.audit is not None and ids:
            await self.audit.ids(ids)

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


def _reason(error: Exception, queue: str) -> str:
    """Why messages stay, in words that are the same for all of them."""
    if isinstance(error, UnroutableError | TargetNotFoundError):
        return f"the queue {queue!r} does not exist: declare it, or name another with --to"
    if isinstance(error, PublishRefusedError):
        return f"the queue {queue!r} refuses messages: it is full, or has no leader"
    return str(error)
