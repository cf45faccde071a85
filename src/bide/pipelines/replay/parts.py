"""Parts of a replay of an audit: each is sent as a whole, and then added to the ledger."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from bide.durations import from_microseconds
from bide.pipelines.ledger import Ledger, LedgerPart
from bide.pipelines.replay.tap_reader import ReplayMessage, ReplayRun, send_back


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSender:
    """Sends parts, in this process or in a task of Spark.

    Attributes:
        ledger: the ledger of the choice.
        replay: the operation.
        skip_missing: leave out messages that their streams do not have any more.
    """

    ledger: Ledger
    replay: ReplayRun
    skip_missing: bool

    def send(self, number: int, wanted: Sequence[ReplayMessage]) -> LedgerPart:
        """Send a part, and add it to the ledger.

        Returns:
            The part, without messages if it was sent before.

        Raises:
            NotFoundError: a stream has dropped a message since the choice was made.
            BrokerError: the broker cannot be reached, or refuses a message.
        """
        # Another attempt at the same task may have sent the part.
        if self.ledger.get(number) is not None:
            return LedgerPart(part=number, sent=0, rejected=0)
        sent = asyncio.run(send_back(wanted, self.replay, skip_missing=self.skip_missing))
        part = LedgerPart(part=number, sent=sent, rejected=len(wanted) - sent)
        self.ledger.add(part)
        return part

    def send_when_due(
        self, parts: Iterable[tuple[int, Sequence[ReplayMessage]]], due: Mapping[int, int], *, first: int
    ) -> None:
        """Send parts one after the other, each when its last message is due.

        An interruption takes effect after the current part. If the first message is overdue, all due times are shifted.

        Args:
            parts: the numbers of the parts and their messages, in the order of the due times.
            due: the due time of the last message of each part, in microseconds since the Unix epoch.
            first: the due time of the first message.

        Raises:
            NotFoundError: see :meth:`send`.
            BrokerError: see :meth:`send`.
        """
        late = max(datetime.now(UTC) - from_microseconds(first), timedelta(0))
        # On an interruption, the end of the block waits until the part is sent and recorded.
        with ThreadPoolExecutor(1, thread_name_prefix="replay") as thread:
            # If an interruption came while the executor starts its thread, it would not wait for the thread.
            thread.submit(int).result()
            for number, wanted in parts:
                wait = from_microseconds(due[number]) + late - datetime.now(UTC)
                time.sleep(max(wait.total_seconds(), 0.0))  # until the part is due
                thread.submit(self.send, number, wanted).result()
