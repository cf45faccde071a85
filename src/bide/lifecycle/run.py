"""One operation under way: the chosen messages, so many of them at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from bide.client import Client
from bide.errors import BideError, InvalidInputError, PublishRefusedError, TargetNotFoundError, UnroutableError
from bide.lifecycle.audit import IDS_PER_RECORD, Audit
from bide.lifecycle.held import Held
from bide.lifecycle.look import Look
from bide.outgoing import Outgoing
from bide.recoverability.failed import FailedMessage

WINDOW: Final = 200
"""Messages on their way at once: so many may be repeated after a crash, and those that were confirmed within the last
moment, because acknowledgements are gathered."""

Progress = Callable[[int, int], None]
"""Called with the number of messages that are done, and of those chosen."""

_CANNOT: Final = (TargetNotFoundError, UnroutableError, PublishRefusedError, InvalidInputError)
"""What is wrong with one message, and not with the others."""


@dataclass(slots=True)
class Run:
    """The chosen messages on their way, :data:`WINDOW` at once.

    Attributes:
        name: of the operation.
        copy: makes the copy that takes a message's place, from it and its number; None drops the messages.
        total: how many are chosen, for ``progress``.
        seen: messages that were looked at.
        done: messages that it was done to.
        queues: those that went to a queue, by its name.
        kept: chosen messages that stay, by the reason.
    """

    name: str
    client: Client
    look: Look
    audit: Audit | None
    copy: Callable[[FailedMessage, int], Outgoing | None] | None
    progress: Progress | None
    total: int
    seen: int = 0
    done: int = 0
    queues: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    _taken: set[str] = field(default_factory=set)
    _chosen: int = 0
    _ids: list[str] = field(default_factory=list)
    _held: list[Held] = field(default_factory=list)
    _sending: set[asyncio.Task[None]] = field(default_factory=set)
    _failed: BaseException | None = None

    def is_back(self, message: FailedMessage, begun: datetime) -> bool:
        """Whether it was sent back by this run, and failed again at once.

        Copies of it that others made meanwhile tell it by their time alone.
        """
        if message.history.run == self.name:
            return True
        return message.id in self._taken and message.failed_at is not None and message.failed_at >= begun

    async def take(self, held: Held) -> None:
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
            self.kept[str(error)] += 1
            await self.look.release(held)
            return
        if copy is None:
            await self.look.release(held)
            return
        while len(self._sending) >= WINDOW:
            await asyncio.wait(self._sending, return_when=asyncio.FIRST_COMPLETED)
        self._raise()
        task = asyncio.create_task(self._send(held, copy))
        self._sending.add(task)
        task.add_done_callback(self._sent)
        if len(self._ids) >= IDS_PER_RECORD:
            await self._record()

    async def finish(self) -> None:
        """Wait for those on their way."""
        if self._sending:
            await asyncio.wait(set(self._sending))
        if self._failed is None:
            await self._drop()
        await self._record()
        self._raise()

    async def _send(self, held: Held, copy: Outgoing) -> None:
        try:
            await self.client.forward(copy)
        except _CANNOT as error:
            self.kept[_reason(error, str(copy.target)[2:])] += 1
            await self.look.release(held)
            return
        except BideError:
            await self.look.release(held)
            raise
        self.look.ack(held)
        self._ids.append(held.message.id)
        self.queues[str(copy.target)[2:]] += 1
        self._count()

    async def _drop(self) -> None:
        held, self._held = self._held, []
        self._ids += [one.message.id for one in held]
        await self._record()
        for one in held:
            self.look.ack(one)
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
