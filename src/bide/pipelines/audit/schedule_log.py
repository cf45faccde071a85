"""Reading of the schedule log by an audit: outcomes of occurrences, and pending schedules."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bide.durations import to_milliseconds
from bide.errors import OffsetsLostError, ScheduleLogError, UndecodableMessageError
from bide.gate.log_follower import LogFollower
from bide.gate.snapshot_finder import FoundSnapshot, SnapshotFinder
from bide.pipelines.audit.occurrence_files import KnownPartition, OccurrenceFiles
from bide.pipelines.audit.occurrence_state import Occurrence, OccurrenceState, PendingCount, open_state
from bide.pipelines.audit.positions import GAPS_ADVICE
from bide.pipelines.audit.queries import DELIVERY_GRACE
from bide.pipelines.audit.reading import chunks_of
from bide.runtime.bounded_cache import BoundedCache
from bide.runtime.logs import logger
from bide.schedules.encoding import decode
from bide.schedules.fold import ScheduleFold
from bide.schedules.names import PARTITIONS, ScheduleNames
from bide.schedules.records import Beat, SnapshotChunk
from bide.streams import amqp10
from bide.streams.log import Address, StreamLogs
from bide.streams.range_reader import OffsetRange

if TYPE_CHECKING:
    from bide.pipelines.audit.folder import Folder

log = logger(__name__)

SCHEDULE_NAMES: Final = ScheduleNames()

UNKNOWN_OUTCOME: Final = "unknown"
"""The outcome of an occurrence that ended in a record which the audit could not read."""

_ATTEMPTS: Final = 3
"""Attempts to build a state. An attempt fails if retention removes records before they are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSchedules:
    """Schedules that have not ended.

    Attributes:
        waiting: schedules that wait for an occurrence, including paused ones.
        paused: schedules that are paused.
        under_way: occurrences that a gate has claimed, and has not reported as delivered or undeliverable.
        overdue: schedules and occurrences that were due more than
            :data:`bide.pipelines.audit.queries.DELIVERY_GRACE` ago, without paused ones.
    """

    waiting: int = 0
    paused: int = 0
    under_way: int = 0
    overdue: int = 0


@dataclass(frozen=True, slots=True)
class _StoredRecord:
    offset: int
    time: int
    exchange: str
    body: bytes


def read_schedule_log(
    address: Address, streams: tuple[str, ...], folder: Folder, *, now: datetime, allow_gaps: bool = False
) -> PendingSchedules | None:
    """Read the records that are in the log now, and append the occurrences that they ended to a table.

    Nothing is written to the broker. If a round is killed, the next round reads the same records again, with the same
    result.

    Args:
        streams: the streams of the log that exist.
        now: schedules that were due more than :data:`bide.pipelines.audit.queries.DELIVERY_GRACE` before this time are
            overdue.
        allow_gaps: whether to continue although records or a stream were lost. Occurrences that ended in lost records
            have the outcome ``unknown``.

    Returns:
        The pending schedules; None if there is no log, and no earlier round has read one.

    Raises:
        OffsetsLostError: records were lost before the audit read them, and gaps are not allowed.
        ScheduleLogError: the beginning of the log was removed, the log has no complete snapshot, and gaps are not
            allowed.
        NewerRecordError: a later release of bide wrote to the log.
        InvalidInputError: another release of bide wrote the state in the folder.
        BrokerError: the log cannot be read.
    """
    files = OccurrenceFiles(folder)
    if not streams and not files.known:
        return None
    files.begin()
    followed_partitions: dict[str, KnownPartition] = {}
    pending: list[PendingCount] = []
    before = to_milliseconds(now - DELIVERY_GRACE)
    with tempfile.TemporaryDirectory(prefix="bide-audit-") as local, StreamLogs(address) as logs:
        for number in range(PARTITIONS):
            stream, known = SCHEDULE_NAMES.log(number), files.known.get(SCHEDULE_NAMES.log(number))
            reader = _PartitionReader(address, logs, files, number, allow_gaps=allow_gaps)
            path = Path(local) / f"{number}.db"
            if stream not in streams:
                if known is not None:
                    reader.give_up(known, path)
                continue
            if (followed := reader.follow(known, path)) is None:
                continue
            followed_partitions[stream] = followed
            with open_state(path, is_new=False) as state:
                pending += state.pending(before)
            path.unlink()
    files.write_pending(pending)
    files.commit(followed_partitions)
    under_way = sum(one.under_way for one in pending)
    return PendingSchedules(
        waiting=sum(one.total for one in pending) - under_way,
        paused=sum(one.paused for one in pending),
        under_way=under_way,
        overdue=sum(one.overdue for one in pending),
    )


class _PartitionReader:
    """Reads one partition."""

    def __init__(
        self, address: Address, logs: StreamLogs, files: OccurrenceFiles, number: int, *, allow_gaps: bool
    ) -> None:
        self._address = address
        self._logs = logs
        self._files = files
        self._number = number
        self._allow_gaps = allow_gaps
        self._stream = SCHEDULE_NAMES.log(number)
        self._exchanges = BoundedCache[bytes, str]()
        self._is_recreated = False
        self._ended: set[str] | None = None

    def follow(self, known: KnownPartition | None, path: Path) -> KnownPartition | None:
        """Read the new records.

        Returns:
            The state after these records; None if gaps are allowed, and the log has neither its beginning nor a
            complete snapshot.
        """
        end = self._logs.end(self._stream)
        if known is None:
            return self._build(path, end, after=-1)
        self._files.fetch(known, path)
        try:
            with open_state(path, is_new=False) as state:
                state.position = replace(known.position)
                changes = self._read_on(state, end)
                position = replace(state.position)
        except OffsetsLostError as error:
            if not self._allow_gaps:
                raise
            log.warning("occurrences that ended in a gap get the outcome %r: %s", UNKNOWN_OUTCOME, error)
            self._files.discard_added()
            return self._rebuild(known, path, end)
        self._files.accept_added()
        file = self._files.store(path, self._number) if changes else known.file
        return KnownPartition(file=file, position=position)

    def give_up(self, known: KnownPartition, path: Path) -> None:
        """End the occurrences of a stream that does not exist any more.

        Raises:
            OffsetsLostError: gaps are not allowed.
        """
        if not self._allow_gaps:
            raise OffsetsLostError(
                f"the stream {self._stream!r} of an earlier round does not exist any more. Continue {GAPS_ADVICE}",
                stream=self._stream,
                offset=known.position.offset + 1,
            )
        self._files.fetch(known, path)
        with open_state(path, is_new=False) as state:
            for one in state.occurrences():
                self._end_unknown(one)
        self._files.accept_added()

    def _read_on(self, state: OccurrenceState, end: int) -> bool:
        """Read from the last record on. Returns whether the entries of the state have changed."""
        last = state.position.offset
        if end <= last:
            raise self._recreated_error(last, end)
        # The last record is read again, to check that the stream was not deleted and declared again.
        start = max(last, 0)
        if (first := self._logs.first(self._stream)) == last + 1:
            start = first
        return self._fold(state, start, end, after=last)

    def _fold(self, state: OccurrenceState, start: int, end: int, *, after: int) -> bool:
        """Apply records from an offset on.

        Args:
            after: the table already has the occurrences that ended at offsets up to this one.
        """
        follower = LogFollower(ScheduleFold(state, self._number), SCHEDULE_NAMES)
        last, has_changed = state.position.offset, False
        for one in self._records(start, end):
            if one.offset <= last:
                if one.offset == last and state.position.checksum not in (0, zlib.crc32(one.body)):
                    raise self._recreated_error(last, end)
                continue
            state.begin_record(one.time)
            read = follower.read(one.offset, one.exchange, one.body)
            has_changed = has_changed or not isinstance(read.record, Beat | SnapshotChunk | None)
            if one.offset > after:
                for ended in read.result.ended:
                    entry = state.looked_up[ended.occurrence]
                    if self._ended is not None:
                        self._ended.add(ended.occurrence)
                    self._files.add(entry, ended.how, ended=one.time, stream=self._stream, offset=one.offset)
        if follower.has_missed:
            raise OffsetsLostError(
                f"the stream {self._stream!r} does not have all records after offset {last:,} any more: retention "
                f"removed some of them before they were read. Continue with the remaining messages {GAPS_ADVICE}",
                stream=self._stream,
                offset=last + 1,
            )
        return has_changed

    # -- building a state

    def _build(self, path: Path, end: int, *, after: int) -> KnownPartition | None:
        """Build a state from all records, or from a snapshot and later records if the first ones were removed."""
        for attempt in range(1, _ATTEMPTS + 1):
            path.unlink(missing_ok=True)
            try:
                with open_state(path, is_new=True) as state:
                    if (first := self._logs.first(self._stream)) > 0:
                        self._load_snapshot(state, first, end)
                    self._fold(state, max(state.position.offset, 0), end, after=after)
                    position = replace(state.position)
                self._files.accept_added()
                return KnownPartition(file=self._files.store(path, self._number), position=position)
            except OffsetsLostError as error:
                self._files.discard_added()
                if attempt == _ATTEMPTS:
                    raise
                log.info("reading %s again from a later snapshot: %s", self._stream, error)
            except ScheduleLogError as error:
                if not self._allow_gaps:
                    raise
                log.warning("leaving out %s: %s", self._stream, error)
                return None
        raise AssertionError("the last attempt raises")

    def _rebuild(self, known: KnownPartition, path: Path, end: int) -> KnownPartition | None:
        """Build a new state. Occurrences of the old state that the new one lacks ended in lost records."""
        self._files.fetch(known, path)
        with open_state(path, is_new=False) as state:
            before = {one.occurrence: one for one in state.occurrences()}
        self._ended = set()
        found = self._build(path, end, after=-1 if self._is_recreated else known.position.offset)
        if found is None:
            return None
        with open_state(path, is_new=False) as state:
            for one in state.occurrences():
                before.pop(one.occurrence, None)
        for occurrence, entry in before.items():
            if occurrence not in self._ended:
                self._end_unknown(entry)
        self._files.accept_added()
        return found

    def _end_unknown(self, entry: Occurrence) -> None:
        self._files.add(entry, UNKNOWN_OUTCOME, ended=None, stream=self._stream, offset=None)

    def _load_snapshot(self, state: OccurrenceState, first: int, end: int) -> None:
        """Load the earliest complete snapshot after which the log has all records."""
        found = self._find_snapshot(first, end)
        missing = set(found.numbers)
        assert found.position.snapshot is not None
        for one in self._records(found.position.snapshot, found.end + 1):
            number = found.number_of(one.body) if one.exchange == SCHEDULE_NAMES.gates else None
            if number in missing:
                missing.discard(number)
                chunk = decode(one.body)
                assert isinstance(chunk, SnapshotChunk)
                for entry in chunk.entries:
                    state.put(entry)
        state.position = replace(found.position)

    def _find_snapshot(self, first: int, end: int) -> FoundSnapshot:
        finder = SnapshotFinder()
        for one in self._records(first, end):
            found = finder.add(one.offset, one.body) if one.exchange == SCHEDULE_NAMES.gates else None
            if found is not None and found.position.offset >= first:
                return found
        raise ScheduleLogError(
            f"the schedule log {self._stream} begins at offset {first:,} and has no complete snapshot: run a gate, "
            "which writes one"
        )

    # -- records

    def _records(self, start: int, end: int) -> Iterator[_StoredRecord]:
        wanted = OffsetRange(stream=self._stream, start=start, end=end)
        for chunk, first, last in chunks_of(self._address, wanted, allow_gaps=False):
            for place, data in enumerate(chunk.messages()):
                if first <= place < last:
                    exchange, body = self._parse(data)
                    yield _StoredRecord(chunk.first + place, chunk.timestamp, exchange, body)

    def _parse(self, data: object) -> tuple[str, bytes]:
        """The exchange and the body of a message. Both are empty if the message is not AMQP 1.0: it changes nothing."""
        if not isinstance(data, bytes):
            return "", b""
        try:
            found = amqp10.sections(data)
            if (exchange := self._exchanges.get(found.annotations)) is None:
                annotations = amqp10.decode(found.annotations) if found.annotations else {}
                exchange = str(annotations.get("x-exchange", "")) if isinstance(annotations, dict) else ""
                self._exchanges[found.annotations] = exchange
        except UndecodableMessageError:
            return "", b""
        return exchange, found.body or b""

    def _recreated_error(self, last: int, end: int) -> OffsetsLostError:
        self._is_recreated = True
        return OffsetsLostError(
            f"the stream {self._stream!r} ends at offset {end:,} and does not have the record at offset {last:,} that "
            f"was read before: it was deleted and declared again. Continue {GAPS_ADVICE}",
            stream=self._stream,
            offset=last,
        )
