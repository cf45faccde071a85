"""Run of a schedule for a small table, in this process.

The messages, their ids and their parts are those of a run on Spark (:mod:`bide.pipelines.schedule.rows`), so each of
the two can continue the ledger of the other. Sending, checks and the ledger are shared code.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final

import pyarrow as pa

from bide.durations import EARLIEST, LATEST, MICROSECOND, from_microseconds, to_microseconds
from bide.pipelines.engine import NeedsSparkError
from bide.pipelines.ledger import Ledger, LedgerHead, LedgerPart
from bide.pipelines.schedule.delays import LONGEST, milliseconds_of
from bide.pipelines.schedule.hashes import checksum_of, parts_of
from bide.pipelines.schedule.id_checks import MAX_NAMED_IDS, describe_invalid_id, invalid_ids_error
from bide.pipelines.schedule.plan import SchedulePlan
from bide.pipelines.schedule.progress import Survey, begin, finished_parts, send_part
from bide.pipelines.schedule.texts import cast_texts, json_objects, quoted
from bide.pipelines.small_table import spark_name
from bide.pipelines.small_times import times
from bide.spark.overdue import OVERDUE_GRACE

_EARLIEST: Final = to_microseconds(EARLIEST)
_LATEST: Final = to_microseconds(LATEST)

_BATCH: Final = 10_000
"""The number of rows in a batch, as in a task of Spark: request ids of rows with keys depend on the batches."""

_SUPPORTED: Final = frozenset(
    {
        *("at_column", "delay_column", "body_columns", "body_column", "id_column", "key_column", "header_columns"),
        *("name", "settings"),
    }
)
"""The fields of a plan that this module supports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """The messages of a small table.

    Attributes:
        columns: the columns of the sink, without generated message ids.
        due: due times in microseconds since the Unix epoch, or delays in milliseconds; None for an invalid one.
        digests: the digests of the contents, as of :func:`bide.pipelines.schedule.rows.digested_rows`.
        plan: the plan.
    """

    columns: dict[str, pa.Array]
    due: list[int | None]
    digests: list[str]
    plan: SchedulePlan

    def due_times(self, now: datetime) -> list[int | None]:
        """The due times in microseconds since the Unix epoch.

        Args:
            now: the time to which delays are added.
        """
        if self.plan.at_column is not None:
            return [None if one is None or one < _EARLIEST else one for one in self.due]
        start = to_microseconds(now)
        return [None if one is None or one < 0 else start + min(one, LONGEST) * 1_000 for one in self.due]


def messages(table: pa.Table, plan: SchedulePlan, zone: tzinfo) -> Messages:
    """Convert the rows of a small table to messages.

    Raises:
        InvalidColumnError: a column is missing.
        NeedsSparkError: only Spark can convert a value.
    """
    _refuse_unsupported(plan)
    plan.check_columns(table.column_names)
    columns: dict[str, pa.Array] = {}
    values = _bodies(table, plan, zone)
    columns["value"] = pa.array(values, _body_type(table, plan))
    time = table.column(plan.time_column)
    due: list[int | None]
    if plan.at_column is not None:
        due = times(plan.time_column, time, zone)
        columns["deliver_at"] = pa.array(due, pa.timestamp("us", "UTC"))
        stamps = [None if one is None else str(one) for one in due]
    else:
        due = _delays(plan.time_column, time)
        columns["delay"] = pa.concat_arrays(time.chunks) if time.num_chunks else pa.array([], time.type)
        stamps = cast_texts(plan.time_column, time, zone)
    parts: list[Sequence[str | None]] = [[plan.digest()] * len(values), stamps]
    if plan.header_columns:
        texts = [cast_texts(name, table.column(name), zone) for name in plan.header_columns]
        headers = [
            [(name, text) for name, text in zip(plan.header_columns, row, strict=True) if text is not None]
            for row in zip(*texts, strict=True)
        ]
        columns["headers"] = pa.array(headers, pa.map_(pa.string(), pa.string()))
        parts.append([_map_json(one) for one in headers])
    for field, column in (("message_id", plan.id_column), ("key", plan.key_column)):
        if column is not None:
            texts_of_column = cast_texts(column, table.column(column), zone)
            columns[field] = pa.array(texts_of_column, pa.string())
            parts.append(texts_of_column)
    digests = [_digest(row, value) for *row, value in zip(*parts, values, strict=True)]
    return Messages(columns=columns, due=due, digests=digests, plan=plan)


def survey(found: Messages, *, now: datetime, begun: datetime | None = None) -> Survey:
    """Count valid, invalid and overdue messages; see :func:`bide.pipelines.schedule.run.survey`.

    Raises:
        InvalidRowError: message ids or keys are repeated or invalid.
    """
    plan, start = found.plan, to_microseconds(now)
    longest = _LATEST - start
    if plan.key_column is None:
        longest = min(plan.settings.infrastructure.max_delay // MICROSECOND, longest)
    limit, overdue = start + longest, to_microseconds((begun or now) - OVERDUE_GRACE)
    dues = found.due_times(now)
    bodies = found.columns["value"].is_valid().to_pylist()
    known = [due for due in dues if due is not None]
    with_body = [due for due, body in zip(dues, bodies, strict=True) if due is not None and body]
    _refuse_invalid_ids(found)
    return Survey(
        rows=len(dues),
        checksum=checksum_of(found.digests),
        without_time=len(dues) - len(known),
        without_body=len(known) - len(with_body),
        too_late=sum(due > limit for due in with_body),
        # Text that is not UTF-8, and a column of all headers, are left to Spark.
        bad_headers=0,
        already_due=sum(due < start for due in known),
        overdue=sum(due < overdue for due in with_body),
        first=from_microseconds(min(min(known), _LATEST)) if known else None,
        last=from_microseconds(min(max(known), _LATEST)) if known else None,
    )


def due_times(found: Messages, every: timedelta, *, now: datetime) -> list[tuple[datetime, int]]:
    """Count messages by due time; see :func:`bide.pipelines.schedule.run.due_times`."""
    width = every // MICROSECOND
    counts = Counter[int]()
    for due in found.due_times(now):
        if due is not None:
            within = min(max(due, _EARLIEST + width), _LATEST)
            counts[within - within % width] += 1
    return [(from_microseconds(due), count) for due, count in sorted(counts.items())]


def message_ids(found: Messages) -> list[str | None]:
    """The message ids: those of the rows, or the digests, with a number appended for repeated rows."""
    if "message_id" in found.columns:
        return found.columns["message_id"].to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types
    seen = Counter[str]()
    ids: list[str | None] = []
    for one in found.digests:
        seen[one] += 1
        ids.append(one if seen[one] == 1 else f"{one}-{seen[one]}")
    return ids


def send(found: Messages, ledger: Ledger, head: LedgerHead, *, begun: datetime | None = None) -> list[LedgerPart]:
    """Send the messages of the parts that are not in the ledger; see :func:`bide.pipelines.schedule.run.send`.

    Returns:
        The parts that were sent.
    """
    with ledger.lock():
        done, is_finished = finished_parts(ledger, head)
        if not is_finished:
            plan, since = begin(found.plan, ledger, head, begun or datetime.now(UTC))
            _send_rest(found, plan, ledger, head, done, since)
        return [one for one in ledger.parts() if one.part not in done]


def _send_rest(
    found: Messages, plan: SchedulePlan, ledger: Ledger, head: LedgerHead, done: Collection[int], begun: datetime
) -> None:
    columns = dict(found.columns)
    columns["message_id"] = pa.array(message_ids(found), pa.string())
    names = [name for name in ("value", "deliver_at", "delay", "message_id", "key", "headers") if name in columns]
    table = pa.table({name: columns[name] for name in names})
    places: dict[int, list[int]] = {}
    for place, part in enumerate(parts_of(found.digests, head.parts)):
        places.setdefault(part, []).append(place)
    for part in sorted(places.keys() - set(done)):
        rows = table.take(pa.array(places[part]))
        if plan.key_column is not None:
            # Request ids depend on the order of the rows, which has to be the same in a repeated part and on Spark.
            rows = rows.sort_by("key")
        batches = iter(rows.combine_chunks().to_batches(max_chunksize=_BATCH))
        send_part(batches, part, plan, ledger, columns=tuple(names), head=head, begun=begun)


def _refuse_unsupported(plan: SchedulePlan) -> None:
    for one in fields(plan):
        if one.name not in _SUPPORTED and getattr(plan, one.name):
            raise NeedsSparkError(f"the plan sets {one.name}")


def _body_type(table: pa.Table, plan: SchedulePlan) -> pa.DataType:
    return pa.string() if plan.body_column is None else table.schema.field(plan.body_column).type


def _bodies(table: pa.Table, plan: SchedulePlan, zone: tzinfo) -> list[str | bytes | None]:
    if plan.body_column is not None:
        column = table.column(plan.body_column)
        if column.type not in (pa.string(), pa.binary()):
            raise NeedsSparkError(f"the column {plan.body_column!r} is {spark_name(column.type)}")
        return column.to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types
    taken = {plan.time_column, *plan.header_columns}
    names = plan.body_columns or tuple(name for name in table.column_names if name not in taken)
    return [*json_objects(names, [table.column(name) for name in names], zone, table.num_rows)]


def _delays(name: str, column: pa.ChunkedArray) -> list[int | None]:
    """Delays in milliseconds; None for an invalid one."""
    read: Callable[[str], int | None] | None = milliseconds_of if column.type == pa.string() else None
    if read is None and not pa.types.is_integer(column.type):
        raise NeedsSparkError(f"the column {name!r} is {spark_name(column.type)}")
    return [one if read is None or one is None else read(one) for one in column.to_pylist()]


def _map_json(entries: Sequence[tuple[str, str]]) -> str:
    return f"{{{','.join(f'{quoted(name)}:{quoted(text)}' for name, text in entries)}}}"


def _digest(parts: Sequence[str | None], value: str | bytes | None) -> str:
    texts = ["-" if one is None else one for one in parts]
    prefixed = "".join(f"{len(one)}:{one}" for one in texts).encode()
    body = value.encode() if isinstance(value, str) else value or b""
    return hashlib.sha256(prefixed + body).hexdigest()[:32]


def _refuse_invalid_ids(found: Messages) -> None:
    plan = found.plan
    for field, column, what in (("message_id", plan.id_column, "message ids"), ("key", plan.key_column, "keys")):
        if column is None:
            continue
        invalid = [
            one
            for text, count in Counter(found.columns[field].to_pylist()).items()
            if (one := describe_invalid_id(text, count, is_key=field == "key")) is not None
        ]
        if invalid:
            raise invalid_ids_error(column, what, invalid[:MAX_NAMED_IDS])
