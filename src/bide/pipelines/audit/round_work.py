"""What a round of an audit has to compute again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from bide.pipelines.audit.columns import FACT_COLUMNS

if TYPE_CHECKING:
    from bide.pipelines.audit.folder import Folder, Note
    from bide.pipelines.audit.unfinished_work import BatchKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundWork:
    """What a round has to compute again.

    Attributes:
        fresh: the batches of new facts, by table; each table of facts is there.
        to_rewrite: the batches of messages to rewrite for other reasons.
    """

    fresh: Mapping[str, set[BatchKey]]
    to_rewrite: set[BatchKey]

    @classmethod
    def of(
        cls,
        folder: Folder,
        notes: Iterable[Note],
        *,
        overdue: Collection[BatchKey],
        batches: Callable[[str, date], Iterable[int]],
    ) -> RoundWork:
        """The work for new facts, for messages that have become overdue, and for what an interrupted round has left.

        Args:
            notes: the notes of batches whose facts are new.
            overdue: the batches of messages that have become overdue.
            batches: the numbers of the batches of a table on a day.
        """
        fresh: defaultdict[str, set[BatchKey]] = defaultdict(set)
        for note in notes:
            for table in FACT_COLUMNS:
                if note.rows.get(table):
                    fresh[table] |= note.batches
        unfinished = folder.unfinished_work()
        for table in FACT_COLUMNS:
            # On a day that an interrupted round changed, messages without new facts may be missing or duplicated too.
            fresh[table] |= {(day, one) for day in unfinished.days for one in batches(table, day)}
        return cls(fresh=fresh, to_rewrite={*overdue, *unfinished.batches})

    @property
    def days(self) -> set[date]:
        """The days that are written."""
        return {day for some in (*self.fresh.values(), self.to_rewrite) for day, _ in some}

    @property
    def days_with_facts(self) -> set[date]:
        """The days of new facts."""
        return {day for some in self.fresh.values() for day, _ in some}

    @property
    def days_with_failures(self) -> set[date]:
        """The days of new failures."""
        return {day for day, _ in self.fresh["failed"]}
