"""Computed tables of an audit in Spark, with the SQL of :mod:`bide.pipelines.audit.queries`."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final

from pyspark.sql.pandas.types import from_arrow_schema

from bide.pipelines.audit import columns, queries
from bide.pipelines.audit.facts import schema_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MESSAGES_SCHEMA: Final = from_arrow_schema(columns.MESSAGES_SCHEMA)
LATENESS_SCHEMA: Final = schema_of(columns.LATENESS_COLUMNS)
PENDING_SCHEMA: Final = schema_of(columns.PENDING_COLUMNS)
FAILURES_SCHEMA: Final = schema_of(columns.FAILURES_COLUMNS)
PENDING_PARTS_SCHEMA: Final = schema_of(columns.PENDING_PARTS_COLUMNS)
FAILURES_PARTS_SCHEMA: Final = schema_of(columns.FAILURES_PARTS_COLUMNS)

MESSAGE_KEY: Final = ("message_id", "day")
"""The columns that identify a message."""


class _SparkForms:
    unnest = "explode"

    def last_due(self, waiting: str) -> str:
        return f"array_max(transform({waiting}, one -> one.due))"

    def struct(self, **fields: str) -> str:
        pairs = ", ".join(f"'{name}', {value}" for name, value in fields.items())
        return f"named_struct({pairs})"

    def list_of_structs(self, **fields: str) -> str:
        return f"array_sort(collect_list({self.struct(**fields)}))"


_FORMS: Final = _SparkForms()


def messages(
    scheduled: DataFrame,
    delivered: DataFrame,
    processed: DataFrame,
    failed: DataFrame,
    occurrences: DataFrame,
    *,
    now: datetime,
) -> DataFrame:
    """The table ``messages``, with one row for each message id and day, from the facts of any number of days.

    Args:
        now: the time until which the facts were read.
    """
    names = ("{scheduled}", "{delivered}", "{processed}", "{failed}", "{occurrences}")
    return _run(
        queries.messages(*names, now=now, forms=_FORMS),
        scheduled=scheduled,
        delivered=delivered,
        processed=processed,
        failed=failed,
        occurrences=occurrences,
    )


def mark_overdue(messages: DataFrame, *, now: datetime) -> DataFrame:
    """Change the outcome of messages that have become overdue without new facts."""
    query = queries.mark_overdue("{messages}", messages.columns, now=now, forms=_FORMS)
    return _run(query, messages=messages)


def pending_parts(messages: DataFrame, *, now: datetime) -> DataFrame:
    """Counts of pending messages by target and slice of the due time, for each day and batch.

    Args:
        messages: the table ``messages``, with the batch of each row.
        now: the time until which the facts were read.
    """
    return _run(queries.pending_parts("{messages}", now=now, forms=_FORMS), messages=messages)


def pending(parts: DataFrame) -> DataFrame:
    """The table ``pending``, from the parts of all days."""
    return _run(queries.pending("{parts}"), parts=parts)


def newly_overdue(parts: DataFrame, *, now: datetime) -> DataFrame:
    """The ``day`` and ``batch`` of messages that have become overdue since *parts* were written."""
    return _run(queries.newly_overdue("{parts}", now=now), parts=parts)


def lateness(delivered: DataFrame) -> DataFrame:
    """The table ``lateness``, by the minute in which messages were due."""
    return _run(queries.lateness("{delivered}"), delivered=delivered)


def with_due_minute(delivered: DataFrame) -> DataFrame:
    """The facts that the table ``lateness`` counts, with the ``minute`` in which each message was due."""
    return _run(queries.with_due_minute("{delivered}"), delivered=delivered)


def failures_parts(failed: DataFrame) -> DataFrame:
    """Failures by group and minute, for each day."""
    return _run(queries.failures_parts("{failed}"), failed=failed)


def failures(parts: DataFrame) -> DataFrame:
    """The table ``failures``, from the parts of all days."""
    return _run(queries.failures("{parts}"), parts=parts)


def _run(query: str, **tables: DataFrame) -> DataFrame:
    session = next(iter(tables.values())).sparkSession
    return session.sql(query, **tables)  # type: ignore[arg-type]  # no table is named args
