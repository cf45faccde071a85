"""Tables for plans on both engines."""

from __future__ import annotations

from bide.errors import InvalidColumnError, InvalidInputError, InvalidRowError
from bide.pipelines.plan.columns import Columns

REFUSED: tuple[tuple[Columns, type[Exception], str], ...] = (
    (Columns(at="when", delay="delay"), InvalidColumnError, "no column 'when': choose from at, delay, n"),
    (Columns(at="delay", delay="delay"), InvalidColumnError, "'delay' is int, which is not a time"),
    (Columns(at="at", delay="at"), InvalidColumnError, "'at' is string, which is not a delay"),
    (Columns(at="at", delay="delay", count="at"), InvalidColumnError, "'at' is string, which is not a number"),
    (Columns(at="at", delay="delay", count="n"), InvalidRowError, "2 of 3 rows have no time"),
    (Columns(at="at"), InvalidInputError, "name either the column of delays or the column of due times"),
)
"""Columns of a table with the times 06:00, "soon" and 06:00, delays of 5 ms, and the counts 1, 1 and -1; the errors."""
