"""Tables of facts in Spark, with the rows of :mod:`bide.pipelines.audit.fact_rows`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 (the usual name)
from pyspark.sql.pandas.types import from_arrow_schema

from bide.pipelines.audit.columns import FACT_COLUMNS, UNDECODABLE, UNDECODABLE_COLUMNS, arrow_schema, parse_columns
from bide.pipelines.audit.fact_rows import TABLE_COLUMN, fact_schema, facts_of, message_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

RecordBatches = Iterator[pa.RecordBatch]


def schema_of(columns: str) -> StructType:
    """Spark's schema of columns in text, such as ``target string, count long``. (Spark's parser needs a session.)"""
    return from_arrow_schema(arrow_schema(columns))


SCHEMAS: Final[Mapping[str, StructType]] = {name: schema_of(columns) for name, columns in FACT_COLUMNS.items()}
"""The columns of each table, in order; the tables are partitioned by ``day``."""


def scheduled(messages: DataFrame, layouts: Mapping[str, str], *, time_zone: str = "UTC") -> DataFrame:
    """The table ``scheduled``.

    Args:
        messages: messages that the data source ``rabbitmq`` read from streams of taps, with headers.
        layouts: the layout of each stream.
        time_zone: the time zone of Celery's due times without an offset.
    """
    return rows_of_table(_converted(messages, "scheduled", layouts, time_zone), "scheduled")


def delivered(messages: DataFrame, layouts: Mapping[str, str], *, time_zone: str = "UTC") -> DataFrame:
    """The table ``delivered``, with the arguments of :func:`scheduled`. An unknown due time is null."""
    return rows_of_table(_converted(messages, "delivered", layouts, time_zone), "delivered")


def events(messages: DataFrame) -> DataFrame:
    """The facts in events of endpoints, for :func:`processed` and :func:`failed`.

    Args:
        messages: messages that the data source ``rabbitmq`` read from the events stream.
    """
    return _converted(messages, "events", {}, "UTC")


def processed(events: DataFrame) -> DataFrame:
    """The table ``processed``, from :func:`events`."""
    return rows_of_table(events, "processed")


def failed(events: DataFrame) -> DataFrame:
    """The table ``failed``, from :func:`events`."""
    return rows_of_table(events, "failed")


def rows_of_table(facts: DataFrame, table: str) -> DataFrame:
    """The rows of a table among the facts of a source, with the columns of the table."""
    columns = UNDECODABLE_COLUMNS if table == UNDECODABLE else FACT_COLUMNS[table]
    return facts.where(F.col(TABLE_COLUMN) == table).select(*(name for name, _ in parse_columns(columns)))


def spark_schema(source: str) -> StructType:
    """The columns of :func:`bide.pipelines.audit.fact_rows.facts_of`."""
    return from_arrow_schema(fact_schema(source))


def _converted(messages: DataFrame, source: str, layouts: Mapping[str, str], time_zone: str) -> DataFrame:
    names = [name for name in message_schema(source).names if name in messages.columns]
    return messages.select(*names).mapInArrow(_converter(source, dict(layouts), time_zone), spark_schema(source))


def _converter(source: str, layouts: Mapping[str, str], time_zone: str) -> Callable[[RecordBatches], RecordBatches]:
    def convert(batches: RecordBatches) -> RecordBatches:
        for batch in batches:
            yield facts_of(batch, source, layouts=layouts, time_zone=time_zone)

    return convert
