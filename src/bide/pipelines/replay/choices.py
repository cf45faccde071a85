"""Choices of a replay of an audit: the folder that records what was chosen and sent.

A read removes nothing from a stream, so a folder records what was sent. It has a subfolder for each choice of messages,
with the chosen messages, their due times, and a ledger of the parts that were sent. Another run of the same replay
finishes the last choice, and then makes a new choice without the messages of earlier ones. Both engines read and write
the same files, so each of them finishes what the other has begun.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from bide.errors import InvalidInputError, NotFoundError
from bide.pipelines.ledger import Ledger

PART_ROWS: Final = 2_000
"""Messages in a part. After a task is killed, at most one part is sent again."""

CHOSEN_FOLDER: Final = "chosen"
"""The folder of the chosen messages in a ledger."""

FAILURE_KEY: Final = ("message_id", "queue", "failed_at")
"""The columns that identify a failure."""

COLUMNS: Final = (*FAILURE_KEY, "stream", "offset", "deliver_at", "part")
"""The columns of the chosen messages."""

_MAX_PARTS: Final = 10_000
"""The largest number of parts of a replay that is spread over time, because each part is a file in the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotReplayedCounts:
    """Counts of messages that were found in an audit and are not replayed.

    Attributes:
        parked: messages that were left out because they are in an error queue.
        unseen: messages that no tap has seen.
        dropped: messages that the streams of the taps do not have any more.
    """

    parked: int
    unseen: int
    dropped: int

    def refuse_missing(self) -> None:
        """Refuse a replay without the bodies of all messages.

        Raises:
            NotFoundError: bodies are missing.
        """
        missing = [
            f"{count:,} {what}"
            for count, what in (
                (self.unseen, "that no tap has seen (the tap was off, or the messages were never delayed)"),
                (self.dropped, "that the retention of a tap's stream has removed, or whose stream was deleted"),
            )
            if count
        ]
        if missing:
            raise NotFoundError(
                f"the bodies of some messages are missing, and nothing was sent: {' and '.join(missing)}. Send the "
                "others with skip_missing=True; parked messages are in an error queue too, which queue=... replays"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The folder with the choices of a replay, and the ledgers of what was sent.

    Attributes:
        folder: a path, or a URI that Arrow supports. On Spark, the driver and all executors have to access it.
    """

    folder: str

    def lock(self) -> AbstractContextManager[None]:
        """Lock the folder against other runs. The lock of a dead process is taken over.

        Hold the lock from the call of :meth:`unfinished` until all messages are sent: two runs at the same time would
        choose the same messages.

        Raises:
            FolderInUseError: on entering the context, if another run holds the lock.
            InvalidInputError: on entering the context, if the folder cannot be created or written to.
        """
        return Ledger(self.folder).lock()

    def ledger(self, number: int) -> Ledger:
        """The ledger of a choice; the first one is number 1."""
        return Ledger(f"{self.folder.rstrip('/')}/{number:04}")

    def count(self) -> int:
        """The number of choices so far."""
        number = 0
        while self.ledger(number + 1).head() is not None:
            number += 1
        return number

    def all(self) -> list[Ledger]:
        """The ledgers of the choices so far."""
        return [self.ledger(number + 1) for number in range(self.count())]

    def next(self) -> Ledger:
        """The ledger of the next choice."""
        return self.ledger(self.count() + 1)

    def unfinished(self, plan: str, broker: str) -> Ledger | None:
        """The ledger of the last choice, if some of its messages were not sent.

        Raises:
            InvalidInputError: the choice was made with other options.
        """
        number = self.count()
        if not number:
            return None
        ledger = self.ledger(number)
        head = ledger.head()
        assert head is not None
        if sum(one.sent + one.rejected for one in ledger.parts()) >= head.rows:
            return None
        if (head.plan, head.broker) != (plan, broker):
            raise InvalidInputError(
                f"the ledger {self.folder} has an unfinished replay to the broker {head.broker}, with other options: "
                "repeat that replay to finish it, or name another ledger"
            )
        return ledger


def rows_per_part(messages: int, over: timedelta, part_rows: int) -> int:
    """The number of messages in a part.

    Each part is sent when its last message is due, so parts of about one second keep messages on time.

    Args:
        messages: the number of chosen messages.
        over: the time over which they are spread.
        part_rows: the largest number of messages in a part.
    """
    if not over:
        return part_rows
    seconds = min(max(over.total_seconds(), 1), _MAX_PARTS)
    return min(part_rows, max(math.ceil(messages / seconds), 1))


def order_of(over: timedelta) -> tuple[str, ...]:
    """The columns by which the chosen messages are divided into parts."""
    order = ("stream", "offset", "queue")
    return ("deliver_at", *order) if over else order


def run_of(ledger: Ledger) -> str:
    """An id of the operation, which stays the same when an interrupted replay is continued."""
    return hashlib.sha256(ledger.folder.encode()).hexdigest()[:12]
