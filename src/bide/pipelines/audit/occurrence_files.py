"""Files of an audit for the schedule log: ended occurrences, pending counts and the state."""

from __future__ import annotations

import json
import posixpath
import shutil
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
from pyarrow import parquet

from bide.durations import EPOCH, LATEST_MILLISECOND, from_milliseconds
from bide.pipelines.audit.columns import FACT_COLUMNS, TIMESTAMP, arrow_schema, table_of_rows
from bide.pipelines.audit.folder import Folder, Note
from bide.pipelines.audit.occurrence_state import Occurrence, PendingCount, stored_values
from bide.pipelines.audit.storage import open_storage
from bide.schedules.entries import WaitingSchedule
from bide.schedules.state import LogPosition

OCCURRENCES_TABLE: Final = "occurrences"
PENDING_TABLE: Final = "schedules_pending"

_STATE_FILE: Final = "_state/schedules.json"
_FILES: Final = "_state/schedules"
_FLUSH_ROWS: Final = 50_000
"""Number of rows in memory at which they are written to files."""

_Row = tuple[date, tuple[Any, ...]]

_SCHEMA: Final = pa.schema([one for one in arrow_schema(FACT_COLUMNS[OCCURRENCES_TABLE]) if one.name != "day"])
_PENDING_SCHEMA: Final = pa.schema(
    [
        ("target", pa.string()),
        ("due_hour", TIMESTAMP),
        *((name, pa.int64()) for name in ("count", "overdue", "paused", "under_way")),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPartition:
    """The state of a partition after the last round.

    Attributes:
        file: the name of the file with its state, which may be of an earlier round if nothing has changed since.
        position: the last record that the audit has read.
    """

    file: str
    position: LogPosition


class OccurrenceFiles:
    """The files of one round.

    The round takes effect with :meth:`commit`. If a round does not commit, the next round reads the same records again.

    Attributes:
        batch: the number of this round.
        known: the partitions after the last round, by the name of their stream.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._storage = open_storage(folder)
        head = json.loads(folder.read_bytes(place)) if folder.exists(place := folder.path(_STATE_FILE)) else {}
        self.batch: int = head.get("batch", -1) + 1
        self.known = {
            stream: KnownPartition(file=one["file"], position=LogPosition(**one["position"]))
            for stream, one in head.get("streams", {}).items()
        }
        self._accepted: list[_Row] = []
        self._added: list[_Row] = []
        self._accepted_counts = Counter[tuple[date, str]]()
        self._added_counts = Counter[tuple[date, str]]()
        self._added_parts: list[str] = []

    def begin(self) -> None:
        """Delete the rows and the note of a round that was killed before it committed."""
        self._storage.drop_batch(OCCURRENCES_TABLE, self.batch)
        self._folder.drop_note(self._note_name)

    @property
    def _note_name(self) -> str:
        return f"{OCCURRENCES_TABLE}-{self.batch}"

    def add(self, entry: Occurrence, outcome: str, *, ended: int | None, stream: str, offset: int | None) -> None:
        """Add an occurrence that has ended.

        A later :meth:`accept_added` or :meth:`discard_added` decides whether it is written.

        Args:
            ended: when the occurrence ended, in milliseconds since the Unix epoch; None if unknown.
            offset: the offset of the record that ended the occurrence; None if unknown.
        """
        stored, due = stored_values(entry), min(entry.due, LATEST_MILLISECOND)
        if isinstance(entry, WaitingSchedule):
            is_recurring, stored["version"] = entry.recurrence is not None, entry.version
        else:
            is_recurring = entry.is_recurring
        # A delivery before the due time was requested, so it is neither late nor early.
        has_lateness = outcome == "delivered" and ended is not None and ended >= due
        values = (
            entry.occurrence if is_recurring else stored.get("id") or entry.occurrence,
            *(entry.occurrence, entry.id, entry.key, stored.get("version"), entry.target, stored.get("type")),
            *map(
                _to_microseconds,
                (min(entry.nominal, LATEST_MILLISECOND), due, stored.get("scheduled"), stored.get("claimed"), ended),
            ),
            outcome,
            float(ended - due) if has_lateness and ended is not None else None,
            stream,
            offset,
        )
        day = (from_milliseconds(due) or EPOCH).date()
        self._added.append((day, values))
        self._added_counts[day, outcome] += 1
        if len(self._added) >= _FLUSH_ROWS:
            self._added_parts += self._flush(self._added)

    def accept_added(self) -> None:
        """Accept the occurrences that were added since the last :meth:`accept_added` or :meth:`discard_added`."""
        self._accepted += self._added
        self._accepted_counts += self._added_counts
        self._forget_added()
        if len(self._accepted) >= _FLUSH_ROWS:
            self._flush(self._accepted)

    def discard_added(self) -> None:
        """Discard the occurrences that were added since the last :meth:`accept_added` or :meth:`discard_added`."""
        for one in self._added_parts:
            self._folder.files.delete_file(one)
        self._forget_added()

    def _forget_added(self) -> None:
        self._added.clear()
        self._added_counts.clear()
        self._added_parts.clear()

    def fetch(self, known: KnownPartition, local: Path) -> None:
        """Copy the state of a partition to a local file."""
        with (
            self._folder.files.open_input_stream(self._folder.path(_FILES, known.file)) as source,
            local.open("wb") as file,
        ):
            shutil.copyfileobj(source, file, 1 << 20)

    def store(self, local: Path, partition: int) -> str:
        """Copy a local file with the state of a partition to the folder. Returns the name of the copy."""
        self._folder.files.create_dir(self._folder.path(_FILES))
        name = f"{self.batch}-{partition}.db"
        with (
            local.open("rb") as file,
            self._folder.files.open_output_stream(self._folder.path(_FILES, name)) as target,
        ):
            shutil.copyfileobj(file, target, 1 << 20)
        return name

    def write_pending(self, rows: Iterable[PendingCount]) -> None:
        """Replace the table of pending occurrences with the sums of these counts."""
        whole: defaultdict[tuple[int, str], list[int]] = defaultdict(lambda: [0] * 4)
        for target, hour, *counts in rows:
            whole[hour, target] = [one + more for one, more in zip(whole[hour, target], counts, strict=True)]
        listed = [(target, hour * 3_600_000_000, *counts) for (hour, target), counts in sorted(whole.items())]
        self._storage.replace(table_of_rows(listed, _PENDING_SCHEMA), PENDING_TABLE)

    def commit(self, streams: Mapping[str, KnownPartition]) -> None:
        """Finish the round: write the accepted occurrences, their note, and the names of the current state files."""
        self._flush(self._accepted)
        self._storage.append_staged(OCCURRENCES_TABLE, self.batch)
        if self._accepted_counts:
            rows = Counter({OCCURRENCES_TABLE: self._accepted_counts.total()})
            for (_, outcome), count in self._accepted_counts.items():
                rows[f"{OCCURRENCES_TABLE}/{outcome}"] += count
            days = tuple(sorted({day for day, _ in self._accepted_counts}))
            self._folder.add_note(Note(name=self._note_name, rows=dict(rows), days=days))
        head = {
            "batch": self.batch,
            "streams": {
                name: {"file": one.file, "position": asdict(one.position)} for name, one in sorted(streams.items())
            },
        }
        self._folder.write_json(self._folder.path(_STATE_FILE), head)
        self._delete_others({one.file for one in streams.values()})

    def _delete_others(self, used: Collection[str]) -> None:
        place = self._folder.path(_FILES)
        for name in self._folder.entries(place):
            if name not in used:
                self._folder.files.delete_file(posixpath.join(place, name))

    def _flush(self, rows: list[_Row]) -> list[str]:
        """Write rows, and remove them from the list. Returns the paths of the files."""
        by_day: defaultdict[date, list[tuple[Any, ...]]] = defaultdict(list)
        for day, values in rows:
            by_day[day].append(values)
        paths, staging = [], self._storage.staging(OCCURRENCES_TABLE)
        for day, listed in by_day.items():
            place = self._folder.path(staging, f"day={day}", f"batch={self.batch}")
            self._folder.files.create_dir(place)
            paths.append(posixpath.join(place, f"part-{uuid4()}.parquet"))
            parquet.write_table(table_of_rows(listed, _SCHEMA), paths[-1], filesystem=self._folder.files)
        rows.clear()
        return paths


def _to_microseconds(milliseconds: int | None) -> int | None:
    return None if milliseconds is None else milliseconds * 1000
