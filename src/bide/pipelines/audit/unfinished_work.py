"""Unfinished work of a round of an audit."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

BatchKey = tuple[date, int]
"""Day and number of a batch of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedWork:
    """The unfinished work of a round.

    Attributes:
        batches: batches of messages that the round was to replace.
        days: days whose tables the round has changed. Rows may be missing or repeated in them.
    """

    batches: set[BatchKey]
    days: set[date]

    def __bool__(self) -> bool:
        return bool(self.batches)
