"""Overdue rows: due more than five minutes before a write starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc

from bide.durations import EARLIEST, EPOCH, from_microseconds, to_microseconds
from bide.errors import InvalidRowError

OverdueAction = Literal["send", "drop", "reject"]

OVERDUE_ACTIONS: Final[tuple[OverdueAction, ...]] = get_args(OverdueAction)
"""What to do with overdue rows: send them immediately, drop them, or write them to the folder for rejects."""

OVERDUE_GRACE: Final = timedelta(minutes=5)
"""A row is overdue if it was due longer than this before the write began. Rows due since then are sent immediately."""

OVERDUE_STATUS: Final = "past"
"""The ``reject_status`` of overdue rows."""

OVERDUE_REASON: Final = f"it was due more than {OVERDUE_GRACE // timedelta(minutes=1)} min before the write began"
"""The ``reject_reason`` of overdue rows."""

_SUSPICIOUS_BEFORE: Final = datetime(1970, 6, 1, tzinfo=UTC)
"""Unix times in seconds, read as milliseconds, fall between 1970 and this time."""


@dataclass(slots=True)
class OverdueCounter:
    """Counts the overdue rows of one task.

    Args:
        begun: when the write began.

    Attributes:
        count: the number of overdue rows.
        first: the earliest due time of an overdue row; None without any.
        last: the latest due time of an overdue row; None without any.
    """

    begun: datetime
    count: int = 0
    first: datetime | None = field(default=None, init=False)
    last: datetime | None = field(default=None, init=False)

    def add(self, batch: pa.RecordBatch, problems: Mapping[int, str]) -> list[int]:
        """Count the overdue rows of a batch; returns their indexes.

        Args:
            problems: invalid rows by their index, which are not counted.
        """
        due = pc.cast(batch.column("deliver_at"), pa.int64())
        latest = to_microseconds(self.begun - OVERDUE_GRACE)
        # Times before the year 1 are reported as invalid rows.
        mask = pc.fill_null(pc.and_(pc.less(due, latest), pc.greater_equal(due, to_microseconds(EARLIEST))), False)
        places = [place for place in pc.indices_nonzero(mask).to_pylist() if place not in problems]
        if places:
            found = pc.min_max(due.take(pa.array(places, pa.int64()))).as_py()
            first, last = (from_microseconds(found[name]) for name in ("min", "max"))
            self.first = first if self.first is None else min(first, self.first)
            self.last = last if self.last is None else max(last, self.last)
            self.count += len(places)
        return places

    def refuse(self, way_out: str) -> None:
        """Refuse a task with overdue rows.

        Raises:
            InvalidRowError: there are overdue rows.
        """
        if self.first is not None:
            raise InvalidRowError(overdue_error_text(f"{self.count:,} rows of this partition", self.first, way_out))


def overdue_error_text(rows: str, first: datetime, way_out: str) -> str:
    """The text of the error for overdue rows.

    Args:
        rows: the subject of the sentence, such as "3 rows of this partition".
        first: the earliest due time of these rows.
        way_out: what to do if the due times are correct.
    """
    minutes = OVERDUE_GRACE // timedelta(minutes=1)
    hint = ""
    if EPOCH <= first < _SUSPICIOUS_BEFORE:
        hint = " Due times in the first months of 1970 are usually seconds that were read as milliseconds."
    return (
        f"{rows} were due more than {minutes} min before this write began, the first at "
        f"{first:%Y-%m-%d %H:%M:%S} UTC, and nothing was sent.{hint} {way_out}"
    )
