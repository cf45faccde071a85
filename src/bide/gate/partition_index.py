"""The index of a partition: brief changes run in the event loop, others in a thread."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from bide.gate.claims import CLAIM_ITEMS, ClaimPlanner
from bide.gate.delivery_queue import OccurrenceHead
from bide.gate.index import ScheduleIndex
from bide.gate.index_thread import IndexThread
from bide.gate.log_follower import LogFollower, ReadRecord
from bide.gate.log_reader import LogRecord
from bide.gate.scheduled_delivery import DeliveryRules, ScheduledDelivery
from bide.gate.sqlite_state import SqliteState, answer_question
from bide.runtime.logs import logger
from bide.schedules import snapshot
from bide.schedules.answers import encode_answer
from bide.schedules.encoding import decode, encode
from bide.schedules.entries import WaitingSchedule
from bide.schedules.fold import Ending, OccurrenceEnd, ScheduleFold
from bide.schedules.names import PARTITIONS, ScheduleNames
from bide.schedules.questions import ScheduleQuestion, encode_question_answer
from bide.schedules.records import (
    AddSchedule,
    Beat,
    ChangeSchedule,
    Claim,
    Done,
    ScheduleRecord,
    SnapshotChunk,
    Tick,
)
from bide.schedules.state import LogPosition

log = logger(__name__)

_BATCH_SECONDS: Final = 0.05
"""Seconds after which a batch of a leader ends, so that other work of the partition gets its turn."""

_LONG_BATCH_SECONDS: Final = 1.0
"""The same for a gate that does not lead, which only reads."""

_COMMIT_EVERY: Final = 5.0
"""Seconds between commits. Each commit writes all changed pages, and may wait for the disk as long as something else
syncs. A gate that is killed reads the records of these seconds again."""

_DECODED: Final = 64
"""Records that are decoded together, so that one query looks up their keys."""

_BRIEF_RECORDS: Final = 16
_BRIEF_BYTES: Final = 16_000
"""The largest number of records, of items in a record, and of bytes in a body, that are applied in the event loop."""

DROPPED: Final[tuple[Ending, ...]] = ("cancelled", "superseded", "skipped")
"""How occurrences end without a delivery."""


@dataclass(slots=True)
class AppliedRecords:
    """What a batch of records did.

    Attributes:
        count: how many of the records were applied.
        beats: beats of all gates, with their offsets.
        claimed: occurrences to be delivered, if the gate leads.
        ended: occurrences that a gate reported as ended, also if another one had reported them before.
        dropped: occurrences that ended without a delivery, if the gate leads.
        waiting: the number of schedules that wait.
        answers: where to send an answer, the id of the request, and the answer.
        chunks: the cycle of each chunk of a snapshot.
        completed: snapshots that are complete.
        own_claim: whether a claim of this gate was read.
        ticked: whether a tick was read.
        has_missed: whether records are missing before these ones.
        position: the position after the batch.
        next_due: the earliest due time of a schedule that is not paused, in milliseconds since the Unix epoch.
    """

    position: LogPosition
    count: int = 0
    beats: list[tuple[int, Beat]] = field(default_factory=list)
    claimed: list[OccurrenceHead] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    dropped: list[OccurrenceEnd] = field(default_factory=list)
    waiting: int = 0
    answers: list[tuple[str, str, bytes]] = field(default_factory=list)
    chunks: list[str] = field(default_factory=list)
    completed: list[str] = field(default_factory=list)
    own_claim: bool = False
    ticked: bool = False
    has_missed: bool = False
    next_due: int | None = None


class PartitionIndex:
    """The index of a partition, with everything that reads and changes it. Methods wait for their turn in the thread.

    Args:
        path: the file of the index.
        gate: the name of this gate.
        executor: runs one call at a time, and is shut down at the end; a thread if None.

    Attributes:
        position: the last record that the index contains.
    """

    def __init__(
        self, path: Path, partition: int, names: ScheduleNames, gate: str, *, executor: Executor | None = None
    ) -> None:
        self.position = LogPosition()
        self._path = path
        self._partition = partition
        self._names = names
        self._gate = gate
        self._planner = ClaimPlanner(gate)
        self._commit_at = 0.0
        self._frozen = ExitStack()
        self._chunks: Iterator[SnapshotChunk] = iter(())
        self._thread = IndexThread(path, executor or ThreadPoolExecutor(1, thread_name_prefix=f"bide-gate-{partition}"))
        self._index: ScheduleIndex
        self._follower: LogFollower

    async def open(self) -> None:
        """Open the file.

        Raises:
            FolderInUseError: another gate uses it.
            InvalidInputError: it cannot be read or created.
        """
        await self._thread.run(self._open)

    async def close(self) -> None:
        """Close the file, and end the thread."""
        await self._thread.run(self._close)
        self._thread.end()

    async def recreate(self) -> None:
        """Replace the file by an empty index."""
        await self._thread.run(self._recreate)

    def _open(self) -> None:
        self._index = ScheduleIndex(self._path)
        self._begin()

    def _close(self) -> None:
        if hasattr(self, "_index"):
            self._frozen.close()
            self._index.close()

    def _recreate(self) -> None:
        self._frozen.close()
        self._index.recreate()
        self._begin()

    def _begin(self) -> None:
        state = self._index.state
        # The first count reads all due times, which takes a second for ten million: here it does so in the thread.
        log.debug("%d schedules wait in %s", state.waiting_count, self._path)
        self._follower = LogFollower(ScheduleFold(state, self._partition), self._names)
        self.position = replace(state.position)

    # -- the log

    async def begin(self) -> None:
        """Begin to follow the log at :attr:`position`, on a new connection."""
        await self._thread.run(self._begin_on_connection)

    def _begin_on_connection(self) -> None:
        self._planner.on_connection_lost()
        self._end_snapshot()
        self._begin()

    async def apply(self, records: Sequence[LogRecord], *, is_leading: bool) -> AppliedRecords:
        """Apply records in one transaction that ends after 50 ms if the gate leads, otherwise after 1 s.

        :attr:`AppliedRecords.count` shows how many were applied. Pass the rest again.

        Args:
            is_leading: whether to make answers to operations, and to list what is claimed.

        Raises:
            NewerRecordError: a later release of bide wrote one of them.
        """
        decoded = self._decode_few(records)
        commits = self._is_commit_due()
        are_brief = bool(decoded) and not commits and all(_is_brief(one) for one in decoded)
        applied = await (self._thread.run_brief if are_brief else self._thread.run)(
            self._apply, records, decoded, is_leading, commits
        )
        self.position = applied.position
        return applied

    def _decode_few(self, records: Sequence[LogRecord]) -> list[ScheduleRecord | None]:
        """The records, if they are few and small; otherwise nothing."""
        if len(records) > _BRIEF_RECORDS or any(len(one.body) > _BRIEF_BYTES for one in records):
            return []
        return [self._follower.decode(one.offset, one.exchange, one.body) for one in records]

    def _apply(
        self, records: Sequence[LogRecord], decoded: Sequence[ScheduleRecord | None], is_leading: bool, commits: bool
    ) -> AppliedRecords:
        until = time.monotonic() + (_BATCH_SECONDS if is_leading else _LONG_BATCH_SECONDS)
        with self._batch(commits=commits) as state:
            applied = AppliedRecords(state.position)
            for one, record in zip(records, decoded or self._decoded(records, state), strict=False):
                found = self._follower.apply(one.offset, one.exchange, one.body, record)
                self._note(applied, one, found, is_leading)
                if is_leading:
                    applied.claimed += state.heads(found.result.claimed)
                    applied.dropped += (one for one in found.result.ended if one.how in DROPPED)
                applied.count += 1
                if self._follower.has_missed or time.monotonic() > until:
                    break
            # Before the batch ends, because both write the added schedules: an error has to undo the whole batch.
            applied.next_due = state.next_due()
            applied.waiting = state.waiting_count
        applied.has_missed = self._follower.has_missed
        applied.position = replace(state.position)
        return applied

    def _is_commit_due(self) -> bool:
        # While a checkpoint syncs the file, a commit would wait for it.
        return time.monotonic() >= self._commit_at and not self._index.is_checkpointing

    @contextmanager
    def _batch(self, *, commits: bool) -> Iterator[SqliteState]:
        with self._index.batch(is_last=commits) as state:
            yield state
        if commits:
            # The partitions of a gate take turns, so that the disk is not busy with all of them at once.
            now, turn = time.monotonic(), self._partition / PARTITIONS * _COMMIT_EVERY
            self._commit_at = now + _COMMIT_EVERY - (now - turn) % _COMMIT_EVERY

    def _decoded(self, records: Sequence[LogRecord], state: SqliteState) -> Iterator[ScheduleRecord | None]:
        for start in range(0, len(records), _DECODED):
            part = [
                self._follower.decode(one.offset, one.exchange, one.body) for one in records[start : start + _DECODED]
            ]
            state.look_ahead([one.key for one in part if isinstance(one, AddSchedule)])
            yield from part

    def _note(self, applied: AppliedRecords, one: LogRecord, found: ReadRecord, is_leading: bool) -> None:
        result = found.result
        match found.record:
            case AddSchedule() | ChangeSchedule() as operation:
                if is_leading and one.reply_to is not None and result.answer is not None:
                    applied.answers.append((one.reply_to, str(operation.request), encode_answer(result.answer)))
            case _ if one.exchange != self._names.gates:
                return
            case Beat() as beat:
                applied.beats.append((one.offset, beat))
            case Claim() as claim:
                self._planner.read(claim)
                applied.own_claim = applied.own_claim or claim.gate == self._gate
            case Done() as done:
                applied.ended += [one.occurrence for one in done.items]
            case Tick():
                applied.ticked = True
            case SnapshotChunk() as chunk:
                applied.chunks.append(chunk.cycle)
                if found.completed is not None:
                    applied.completed.append(found.completed)
            case _:
                pass

    # -- building the index anew

    async def clear(self) -> None:
        """Remove everything."""
        await self._thread.run(self._clear)

    def _clear(self) -> None:
        self._end_snapshot()
        with self._index.batch() as state:
            state.clear()
        self._begin()

    async def put_chunk(self, body: bytes, position: LogPosition | None) -> None:
        """Add the entries of a chunk, and with the last chunk the position."""
        await self._thread.run(self._put_chunk, body, position)

    def _put_chunk(self, body: bytes, position: LogPosition | None) -> None:
        chunk = decode(body)
        assert isinstance(chunk, SnapshotChunk)
        with self._batch(commits=position is not None or self._is_commit_due()) as state:
            state.look_ahead([one.key for one in chunk.entries if isinstance(one, WaitingSchedule)])
            for one in chunk.entries:
                state.put(one)
            if position is not None:
                state.position = replace(position)
        if position is not None:
            self._begin()

    # -- what is due and under way

    async def claim(self, now: int, *, ahead: int = 0, without: Collection[str] = ()) -> bytes | None:
        """Claim schedules that are due, or will be soon, and return the record; None if there is nothing to claim.

        Args:
            now: the time by the gate's clock, in milliseconds since the Unix epoch.
            ahead: also claim schedules that are due within this many milliseconds.
            without: targets for which nothing is claimed.
        """
        if not without and self._planner.passed_over <= _BRIEF_RECORDS:
            is_whole, body = await self._thread.run_brief(self._claim_few, now, ahead)
            if is_whole:
                return body
        return await self._thread.run(self._claim, now, ahead, without)

    def _claim_few(self, now: int, ahead: int) -> tuple[bool, bytes | None]:
        """Whether only a few schedules are due, and if so the record of their claim."""
        few = _BRIEF_RECORDS + self._planner.passed_over
        due = self._index.state.due(now + ahead, limit=few + 1)
        return (True, self._planned(due, now)) if len(due) <= few else (False, None)

    def _claim(self, now: int, ahead: int, without: Collection[str]) -> bytes | None:
        limit = CLAIM_ITEMS + self._planner.passed_over
        return self._planned(self._index.state.due(now + ahead, without=without, limit=limit), now)

    def _planned(self, due: Sequence[WaitingSchedule], now: int) -> bytes | None:
        claim = self._planner.claim(due, now)
        return None if claim is None else encode(claim)

    async def next_due(self, *, without: Collection[str]) -> int | None:
        """The earliest due time of a schedule for other targets than these, in milliseconds since the Unix epoch."""
        return await self._thread.run(lambda: self._index.state.next_due(without=without))

    async def under_way(self) -> list[OccurrenceHead]:
        """All occurrences under way, the earliest due first."""
        return await self._thread.run(lambda: self._index.state.under_way_heads())

    async def deliveries(self, occurrences: Sequence[str], rules: DeliveryRules) -> list[ScheduledDelivery]:
        """The messages of those occurrences that are still under way."""

        def find() -> list[ScheduledDelivery]:
            found = (self._index.state.under_way(one) for one in occurrences)
            return [rules.delivery(one) for one in found if one is not None]

        return await (self._thread.run_brief(find) if len(occurrences) <= _BRIEF_RECORDS else self._thread.run(find))

    async def answer(self, question: ScheduleQuestion) -> bytes:
        """The body of the answer to a question."""
        return await self._thread.run(lambda: encode_question_answer(answer_question(self._index.state, question)))

    # -- snapshots

    async def begin_snapshot(self, cycle: str) -> LogPosition:
        """Begin to cut the state as it is now into chunks, and return its position."""
        return await self._thread.run(self._begin_snapshot, cycle)

    def _begin_snapshot(self, cycle: str) -> LogPosition:
        self._end_snapshot()
        self._index.commit()
        state = self._frozen.enter_context(self._index.snapshot())
        self._chunks = snapshot.cut(cycle, state.position, state.entries())
        return replace(state.position)

    async def next_chunk(self) -> bytes | None:
        """The record of the next chunk; None after the last one."""
        return await self._thread.run(self._next_chunk)

    def _next_chunk(self) -> bytes | None:
        if (chunk := next(self._chunks, None)) is not None:
            return encode(chunk)
        self._end_snapshot()
        return None

    async def size(self) -> int:
        """The size of the state, to compare with other states."""
        return await self._thread.run(lambda: self._index.state.size())

    async def end_snapshot(self) -> None:
        """Give up the snapshot that was begun."""
        await self._thread.run(self._end_snapshot)

    def _end_snapshot(self) -> None:
        self._chunks = iter(())
        self._frozen.close()


def _is_brief(record: ScheduleRecord | None) -> bool:
    """Whether it takes a few milliseconds at most to apply a small record."""
    match record:
        case ChangeSchedule():
            return record.filter is None
        case Claim() | Done():
            return len(record.items) <= _BRIEF_RECORDS
        case Tick():
            # It may make the state forget many requests.
            return False
        case _:
            return True
