"""Conversion of rows to messages: columns, and ids that are derived from the contents.

The ids do not depend on the order in which Spark reads the rows, or on the files that hold them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 (the usual name)
from pyspark.sql.types import (
    BinaryType,
    DateType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from bide.delay.protocol import MAX_NAME_BYTES
from bide.errors import InvalidColumnError, InvalidRowError
from bide.pipelines.schedule.id_checks import MAX_NAMED_IDS, MAX_SHOWN_CHARACTERS, describe_row, invalid_ids_error
from bide.pipelines.schedule.targets import MAX_TARGETS, TargetCount
from bide.schedules.names import CONTROL
from bide.spark.sink_columns import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from bide.pipelines.schedule.plan import SchedulePlan

DIGEST: Final = "_bide_digest"
"""The column with the digest of a message's contents."""


def messages(rows: DataFrame, plan: SchedulePlan) -> DataFrame:
    """Convert rows to messages, with the columns of the sink.

    The columns are ``value``, ``deliver_at`` or ``delay``, ``message_id``, ``queue``, ``key``, and ``headers``. Equal
    rows are numbered, so that each has a message id of its own and all of them arrive.

    Raises:
        InvalidColumnError: a column is missing, or has the wrong type.
    """
    return with_ids(digested_rows(rows, plan), plan).select(*columns_of(plan))


def digested_rows(rows: DataFrame, plan: SchedulePlan) -> DataFrame:
    """Convert rows to messages without ids, each with a digest of its contents."""
    _check_columns(rows, plan)
    value = _body(rows, plan)
    time = rows[_quoted(plan.time_column)]
    if plan.at_column is not None:
        time = time.try_cast("timestamp")
    columns: dict[str, Column] = {"value": value, _time_field(plan): time}
    if plan.header_columns:
        entries = [
            F.struct(F.lit(name).alias("key"), rows[_quoted(name)].cast("string").alias("value"))
            for name in plan.header_columns
        ]
        columns["headers"] = F.map_from_entries(F.filter(F.array(*entries), lambda one: one["value"].isNotNull()))
    if plan.headers_column is not None:
        columns["headers"] = _headers(rows, plan.headers_column)
    if plan.to_column is not None:
        columns["queue"] = rows[_quoted(plan.to_column)].cast("string")
    if plan.id_column is not None:
        columns["message_id"] = rows[_quoted(plan.id_column)].cast("string")
    if plan.key_column is not None:
        columns["key"] = rows[_quoted(plan.key_column)].cast("string")
    due = F.unix_micros(time) if plan.at_column is not None else time
    parts: list[Any] = [F.lit(plan.digest()), due.cast("string")]
    if "headers" in columns:
        is_json = plan.headers_column is not None and _is_json(rows, plan.headers_column)
        parts.append(columns["headers"] if is_json else F.to_json(columns["headers"]))
    if "queue" in columns:
        parts.append(columns["queue"])
    if "message_id" in columns:
        parts.append(columns["message_id"])
    if "key" in columns:
        parts.append(columns["key"])
    # The length before each part keeps different rows from having the same concatenated text.
    prefixed = [
        F.concat(F.length(one).cast("string"), F.lit(":"), one) for one in (F.coalesce(p, F.lit("-")) for p in parts)
    ]
    whole = F.concat(*(one.cast("binary") for one in prefixed), F.coalesce(value.cast("binary"), F.lit(b"")))
    columns[DIGEST] = F.substring(F.sha2(whole, 256), 1, 32)
    return rows.select(*(column.alias(name) for name, column in columns.items()))


def count_targets(rows: DataFrame, plan: SchedulePlan) -> list[TargetCount]:
    """Count rows by the queue in the column of targets, the queue with most rows first; empty without such a column.

    Raises:
        InvalidColumnError: see :func:`messages`.
        InvalidRowError: there are more than :data:`~bide.pipelines.schedule.targets.MAX_TARGETS` queues.
    """
    if plan.to_column is None:
        return []
    counts = (
        with_ids(digested_rows(rows, plan), plan)
        .groupBy(F.make_valid_utf8("queue").alias("queue"))
        .agg(F.count(F.lit(1)).alias("count"), F.min(F.make_valid_utf8("message_id")).alias("message_id"))
    )
    found = counts.limit(MAX_TARGETS + 1).collect()
    if len(found) > MAX_TARGETS:
        raise InvalidRowError(
            f"the column {plan.to_column!r} has more than {MAX_TARGETS:,} different values: check that they are names "
            "of queues, or divide the input"
        )
    targets = (TargetCount(one["queue"], one["count"], one["message_id"]) for one in found)
    return sorted(targets, key=lambda one: (-one.rows, one.queue or ""))


def with_ids(digested: DataFrame, plan: SchedulePlan) -> DataFrame:
    """Add message ids: the digests, with a number appended for repeated rows."""
    if plan.id_column is not None:
        return digested
    number = F.row_number().over(Window.partitionBy(DIGEST).orderBy(DIGEST))
    ids = F.when(number == 1, F.col(DIGEST)).otherwise(F.concat_ws("-", DIGEST, number.cast("string")))
    return digested.withColumn("message_id", ids)


def _headers(rows: DataFrame, name: str) -> Column:
    """The column of all headers: a map of text, or JSON."""
    column = rows[_quoted(name)]
    kind = rows.schema[name].dataType
    if isinstance(kind, StructType):
        # Spark reads JSON objects as structs with the fields of all rows; to_json() leaves out null fields.
        return F.to_json(column)
    return column if isinstance(kind, StringType) else column.cast("map<string, string>")


def _is_json(rows: DataFrame, name: str) -> bool:
    return isinstance(rows.schema[name].dataType, StringType | StructType)


def _body(rows: DataFrame, plan: SchedulePlan) -> Column:
    if plan.body_column is not None:
        return rows[_quoted(plan.body_column)]
    taken = {plan.time_column, *plan.header_columns, plan.to_column, plan.headers_column}
    names = plan.body_columns or tuple(name for name in rows.columns if name not in taken)
    # A null is kept in the JSON, because a consumer may distinguish null from a missing key.
    return F.to_json(F.struct(*(rows[_quoted(name)] for name in names)), {"ignoreNullFields": "false"})


def _check_columns(rows: DataFrame, plan: SchedulePlan) -> None:
    plan.check_columns(rows.columns)
    kind = rows.schema[plan.time_column].dataType
    if plan.at_column is not None and not isinstance(kind, TimestampType | TimestampNTZType | DateType | StringType):
        raise InvalidColumnError(
            f"the column {plan.at_column!r} is {kind.simpleString()}, which is not a time: convert it to a timestamp"
        )
    is_delay, delay_types = COLUMNS["delay"]
    if plan.delay_column is not None and not is_delay(kind):
        raise InvalidColumnError(
            f"the column {plan.delay_column!r} is {kind.simpleString()}, which is not a delay: convert it to "
            f"{delay_types}"
        )
    if plan.body_column is not None:
        kind = rows.schema[plan.body_column].dataType
        if not isinstance(kind, StringType | BinaryType):
            raise InvalidColumnError(
                f"the column {plan.body_column!r} is {kind.simpleString()}, but a body is a string or binary: convert "
                "it, or name it among the columns of a JSON body"
            )
    if plan.headers_column is not None:
        kind = rows.schema[plan.headers_column].dataType
        if not isinstance(kind, StringType | StructType | MapType):
            raise InvalidColumnError(
                f"the column {plan.headers_column!r} is {kind.simpleString()}, but headers are a map, a struct or a "
                "JSON object as text: convert it"
            )
    for name in plan.text_columns:
        if name is not None and isinstance(rows.schema[name].dataType, BinaryType):
            raise InvalidColumnError(
                f"the column {name!r} is binary, which is not text: convert it to text, for example with base64() or "
                "hex()"
            )


def refuse_invalid_ids(digested: DataFrame, plan: SchedulePlan) -> None:
    """Check that message ids and keys are valid and unique.

    Raises:
        InvalidRowError: some are repeated, null, empty, too long, not UTF-8, or keys with control characters.
    """
    if plan.id_column is not None:
        _refuse_invalid(digested, "message_id", plan.id_column, "message ids")
    if plan.key_column is not None:
        # Parts are sent at the same time, so it would be random which row of a repeated key is delivered.
        _refuse_invalid(digested, "key", plan.key_column, "keys")


def _refuse_invalid(digested: DataFrame, field: str, column: str, what: str) -> None:
    names = digested.groupBy(field).agg(
        F.count(F.lit(1)).alias("count"),
        F.octet_length(field).alias("size"),
        F.is_valid_utf8(field).alias("is_text"),
        F.left(F.make_valid_utf8(field), F.lit(MAX_SHOWN_CHARACTERS)).alias("shown"),
        (F.lit(field == "key") & F.make_valid_utf8(field).rlike(CONTROL.pattern)).alias("has_control"),
    )
    invalid = names.where(
        f"count > 1 or size is null or size = 0 or size > {MAX_NAME_BYTES} or not is_text or has_control"
    )
    if found := invalid.limit(MAX_NAMED_IDS).collect():
        raise invalid_ids_error(column, what, [describe_row(row) for row in found])


def columns_of(plan: SchedulePlan) -> tuple[str, ...]:
    """The columns of the messages. The first two must not be null."""
    headers = plan.header_columns or plan.headers_column
    optional = (("queue", plan.to_column), ("key", plan.key_column), ("headers", headers))
    return ("value", _time_field(plan), "message_id", *(name for name, given in optional if given))


def _time_field(plan: SchedulePlan) -> str:
    return "delay" if plan.at_column is None else "deliver_at"


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
