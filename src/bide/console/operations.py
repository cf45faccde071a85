"""Operations on failed messages in the background: progress, stop, result."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

from bide.console.values import iso
from bide.errors import BideError, InvalidInputError, NotFoundError
from bide.runtime.logs import logger

log = logger(__name__)

_MAX_ENDED: Final = 50
"""The maximum number of ended operations that are listed."""

_MAX_RUNNING: Final = 8
"""The maximum number of operations that run at the same time."""

OperationState = Literal["running", "done", "stopped", "failed"]
OperationWork = Callable[["BackgroundOperation"], Awaitable[dict[str, Any]]]


@dataclass(slots=True, kw_only=True)
class BackgroundOperation:
    """An operation, also after its end.

    Attributes:
        id: its number.
        name: what it does: ``retry``.
        queue: the queue whose messages it processes.
        text: the chosen messages and the pace, as text.
        done: number of processed messages.
        total: number of messages; 0 before they were counted.
        result: the result; of an operation that was stopped or failed, the result until then.
        error: the text of the error if it failed.
    """

    id: str
    name: str
    queue: str
    text: str
    state: OperationState = "running"
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    ended: datetime | None = None
    done: int = 0
    total: int = 0
    result: dict[str, Any] | None = None
    error: str | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def progress(self, done: int, total: int) -> None:
        """Record the progress."""
        self.done, self.total = done, total

    def to_dict(self) -> dict[str, Any]:
        """The operation as JSON."""
        return {
            "id": self.id,
            "name": self.name,
            "queue": self.queue,
            "text": self.text,
            "state": self.state,
            "started": iso(self.started),
            "ended": None if self.ended is None else iso(self.ended),
            "done": self.done,
            "total": self.total,
            "result": self.result,
            "error": self.error,
        }


class BackgroundOperations:
    """The operations of a virtual host."""

    def __init__(self) -> None:
        self._all: dict[str, BackgroundOperation] = {}
        self._numbers = itertools.count(1)

    def start(self, name: str, queue: str, text: str, work: OperationWork) -> BackgroundOperation:
        """Start an operation.

        Args:
            work: runs the operation, reports its progress, and returns its result. If it is cancelled or fails, it may
                set ``result`` before.

        Raises:
            InvalidInputError: an operation on the queue is running, or too many are.
        """
        running = [one for one in self._all.values() if one.state == "running"]
        if any(one.queue == queue for one in running):
            raise InvalidInputError(f"an operation on {queue!r} is running: wait until it ends, or stop it")
        if len(running) >= _MAX_RUNNING:
            raise InvalidInputError(f"{len(running)} operations are running: wait until one ends, or stop one")
        found = BackgroundOperation(id=str(next(self._numbers)), name=name, queue=queue, text=text)
        self._all[found.id] = found
        ended = [one.id for one in self._all.values() if one.state != "running"]
        for one in ended[: max(len(ended) - _MAX_ENDED, 0)]:
            del self._all[one]
        found.task = asyncio.create_task(_run(found, work))
        return found

    async def stop(self, number: str) -> BackgroundOperation:
        """Stop an operation, and wait for its end. Messages that were processed stay processed.

        Raises:
            NotFoundError: there is no such operation.
        """
        found = self._all.get(number)
        if found is None or found.task is None:
            raise NotFoundError(f"there is no operation {number!r}")
        found.task.cancel()
        await asyncio.wait([found.task])
        return found

    def list(self) -> list[BackgroundOperation]:
        """The operations, the latest first."""
        return [*reversed(self._all.values())]

    async def close(self) -> None:
        """Stop all operations."""
        tasks = [one.task for one in self._all.values() if one.task is not None and not one.task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _run(found: BackgroundOperation, work: OperationWork) -> None:
    try:
        found.result = await work(found)
        found.state = "done"
    except asyncio.CancelledError:
        found.state = "stopped"
    except BideError as error:
        found.state, found.error = "failed", str(error)
    except Exception as error:
        log.exception("the operation %s on %s failed", found.name, found.queue)
        found.state, found.error = "failed", f"internal error: {type(error).__name__}: {error}"
    finally:
        found.ended = datetime.now(UTC)
