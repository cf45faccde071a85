"""Rows that were due too long before they are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc

from bide.durations import EPOCH, from_microseconds, to_microseconds
from bide.errors import InvalidRowError

Past = Literal["send", "drop", "reject"]

PAST: Final[tuple[Past, ...]] = get_args(Past)
"""What can become of rows that are overdue: they are sent at once, left out, or put among the rejects."""

GRACE: Final = timedelta(minutes=5)
"""A row that was due longer ago than this when the write began is overdue. Others that are due already go at once."""

STATUS: Final = "past"
"""The ``reject_status`` of rows that are overdue."""

_MICROSECOND: Final = timedelta(microseconds=1)
_FIRST_OF_ALL: Final = to_microseconds(datetime.min.replace(tzinfo=UTC))
_SECONDS_AS_MILLISECONDS: Final = datetime(1970, 6, 1, tzinfo=UTC)


@dataclass(slots=True)
class Overdue:
    """Counts the rows of one task that are overdue.

    Args:
        begun: when the write began.

    Attributes:
        count: how many there were.
        first: when the first was due, None where there is none.
        last: when the last of them was due.
    """

    begun: datetime
    count: int = 0
    first: datetime | None = field(default=None, init=False)
    last: datetime | None = field(default=None, init=False)

    def add(self, batch: pa.RecordBatch, problems: Mapping[int, str]) -> list[int]:
        """Count the overdue rows of a batch, and say which they are.

        Args:
            problems: rows that cannot be sent anyway, by their place.
        """
        due = pc.cast(batch.column("deliver_at"), pa.int64())
        latest = to_microseconds(self.begun - GRACE)
        # Times before Python's first are a problem of their own.
        mask = pc.fill_null(pc.and_(pc.less(due, latest), pc.greater_equal(due, _FIRST_OF_ALL)), False)
        places = [place for place in pc.indices_nonzero(mask).to_pylist() if place not in problems]
        if places:
            found = pc.min_max(due.take(pa.array(places, pa.int64()))).as_py()
            first, last = (from_microseconds(found[name]) for name in ("min", "max"))
            self.first = first if self.first is None else min(first, self.first)
            self.last = last if self.last is None else max(last, self.last)
            self.count += len(places)
        return places

    def refuse(self, way_out: str) -> None:
        """See that there is none.

        Raises:
            InvalidRowError: there are some.
        """
        if self.first is not None:
            raise InvalidRowError(refusal(f"{self.count:,} rows of this partition", self.first, way_out))


def refusal(rows: str, first: datetime, way_out: str) -> str:
    """Why rows that are overdue stop a write.

    Args:
        rows: how many of what.
        first: when the first of them was due.
        way_out: what to do where they are meant.
    """
    minutes = GRACE // timedelta(minutes=1)
    hint = ""
    if EPOCH <= first < _SECONDS_AS_MILLISECONDS:
        hint = " Due times in the first months of 1970 are usually seconds that were read as milliseconds."
    return (
        f"{rows} were due more than {minutes} min before this write began, the first at "
        f"{first:%Y-%m-%d %H:%M:%S} UTC, and nothing of it was sent.{hint} {way_out}"
    )
