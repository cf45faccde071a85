"""Rows of a table as messages and schedules: their checks and their conversion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from hashlib import blake2b
from itertools import repeat
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from bide.amqp.codec import field_value
from bide.delay.protocol import DelayInfrastructure
from bide.durations import EPOCH, MICROSECOND, parse_delay, to_microseconds
from bide.errors import BideError, InvalidDelayError, InvalidInputError, InvalidRowError, ReservedHeaderError
from bide.messages.checker import MessageChecker
from bide.messages.outgoing import MessageCopy, OutgoingMessage
from bide.runtime.bounded_cache import BoundedCache
from bide.schedules.outgoing import NumberedSchedule, OutgoingSchedule
from bide.schedules.prepared import check_schedule
from bide.schedules.requests import RequestId
from bide.spark.column_checks import are_keys, are_short_strings, has_no_empty_text, is_between, is_utf8
from bide.spark.column_values import (
    EARLIEST_MICROSECONDS,
    LATEST_MICROSECONDS,
    epoch_microseconds,
    is_text_type,
    value_of,
    values_of,
)
from bide.spark.header_values import (
    BideHeaders,
    are_headers,
    is_header_name,
    without_bide_headers,
)
from bide.spark.request_ids import request_ids

_DAY: Final = timedelta(days=1) // MICROSECOND
_PER_ROW: Final = frozenset(
    {"value", "key", "delay", "deliver_at", "message_id", "correlation_id", "headers", "headers_json", "creation_time"}
)
"""Columns whose values usually differ in each row. Of the other columns, each combination of values is checked once."""

_FIELDS: Final = {"value": "body", "queue": "to", "headers_json": "headers", "creation_time": "timestamp"}
"""Fields of a message whose name differs from that of the column."""

_WAYS_OUT: Final = {
    "value": "give an empty text if the body should be empty",
    "deliver_at": "the due time is missing or cannot be parsed; give one",
    "key": "give each row a key, or write the rows without keys separately",
}

REQUEST_COLUMN: Final = "request"
"""The column with the request id of a row with a key, in the buffer. A table cannot have a column of this name."""

_SAMPLE: Final = RequestId("sample", 1)


@dataclass(slots=True)
class RowConverter:
    """Converts the record batches of one write into messages, or into schedules if there is a column ``key``.

    Args:
        columns: the columns to read, by their names in :data:`bide.spark.sink_columns.COLUMNS`.
        constants: fields that all messages have in common, by the names of :class:`bide.OutgoingMessage`.
        infrastructure: the delay infrastructure.
        required: columns that must not be null.
        refused: queues that the column ``queue`` must not name, with the reasons.
        bide_headers: what to do with bide's own headers in the rows; None to refuse them with an error that does not
            mention the option ``bideHeaders``.
    """

    columns: tuple[str, ...]
    constants: Mapping[str, Any]
    infrastructure: DelayInfrastructure
    required: tuple[str, ...] = ("value",)
    refused: Mapping[str, str] = field(default_factory=dict)
    bide_headers: BideHeaders | None = None
    _checker: MessageChecker = field(default_factory=MessageChecker, init=False)
    _valid_combinations: BoundedCache[Any, None] = field(default_factory=BoundedCache, init=False)

    def __post_init__(self) -> None:
        if self.is_keyed:
            self.required = (*self.required, "key")

    @property
    def is_keyed(self) -> bool:
        """Whether the rows are schedules."""
        return "key" in self.columns

    def problems(self, batch: pa.RecordBatch, now: datetime) -> dict[int, str]:
        """Errors of invalid rows, by the index of the row in the batch.

        A check of whole columns comes first, which is much faster; rows are checked one by one only if it fails.
        """
        if not batch.num_rows or self.is_valid(batch, now):
            return {}
        lists = self._lists(batch)
        found = {}
        for index in range(batch.num_rows):
            try:
                self._check({name: values[index] for name, values in lists.items()}, now)
            except BideError as error:
                found[index] = str(error)
        return found

    def with_requests(self, batch: pa.RecordBatch, *, run: str, first: int) -> pa.RecordBatch:
        """Add the column :data:`REQUEST_COLUMN` to a batch of rows with keys. The batch must still have all its rows.

        Args:
            run: as for :meth:`messages`.
            first: the index of the first row in the partition.
        """
        requests = request_ids(self._lists(batch), run=run, first=first, seed=self._seed())
        return batch.append_column(REQUEST_COLUMN, pa.array(requests, pa.string()))

    def messages(
        self, batch: pa.RecordBatch, indexes: Sequence[object], *, run: str
    ) -> Iterator[OutgoingMessage | OutgoingSchedule]:
        """Convert a batch of valid rows into messages, or into schedules.

        Args:
            batch: with the column :data:`REQUEST_COLUMN` if the rows have keys.
            indexes: the index of each row in the partition, or another value that stays the same when the row is sent
                again.
            run: an id of the partition that is the same when the partition is sent again; the prefix of generated
                message ids.
        """
        lists = self._lists(batch)
        ids = lists.pop("message_id", None) or repeat(None, batch.num_rows)
        names = [_FIELDS.get(name, name) for name in lists]
        constants = dict(self.constants)
        seed = self._seed().encode()
        body_at = names.index("body")
        make: Any = NumberedSchedule if self.is_keyed else self._message_class
        requests = map(RequestId.parse, batch.column(REQUEST_COLUMN).to_pylist()) if self.is_keyed else None
        for index, (given, *values) in zip(indexes, zip(ids, *lists.values(), strict=False), strict=True):
            if given is None:
                given = f"{run}-{index}-{_digest(seed, values, body_at)}"
            if requests is not None:
                constants["request"] = next(requests)
            yield make(message_id=given, **dict(zip(names, values, strict=True)), **constants)

    @property
    def _message_class(self) -> type[OutgoingMessage]:
        return MessageCopy if self.bide_headers == "keep" else OutgoingMessage

    def _seed(self) -> str:
        """The fields that all messages have in common, for digests."""
        return repr(sorted(self.constants.items(), key=lambda item: item[0]))

    def _check(self, row: Mapping[str, Any], now: datetime) -> None:
        """Check one row as the publisher does.

        Raises:
            InvalidInputError: the row is invalid.
        """
        for name, value in row.items():
            if isinstance(value, InvalidInputError):
                raise InvalidRowError(f"the column {name} holds a value that cannot be sent: {value}")
        for name in self.required:
            if row[name] is None:
                raise InvalidRowError(f"the column {name} is null: {_WAYS_OUT.get(name, 'give a value')}")
        if row.get("message_id") == "":
            raise InvalidRowError("the column message_id is empty: give an id, or null to have one generated")
        self._check_target(row)
        delay, due = row.get("delay"), row.get("deliver_at")
        if delay is not None and due is not None:
            raise InvalidRowError("the columns delay and deliver_at both have a value: leave one null")
        if self.is_keyed and delay is None and due is None and not {"delay", "deliver_at"} & self.constants.keys():
            raise InvalidRowError("the row has neither a delay nor a due time: a row with a key needs one of them")
        values = {_FIELDS.get(name, name): value for name, value in row.items()}
        try:
            headers = self._check_fields({**values, **self.constants}, now)
        except ReservedHeaderError as error:
            if self.bide_headers is None:
                raise
            raise InvalidRowError(f"{error}, or set the option bideHeaders to drop or keep") from error
        except InvalidDelayError as error:
            if due is None:
                raise
            # The error mentions a delay, but the table has the column deliver_at.
            raise InvalidRowError(f"the column deliver_at: {error}") from error
        if (created := row.get("creation_time")) is not None and created < EPOCH:
            raise InvalidRowError(
                f"the column creation_time is {created.isoformat()}, but AMQP timestamps begin in 1970: give a later "
                "time, or null"
            )
        for name, value in headers.items():
            try:
                # Otherwise the error would come when the message is encoded, after others have been sent.
                field_value(value, name)
            except InvalidInputError as error:
                raise InvalidRowError(f"the header {error}") from error

    def _check_fields(self, fields: Mapping[str, Any], now: datetime) -> Mapping[str, Any]:
        """Check the fields of a message or schedule, and return its headers.

        Raises:
            InvalidInputError: a field is invalid.
        """
        if self.is_keyed:
            schedule = check_schedule(OutgoingSchedule(**fields), now)
            schedule.record(_SAMPLE, now)
            return schedule.message.headers
        message = self._checker.check(self._message_class(**fields))
        message.starting(now).route(self.infrastructure, now)
        return message.headers

    def _check_target(self, row: Mapping[str, Any]) -> None:
        if {"to", "exchange"} & self.constants.keys():
            return
        given = [name for name in ("queue", "exchange") if row.get(name) is not None]
        targets = [name for name in ("queue", "exchange") if name in self.columns]
        if not given:
            raise InvalidRowError(
                f"the column {targets[0]} is null: give the target of the message"
                if len(targets) == 1
                else f"the columns {' and '.join(targets)} are null: give the target of the message in one of them"
            )
        if len(given) == 2:
            raise InvalidRowError(f"the columns {' and '.join(given)} both have a value: leave one null")
        if (reason := self.refused.get(row.get("queue", ""))) is not None:
            raise InvalidRowError(reason)

    def is_valid(self, batch: pa.RecordBatch, now: datetime) -> bool:
        """Whether a check of whole columns proves all rows valid. If not, some rows may be invalid."""
        columns = {name: batch.column(name) for name in self.columns}
        return (
            all(is_utf8(column) for name, column in columns.items() if name != "value")
            and all(columns[name].null_count == 0 for name in self.required)
            and self._has_valid_times(columns, now)
            and all(
                are_short_strings(columns[name]) for name in ("message_id", "key", "correlation_id") if name in columns
            )
            and all(has_no_empty_text(columns[name]) for name in ("message_id", "key") if name in columns)
            and ("key" not in columns or are_keys(columns["key"]))
            and self._has_valid_headers(columns.get("headers"))
            and ("headers_json" not in columns or self._are_all_headers("headers_json", columns["headers_json"]))
            and (
                "creation_time" not in columns
                or is_between(epoch_microseconds(columns["creation_time"]), 0, LATEST_MICROSECONDS)
            )
            and self._has_valid_combinations(columns, now)
        )

    def _has_valid_times(self, columns: Mapping[str, pa.Array], now: datetime) -> bool:
        delay, due = columns.get("delay"), columns.get("deliver_at")
        longest = self.infrastructure.max_delay // MICROSECOND
        if self.is_keyed:
            # Schedules wait in the log, not in the infrastructure.
            longest = LATEST_MICROSECONDS - to_microseconds(now)
            times = [pc.is_valid(one) for one in (delay, due) if one is not None]
            if times and not pc.all(times[0] if len(times) == 1 else pc.or_(*times)).as_py():
                return False
        if delay is not None:
            if due is not None and pc.any(pc.and_(pc.is_valid(delay), pc.is_valid(due))).as_py():
                return False
            if is_text_type(delay.type):
                if not all(_is_delay(text, longest) for text in pc.unique(delay).to_pylist()):
                    return False
            else:
                scale = 1 if pa.types.is_duration(delay.type) else 1_000
                if not is_between(pc.cast(delay, pa.int64()), 0, longest // scale):
                    return False
        latest = min(LATEST_MICROSECONDS, to_microseconds(now) + longest)
        return due is None or is_between(pc.cast(due, pa.int64()), EARLIEST_MICROSECONDS, latest)

    def _has_valid_headers(self, headers: pa.Array | None) -> bool:
        if headers is None:
            return True
        if is_text_type(headers.type):
            return self._are_all_headers("headers", headers)
        if pa.types.is_map(headers.type):
            keys, values = headers.keys, headers.items
        else:
            keys, values = (pc.struct_field(headers.flatten(), name) for name in ("key", "value"))
            # A map has unique keys, but an array of structs may repeat a key.
            table = pa.table([pc.list_parent_indices(headers), keys], names=["row", "key"])
            if table.group_by(["row", "key"], use_threads=False).aggregate([]).num_rows < len(keys):
                return False
        # A timestamp column can hold times before 1970, which AMQP cannot represent, and times that are after the year
        # 9999 in local time, which Python cannot represent.
        if pa.types.is_timestamp(values.type) and not is_between(
            pc.cast(values, pa.int64()), 0, LATEST_MICROSECONDS - _DAY
        ):
            return False
        allowed = self.bide_headers in ("drop", "keep")
        return all(is_header_name(name, is_copy=allowed) for name in pc.unique(keys).to_pylist())

    def _are_all_headers(self, name: str, column: pa.Array) -> bool:
        return all(are_headers(one, is_copy=self.bide_headers == "keep") for one in self._column(name, column))

    def _has_valid_combinations(self, columns: Mapping[str, pa.Array], now: datetime) -> bool:
        """Whether each combination of values in the columns other than :data:`_PER_ROW` is valid."""
        names = [name for name in columns if name not in _PER_ROW]
        is_delayed = bool({"delay", "deliver_at"} & columns.keys())
        if names:
            table = pa.table([columns[name] for name in names], names=names)
            found = table.group_by(names, use_threads=False).aggregate([]).to_pylist()
        else:
            found = [{}]
        for values in found:
            key = tuple(values.values())
            if key in self._valid_combinations:
                continue
            if values.get("queue") in self.refused:
                return False
            fields = {_FIELDS.get(name, name): value_of(name, value) for name, value in values.items()}
            try:
                sample: dict[str, Any] = {"delay": self.infrastructure.resolution} if is_delayed else {}
                if self.is_keyed:
                    sample["key"] = "sample"
                self._check_fields({"body": b"", **sample, **fields, **self.constants}, now)
            except (InvalidInputError, TypeError):
                return False
            self._valid_combinations[key] = None
        return True

    def _lists(self, batch: pa.RecordBatch) -> dict[str, list[Any]]:
        """The values of each column, converted to fields of a message; an invalid value is replaced by its error."""
        return {name: self._column(name, batch.column(name)) for name in self.columns}

    def _column(self, name: str, column: pa.Array) -> list[Any]:
        values = values_of(name, column)
        if name in ("headers", "headers_json") and self.bide_headers == "drop":
            return [without_bide_headers(one) for one in values]
        return values


@lru_cache(maxsize=4096)
def _is_delay(text: str | None, longest: int) -> bool:
    try:
        return text is None or parse_delay(text) // MICROSECOND <= longest
    except InvalidInputError:
        return False


def _digest(seed: bytes, values: list[Any], body_at: int) -> str:
    """A digest of the contents, which keeps ids unique if another row gets the same index in a later run."""
    body = values[body_at]
    if len(values) > 1:
        seed += repr(values[:body_at] + values[body_at + 1 :]).encode("utf-8", errors="backslashreplace")
    return blake2b(seed + body, digest_size=8).hexdigest()
