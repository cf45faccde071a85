"""The messages that rows become: their columns, and their ids, which are made of what is in a row.

Whatever order or files Spark reads rows from, they have the same ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)
from pyspark.sql.types import BinaryType, DateType, StringType, TimestampNTZType, TimestampType

from bide.delay.protocol import MAX_NAME_BYTES
from bide.errors import InvalidColumnError, InvalidInputError, InvalidRowError
from bide.spark.sink_columns import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

    from bide.pipelines.schedule.plan import SchedulePlan

DIGEST: Final = "_bide_digest"
"""The column with the digest of all that is in a message."""

_SHOWN: Final = 40
"""Characters of a message id that an error names."""


def messages(rows: DataFrame, plan: SchedulePlan) -> DataFrame:
    """The messages of rows, in the columns of the sink: ``value``, ``deliver_at`` or ``delay``, ``message_id``, and
    ``headers``.

    Rows that are alike are counted: the second one gets a message id of its own, so that both arrive.

    Raises:
        InvalidColumnError: a column is not there, or cannot be used so.
    """
    return identified(digested_rows(rows, plan), plan).select(*columns_of(plan))


def digested_rows(rows: DataFrame, plan: SchedulePlan) -> DataFrame:
    """The messages of rows without their ids, each with a digest of all that is in it."""
    _check_columns(rows, plan)
    value = _body(rows, plan)
    time = rows[_quoted(plan.time_column)]
    if plan.at_column is not None:
        time = time.try_cast("timestamp")
    columns: dict[str, Column] = {"value": value, _time(plan): time}
    if plan.header_columns:
        entries = [
            F.struct(F.lit(name).alias("key"), rows[_quoted(name)].cast("string").alias("value"))
            for name in plan.header_columns
        ]
        columns["headers"] = F.map_from_entries(F.filter(F.array(*entries), lambda one: one["value"].isNotNull()))
    if plan.id_column is not None:
        columns["message_id"] = rows[_quoted(plan.id_column)].cast("string")
    told = F.unix_micros(time) if plan.at_column is not None else time
    parts: list[Any] = [F.lit(plan.digest()), told.cast("string")]
    if "headers" in columns:
        parts.append(F.to_json(columns["headers"]))
    if "message_id" in columns:
        parts.append(columns["message_id"])
    # The length before each part: no two rows run together to the same text.
    known = [
        F.concat(F.length(one).cast("string"), F.lit(":"), one) for one in (F.coalesce(p, F.lit("-")) for p in parts)
    ]
    whole = F.concat(*(one.cast("binary") for one in known), F.coalesce(value.cast("binary"), F.lit(b"")))
    columns[DIGEST] = F.substring(F.sha2(whole, 256), 1, 32)
    return rows.select(*(column.alias(name) for name, column in columns.items()))


def identified(digested: DataFrame, plan: SchedulePlan) -> DataFrame:
    """With message ids: the digests, and for rows that are alike a number too."""
    if plan.id_column is not None:
        return digested
    number = F.row_number().over(Window.partitionBy(DIGEST).orderBy(DIGEST))
    ids = F.when(number == 1, F.col(DIGEST)).otherwise(F.concat_ws("-", DIGEST, number.cast("string")))
    return digested.withColumn("message_id", ids)


def _body(rows: DataFrame, plan: SchedulePlan) -> Column:
    if plan.body_column is not None:
        return rows[_quoted(plan.body_column)]
    taken = {plan.time_column, *plan.header_columns}
    names = plan.body_columns or tuple(name for name in rows.columns if name not in taken)
    # A null stays a null: its absence would be another message.
    return F.to_json(F.struct(*(rows[_quoted(name)] for name in names)), {"ignoreNullFields": "false"})


def _check_columns(rows: DataFrame, plan: SchedulePlan) -> None:
    if plan.body_column is not None and plan.body_columns:
        raise InvalidInputError("both one column as the body and columns for a JSON body were given: give one of them")
    named = (plan.time_column, plan.body_column, plan.id_column, *plan.body_columns, *plan.header_columns)
    for name in named:
        if name is not None and name not in rows.columns:
            raise InvalidColumnError(f"there is no column {name!r}: there are {', '.join(rows.columns)}")
    kind = rows.schema[plan.time_column].dataType
    if plan.at_column is not None and not isinstance(kind, TimestampType | TimestampNTZType | DateType | StringType):
        raise InvalidColumnError(
            f"the column {plan.at_column!r} is {kind.simpleString()}, which is no time: make a timestamp of it"
        )
    is_delay, wanted = COLUMNS["delay"]
    if plan.delay_column is not None and not is_delay(kind):
        raise InvalidColumnError(
            f"the column {plan.delay_column!r} is {kind.simpleString()}, which is no delay: it has to be {wanted}"
        )
    if plan.body_column is not None:
        kind = rows.schema[plan.body_column].dataType
        if not isinstance(kind, StringType | BinaryType):
            raise InvalidColumnError(
                f"the column {plan.body_column!r} is {kind.simpleString()}, which is no body as it is: name it among "
                "the columns of a JSON body"
            )
    for name in (plan.id_column, *plan.header_columns):
        if name is not None and isinstance(rows.schema[name].dataType, BinaryType):
            raise InvalidColumnError(
                f"the column {name!r} is binary, which is no text: make text of it, by base64() or hex() for one"
            )


def refuse_repeated_ids(digested: DataFrame, column: str) -> None:
    """See whether each message id is there once, and can be one.

    Raises:
        InvalidRowError: some are not, or are null, empty, too long, or not UTF-8.
    """
    told = digested.groupBy("message_id").agg(
        F.count(F.lit(1)).alias("count"),
        F.octet_length("message_id").alias("size"),
        F.is_valid_utf8("message_id").alias("is_text"),
        F.left(F.make_valid_utf8("message_id"), F.lit(_SHOWN)).alias("shown"),
    )
    unfit = told.where(f"count > 1 or size is null or size = 0 or size > {MAX_NAME_BYTES} or not is_text")
    if found := unfit.limit(3).collect():
        shown = ", ".join(_unfit(row) for row in found)
        raise InvalidRowError(f"the values of the column {column!r} are no message ids, each being there once: {shown}")


def _unfit(row: Row) -> str:
    """What is wrong with a message id."""
    if row["size"] and not row["is_text"]:
        return f"{row['shown']} (which is not UTF-8)"
    if row["size"] and row["size"] > MAX_NAME_BYTES:
        return f"{row['shown']}... ({row['size']:,} bytes, the limit is {MAX_NAME_BYTES})"
    shown = row["shown"] or ("null" if row["size"] is None else "an empty text")
    return f"{shown} ({row['count']} times)"


def columns_of(plan: SchedulePlan) -> tuple[str, ...]:
    """Those of messages, the two first of which are never null."""
    return ("value", _time(plan), "message_id", *(("headers",) if plan.header_columns else ()))


def _time(plan: SchedulePlan) -> str:
    return "delay" if plan.at_column is None else "deliver_at"


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
