"""The work of a gate in one partition: reads the log, claims, delivers, reports, answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Final

from bide.client.first_failure import FirstFailure
from bide.errors import (
    BideError,
    ScheduleIndexError,
    ScheduleLogError,
)
from bide.gate.deliverer import Deliverer
from bide.gate.log_reader import LogReader, LogRecord
from bide.gate.log_rebuild import LogOpener
from bide.gate.observer import GateEvent
from bide.gate.partition import PartitionGate
from bide.gate.partition_index import AppliedRecords
from bide.gate.publisher import GatePublisher
from bide.gate.question_consumer import QuestionConsumer
from bide.gate.scheduled_delivery import DeliveryRules
from bide.gate.snapshot_writer import SnapshotWriter
from bide.gate.spread import LeadershipSpread
from bide.runtime.logs import logger
from bide.schedules.encoding import encode
from bide.schedules.records import Beat, Done, ScheduleRecord, Tick

log = logger(__name__)

_LOOK_EVERY: Final = 0.25
"""Seconds after which a gate looks at its clocks, even if nothing has happened."""

_LOOK_AT_GATES_EVERY: Final = 0.05
"""Seconds between two looks at the other gates."""

_CLAIM_AGAIN_AFTER: Final = 0.05
"""Seconds after which a gate looks again for occurrences to claim, if none of the due ones can be claimed."""

_CLAIM_PAUSE: Final = 4
"""The pause after a claim while there are crowded targets, as a multiple of the time that the claim took."""

_FULL_AGAIN_AFTER: Final = 5.0
"""Seconds between two checks whether a full log has more records to read."""

_TICK_EVERY: Final = 3600.0

_CLAIM_AHEAD: Final = 50
"""Milliseconds before its due time from which on a schedule is claimed, together with one that is due earlier. Then its
message only has to be sent at the due time. A schedule that is claimed cannot be cancelled."""

_CLAIM_BY: Final = 25
"""Milliseconds before its due time when a schedule is claimed in any case."""

_MOST_UNSENT: Final = 2000
"""The number of claimed occurrences that are due and wait to be sent above which no more are claimed. Schedules that
are not claimed can still be cancelled."""

_MOST_AHEAD: Final = 1000
"""The number of claimed occurrences, due or not, that wait to be sent from which on only schedules that are due are
claimed."""


class PartitionSession:
    """The work in one partition after its log was opened, until a stop or an error."""

    def __init__(
        self, gate: PartitionGate, publisher: GatePublisher, spread: LeadershipSpread, rules: DeliveryRules
    ) -> None:
        self._gate = gate
        self._publisher = publisher
        self._spread = spread
        self._failure = FirstFailure(publisher.connection)
        self._deliverer = Deliverer(gate, publisher, rules, self._failure.report)
        self._connection = publisher.connection
        self._index = gate.index
        self._leadership = gate.leadership
        self._deliveries = gate.deliveries
        self._snapshots = SnapshotWriter(
            publisher.connection,
            gate.index,
            gate.room,
            gate=gate.gate,
            queue=gate.names.room(gate.number),
            append=self._append_body,
        )
        self._questions = QuestionConsumer(
            publisher,
            gate.names.queries(gate.number),
            gate.index,
            on_question=self._on_question,
            failed=self._failure.report,
        )
        self._wake = gate.wake
        self._is_leading = False
        self._is_letting_go = False
        self._unconfirmed = 0
        self._next_due: int | None = None
        self._has_unread_claim = False
        self._claim_at = 0.0
        self._without = frozenset[str]()
        self._look_at_gates_at = 0.0
        self._look_at_full_log_at = 0.0

    async def run(self) -> None:
        """Work until the partition was let go, or until an error.

        Raises:
            ScheduleIndexError: the index lacks records. Build it anew.
            BideError: the connection was lost, or a channel failed, or the log cannot be used.
        """
        self._leadership.on_connection_lost()
        self._deliveries.on_connection_lost(self._publisher.windows)
        opener = LogOpener(self._connection, self._gate.number, self._gate.names, self._index, self._gate.gate)
        reader, records = await opener.open()
        reading = asyncio.create_task(self._read(reader, records))
        acting = asyncio.create_task(self._act())
        try:
            await self._failure.wait((reading, acting))
            for task in (reading, acting):
                if task.done():
                    task.result()
            self._failure.check()
        finally:
            self._deliverer.close()
            for task in (reading, acting):
                task.cancel()
            await asyncio.gather(reading, acting, return_exceptions=True)
            reader.close()
            self._questions.close()

    def _now(self) -> float:
        return self._connection.monotonic()

    # -- the log

    async def _read(self, reader: LogReader, records: list[LogRecord]) -> None:
        while True:
            while records:
                applied = await self._index.apply(records, is_leading=self._is_leading)
                records = records[applied.count :]
                await self._note(applied)
            records = await reader.batch()

    async def _note(self, applied: AppliedRecords) -> None:
        now = self._now()
        for offset, beat in applied.beats:
            self._look_at_gates_at = now
            self._leadership.read(offset, beat, now)
            if beat.gate != self._gate.gate:
                self._gate.time.hear(self._connection, beat)
        if applied.has_missed or self._leadership.has_missed:
            raise ScheduleIndexError(f"retention has removed records of {self._gate.log} that this gate had not read")
        if applied.ticked:
            self._gate.ticked_at = now
        if applied.own_claim:
            self._has_unread_claim = False
        self._next_due, self._without = applied.next_due, frozenset()
        self._gate.waiting = applied.waiting
        self._deliveries.read(applied.ended)
        if self._is_leading:
            self._deliveries.add(applied.claimed)
            self._note_changes(applied)
        self._wake.set()
        if self._leadership.leads(now):
            for reply_to, request, body in applied.answers:
                await self._publisher.answer(reply_to, request, body)
            self._gate.counts.answered += len(applied.answers)
        await self._snapshots.read(
            applied.chunks, applied.completed, is_leading=lambda: self._leadership.leads(self._now())
        )

    def _note_changes(self, applied: AppliedRecords) -> None:
        """Count the changes, and notify observers of occurrences that ended without a delivery."""
        counts = self._gate.counts
        counts.claimed += len(applied.claimed)
        kinds = Counter(one.how for one in applied.dropped)
        counts.cancelled += kinds["cancelled"]
        counts.superseded += kinds["superseded"]
        counts.skipped += kinds["skipped"]
        if self._gate.observers:
            for one in applied.dropped:
                self._gate.observers.notify(
                    GateEvent(
                        kind=one.how,
                        gate=self._gate.gate,
                        partition=self._gate.number,
                        key=one.key,
                        occurrence=one.occurrence,
                    )
                )

    def _append(self, record: ScheduleRecord) -> None:
        self._append_body(encode(record))

    def _append_body(self, body: bytes) -> None:
        self._unconfirmed += 1
        self._publisher.append(self._gate.number, body, self._on_appended)

    def _on_appended(self, error: BideError | None) -> None:
        self._unconfirmed -= 1
        if error is not None:
            self._failure.report(error)

    # -- what a gate does beside reading

    async def _act(self) -> None:
        while True:
            self._wake.clear()
            await self._step()
            if self._gate.was_let_go:
                return
            await self._connection.url.transport.wait(self._wake, _LOOK_EVERY, due=self._next_work())

    def _next_work(self) -> float | None:
        """The seconds until there is something to claim or to send; None if that is not known."""
        now = self._now()
        if not self._leadership.leads(now) or self._gate.room.level(self._index.position) != "free":
            return None
        clock, due = self._gate.time.now(self._connection), list[float]()
        if self._may_claim and self._next_due is not None:
            due.append(max((self._next_due - self._claim_by - clock) / 1000, self._claim_at - now))
        if self._deliveries.next_due is not None:
            due.append((self._deliveries.next_due - clock) / 1000)
        return max(min(due), 0.0) if due else None

    async def _step(self) -> None:
        """Do what can be done now."""
        now, clock = self._now(), self._gate.time.now(self._connection)
        level = self._gate.room.level(self._index.position)
        if level == "full":
            await self._check_full(now)
        else:
            self._beat(now)
        is_leading = self._leadership.leads(now)
        if is_leading != self._is_leading:
            await self._change(is_leading=is_leading)
        if self._gate.is_stopping:
            self._deliveries.release()
        if level == "free" and self._leadership.is_current(now):
            if is_leading and not self._gate.is_stopping:
                await self._deliverer.deliver(now, clock)
                await self._claim(now, clock)
                self._tick(now)
            self._report(now)
        if is_leading:
            if self._leadership.proven_at is not None:
                self._gate.counts.answered += await self._questions.answer(self._leadership.proven_at)
            if level != "full" and not self._gate.is_stopping:
                await self._snapshots.step(now)
        if self._gate.is_stopping:
            self._finish()

    # -- leading

    def _beat(self, now: float) -> None:
        if now < self._look_at_gates_at and not self._questions.is_waiting:
            return
        self._look_at_gates_at = now + _LOOK_AT_GATES_EVERY
        leads = self._leadership.next_beat(
            now,
            may_take=not self._gate.is_stopping and self._spread.may_take(now),
            let_go=self._is_letting_go or self._spread.to_release(now) == self._gate.number,
            is_asked=self._questions.is_waiting,
        )
        if leads is None:
            return
        position, clock = self._index.position, self._gate.time.wall(self._connection)
        self._append(
            Beat(
                gate=self._gate.gate,
                leads=leads,
                clock=clock,
                after=position.offset,
                count=position.count,
                snapshot=position.snapshot,
            )
        )
        self._leadership.sent(clock, now, leads=leads)

    async def _change(self, *, is_leading: bool) -> None:
        self._is_leading = is_leading
        if is_leading:
            log.info("leading %s", self._gate.log)
            # Claims of the previous leader that reach the log later add their occurrences when they are read.
            self._deliveries.add(await self._index.under_way())
            await self._questions.open()
        else:
            log.info("no longer leading %s", self._gate.log)
            self._questions.close()
            self._deliveries.release()
            await self._snapshots.stop()

    def _on_question(self) -> None:
        self._wake.set()

    def _tick(self, now: float) -> None:
        if now - self._gate.ticked_at >= _TICK_EVERY:
            self._gate.ticked_at = now
            self._append(Tick(number=self._index.position.tick + 1))

    def _finish(self) -> None:
        """Let the partition go when nothing is in flight any more."""
        if self._leadership.leader != self._gate.gate:
            # If an unread beat made this gate the leader after its end, other gates would wait 3 s for its next one.
            is_undecided = self._unconfirmed or self._leadership.may_come_to_lead
            self._gate.was_let_go = not self._deliveries.in_flight and not is_undecided
        elif self._deliveries.is_settled and not self._is_letting_go:
            # The next beat says that this gate no longer leads. It is the last beat, and this gate reads it back.
            self._is_letting_go = True
            self._look_at_gates_at = 0.0
            self._wake.set()

    async def _check_full(self, now: float) -> None:
        """Stop if all records were read and the log is still full. Until then, a snapshot may still come.

        Raises:
            ScheduleLogError: the log is full.
        """
        if now < self._look_at_full_log_at:
            return
        self._look_at_full_log_at = now + _FULL_AGAIN_AFTER
        reader = await LogReader.open(self._connection, self._gate.log, "last")
        try:
            last = (await reader.batch())[0].offset
        finally:
            reader.close()
        if last <= self._index.position.offset and self._gate.room.level(self._index.position) == "full":
            raise ScheduleLogError(
                f"more than five eighths of {self._gate.log} ({self._gate.room.retention} bytes) are not carried "
                "forward: raise 'max-length-bytes' of the stream by a policy, and give the gates the same retention=..."
            )

    # -- claims and deliveries

    @property
    def _may_claim(self) -> bool:
        return (
            self._is_leading
            and not self._gate.is_stopping
            and not self._has_unread_claim
            and self._deliveries.backlog <= _MOST_UNSENT
        )

    @property
    def _may_claim_ahead(self) -> bool:
        return self._deliveries.backlog + self._deliveries.early < _MOST_AHEAD

    @property
    def _claim_by(self) -> int:
        return _CLAIM_BY if self._may_claim_ahead else 0

    async def _claim(self, now: float, clock: int) -> None:
        if not self._may_claim:
            return
        crowded = frozenset(self._deliveries.crowded)
        if self._without - crowded:
            # The last look left out schedules for targets that are no longer crowded. They may be due: look again now.
            self._next_due, self._without = clock, crowded
        if self._next_due is None or self._next_due > clock + self._claim_by or now < self._claim_at:
            return
        self._has_unread_claim = True
        begun = time.monotonic()
        ahead = _CLAIM_AHEAD if self._may_claim_ahead else 0
        body = await self._index.claim(clock, ahead=ahead, without=crowded)
        # Passing over the schedules of crowded targets may take long, and delays other work of the index.
        pause = _CLAIM_PAUSE * (time.monotonic() - begun) if crowded else 0.0
        if body is None:
            self._has_unread_claim = False
            self._claim_at = now + max(_CLAIM_AGAIN_AFTER, pause)
            if crowded:
                self._next_due, self._without = await self._index.next_due(without=crowded), crowded
        else:
            self._claim_at = now + pause
            self._append_body(body)

    def _report(self, now: float) -> None:
        if items := self._deliveries.report(now):
            self._append(Done(gate=self._gate.gate, items=items))
