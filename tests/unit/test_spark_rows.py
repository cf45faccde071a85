"""Rows as messages: equal checks of columns and of rows, and unique ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.amqp.codec import properties
from bide.delay.clock import Clock
from bide.errors import InvalidInputError
from bide.messages.checker import MessageChecker
from bide.messages.outgoing import OutgoingMessage
from bide.schedules.encoding import encode
from bide.schedules.outgoing import NumberedSchedule, OutgoingSchedule
from bide.schedules.prepared import check_schedule
from bide.spark.header_values import BIDE_HEADERS
from bide.spark.rows import REQUEST_COLUMN, RowConverter
from tests.examples import examples

NOW = datetime(2026, 11, 21, 6, tzinfo=UTC)
CLOCK = Clock(max_delay=timedelta(days=99))
US = timedelta(microseconds=1)
LAST = (datetime.max.replace(tzinfo=UTC) - datetime.fromtimestamp(0, UTC)) // US


def mostly(*good: Any, bad: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """Valid values with few invalid ones: a row with several invalid values hides all but the first."""
    return st.integers(0, 15).flatmap(lambda number: st.sampled_from(good if number else bad))


NO_TEXT = b"caf\xe9"
TEXT = mostly(None, "", "a", "x" * 255, bad=("x" * 256, "é" * 128, NO_TEXT))
NAME = mostly("a", "x" * 255, bad=(None, "", "x" * 256, NO_TEXT))
COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "value": (pa.string(), mostly("", "a", "é", bad=(None,))),
    "queue": (pa.string(), NAME),
    "key": (pa.string(), mostly("a", "é" * 127, bad=(None, "", "x" * 256, "a\tb", NO_TEXT))),
    "exchange": (pa.string(), NAME),
    "routing_key": (pa.string(), mostly(None, "", bad=("order.created", "x" * 256))),
    "deliver_at": (
        pa.timestamp("us", tz="UTC"),
        mostly(None, NOW, NOW - timedelta(days=9), NOW + timedelta(days=98), bad=(NOW + timedelta(days=100),)),
    ),
    "message_id": (pa.string(), TEXT),
    "headers": (
        pa.map_(pa.string(), pa.string()),
        mostly(None, {}, {"a": "v"}, {"x-death": ""}, bad=({"CC": ""}, {"bide-x": ""}, {"x" * 256: ""})),
    ),
    "headers_json": (
        pa.string(),
        mostly(
            None,
            "",
            '{"a":1,"x":{"$bytes":"/w=="},"t":{"$time":"2026-01-01T00:00:00Z"},"n":null}',
            bad=("[]", '{"bide-x":1}', '{"a":{"$time":"noon"}}', '{"a":{"$number":"nan"}}', '{"CC":["k"]}', "{"),
        ),
    ),
    "creation_time": (pa.timestamp("us", tz="UTC"), mostly(None, NOW, bad=(NOW - timedelta(days=99 * 365),))),
    "correlation_id": (pa.string(), TEXT),
    "type": (pa.string(), TEXT),
    "priority": (pa.int32(), mostly(None, 0, 255, bad=(256, -1))),
    "persistent": (pa.bool_(), st.none() | st.booleans()),
}
TIMES: tuple[pa.DataType, st.SearchStrategy[Any]] = (
    pa.map_(pa.string(), pa.timestamp("us", tz="Asia/Tokyo")),
    mostly(
        None, {}, {"a": NOW, "b": None}, bad=({"a": 0}, {"a": -500_000}, {"a": -1_000_000}, {"a": LAST}, {"a": 2**62})
    ),
)
PAIRS: tuple[pa.DataType, st.SearchStrategy[Any]] = (
    pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    mostly(
        None,
        [],
        [{"key": "a", "value": b""}, {"key": "b", "value": None}],
        bad=(
            [None],
            [{"key": "a", "value": b""}, None],
            [{"key": None, "value": b""}],
            [{"key": "a", "value": b""}, {"key": "a", "value": b"x"}],
        ),
    ),
)
DELAYS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.duration("us"), mostly(None, timedelta(0), timedelta(days=99), bad=(-US, timedelta(days=100)))),
    (pa.int64(), mostly(None, 0, 5, 99 * 86_400_000, bad=(-1, 99 * 86_400_000 + 1, 2**62))),
    (pa.string(), mostly(None, "5s", "P1D", bad=("-5s", "5", "", "100d", NO_TEXT))),
]


def array_of(values: list[Any], kind: pa.DataType) -> pa.Array:
    """An array; one of texts may have bytes in it that are none, as Spark's may."""
    if kind != pa.string():
        return pa.array(values, kind)
    return pa.array([one.encode() if isinstance(one, str) else one for one in values], pa.binary()).view(kind)


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    names = draw(st.sets(st.sampled_from([*COLUMNS][1:])))
    if "headers_json" in names:
        names.discard("headers")
    chosen = {name: COLUMNS[name] for name in ("value", *sorted(names))}
    if "headers" in chosen:
        chosen["headers"] = draw(st.sampled_from([COLUMNS["headers"], PAIRS, TIMES]))
    for name in draw(st.sets(st.sampled_from(["delay", "expiration"]))):
        chosen[name] = draw(st.sampled_from(DELAYS))
    size = draw(st.integers(0, 4))
    arrays = [array_of([draw(values) for _ in range(size)], kind) for kind, values in chosen.values()]
    return pa.RecordBatch.from_arrays(arrays, names=list(chosen))


@examples(6)
@given(batches(), st.sampled_from([{"to": "q"}, {"exchange": "x"}, {}]))
def test_rows_without_a_problem_are_accepted_by_the_publisher(batch: pa.RecordBatch, constants: dict[str, str]) -> None:
    """Every row that the quick look lets pass can be sent, as the publisher sees it; the others have a reason."""
    columns = tuple(name for name in batch.schema.names if not constants or name not in ("queue", "exchange"))
    if "to" in constants:
        columns = tuple(name for name in columns if name != "routing_key")
    if not constants and not {"queue", "exchange"} & set(columns):
        return
    rows = RowConverter(columns, constants, CLOCK)
    problems = rows.problems(batch, NOW)
    assert all(problems.values())
    good = batch.filter(pa.array([index not in problems for index in range(len(batch))], pa.bool_()))
    assert rows.problems(good, NOW) == {}
    for message in messages_of(rows, good, run="r"):
        _encode(message)
    for place in problems:
        with pytest.raises((InvalidInputError, TypeError, ValueError, OverflowError)):
            _send_one(rows, batch.slice(place, 1))


def _send_one(rows: RowConverter, batch: pa.RecordBatch) -> None:
    """Send a row whatever is wrong with it; a null, an empty id, or two due times, is wrong to the sink alone."""
    if batch.column("value")[0].as_py() is None:
        raise InvalidInputError("no value")
    if rows.is_keyed and rows.with_requests(batch, run="r", first=0).column(REQUEST_COLUMN)[0].as_py() is None:
        raise InvalidInputError("no key")
    if "message_id" in batch.schema.names and batch.column("message_id")[0].as_py() == "":
        raise InvalidInputError("an empty id")
    for message in messages_of(rows, batch, run="r"):
        for name in {one.name for one in fields(OutgoingMessage)} & {*dir(message)}:
            value = getattr(message, name)
            if isinstance(value, InvalidInputError):
                raise value
        _encode(message)


def messages_of(rows: RowConverter, batch: pa.RecordBatch, *, run: str) -> Iterator[OutgoingMessage | OutgoingSchedule]:
    if rows.is_keyed:
        batch = rows.with_requests(batch, run=run, first=0)
    return rows.messages(batch, list(range(len(batch))), run=run)


def _encode(outgoing: OutgoingMessage | OutgoingSchedule) -> None:
    if isinstance(outgoing, OutgoingSchedule):
        assert isinstance(outgoing, NumberedSchedule)
        encode(check_schedule(outgoing, NOW).record(outgoing.request, NOW))
        return
    message = MessageChecker().check(outgoing).starting(NOW)
    properties(message.wire_values(message.route(CLOCK, NOW), NOW))


def batch_of(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(values) for values in columns.values()], names=list(columns))


def ids(batch: pa.RecordBatch, *, run: str = "q-0-1", **constants: Any) -> list[str | None]:
    rows = RowConverter(tuple(batch.schema.names), {"to": "q", **constants}, CLOCK)
    return [one.message_id for one in rows.messages(batch, list(range(len(batch))), run=run)]


def test_a_generated_id_is_stable_and_names_the_row() -> None:
    batch = batch_of(value=["a", "b", "a"], delay=["1s", "1s", "2s"])
    first = ids(batch)
    assert first == ids(batch)
    assert [one.rpartition("-")[0] for one in first if one] == ["q-0-1-0", "q-0-1-1", "q-0-1-2"]
    assert len({one.rpartition("-")[2] for one in first if one}) == 3, "by contents too"


def test_reordered_rows_get_other_ids() -> None:
    """Else one of them would be taken for the other, and dropped as its duplicate."""
    assert not set(ids(batch_of(value=["a", "b"]))) & set(ids(batch_of(value=["b", "a"])))


def test_a_row_for_another_target_gets_another_id() -> None:
    batch = batch_of(value=["a"])
    assert ids(batch) != ids(batch, to="other")


def test_an_empty_message_id_is_a_problem() -> None:
    """Deduplication would treat all messages with this id as one."""
    batch = batch_of(value=["a", "b"], message_id=["mine", ""])
    found = RowConverter(tuple(batch.schema.names), {"to": "q"}, CLOCK).problems(batch, NOW)
    assert found == {1: "the column message_id is empty: give an id, or null to have one generated"}


def test_a_given_id_is_kept() -> None:
    found = ids(batch_of(value=["a", "b"], message_id=["mine", None]))
    assert found[0] == "mine"
    assert found[1] is not None
    assert found[1].startswith("q-0-1-1-")


def test_headers_can_be_structs_of_key_and_value() -> None:
    headers = pa.array(
        [[{"key": "a", "value": b"1"}], None], pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))
    )
    batch = pa.RecordBatch.from_arrays([pa.array(["x", "y"]), headers], names=["value", "headers"])
    rows = RowConverter(("value", "headers"), {"to": "q"}, CLOCK)
    assert rows.problems(batch, NOW) == {}
    assert [one.headers for one in rows.messages(batch, [0, 1], run="r")] == [{"a": b"1"}, None]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([None, ("a", b"1")], "the column headers holds a value that cannot be sent: an entry is null: leave it out"),
        (
            [("a", b"1"), ("a", b"2")],
            "the column headers holds a value that cannot be sent: the header 'a' occurs more than once",
        ),
        ([(None, b"1")], "the header name None is not text"),
    ],
)
def test_invalid_headers_are_a_problem(pairs: list[tuple[str | None, bytes] | None], expected: str) -> None:
    structs = [None if pair is None else dict(zip(("key", "value"), pair, strict=True)) for pair in pairs]
    headers = pa.array([structs, []], pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])))
    batch = pa.RecordBatch.from_arrays([pa.array(["x", "y"]), headers], names=["value", "headers"])
    rows = RowConverter(("value", "headers"), {"to": "q"}, CLOCK)
    found = rows.problems(batch, NOW)
    assert [*found] == [0]
    assert found[0].startswith(expected)


@pytest.mark.parametrize("name", ["message_id", "type", "queue", "delay", "headers"])
def test_text_that_is_not_utf_8_is_a_problem_of_its_column_and_row(name: str) -> None:
    column = array_of([b"5s", NO_TEXT, b"5s"], pa.string())
    if name == "headers":
        column = pa.MapArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), pa.array(["a", "b", "c"]), column)
    batch = pa.RecordBatch.from_arrays([pa.array(["x", "y", "z"]), column], names=["value", name])
    found = RowConverter(("value", name), {} if name == "queue" else {"to": "q"}, CLOCK).problems(batch, NOW)
    assert found == {
        1: f"the column {name} holds a value that cannot be sent: text that is not UTF-8: encode it as UTF-8"
    }


def test_a_body_can_be_any_bytes() -> None:
    batch = pa.RecordBatch.from_arrays([array_of([NO_TEXT], pa.string())], names=["value"])
    rows = RowConverter(("value",), {"to": "q"}, CLOCK)
    assert rows.problems(batch, NOW) == {}
    assert [one.body for one in rows.messages(batch, [0], run="r")] == [NO_TEXT]


@pytest.mark.parametrize("name", ["headers", "headers_json"])
def test_headers_that_bide_has_set_are_refused_dropped_or_kept(name: str) -> None:
    kind = pa.map_(pa.string(), pa.string()) if name == "headers" else pa.string()
    value: Any = [("bide-sent", "5"), ("a", "b")] if name == "headers" else '{"bide-sent":5,"a":"b"}'
    batch = pa.record_batch([pa.array(["x"]), pa.array([value], kind)], ["value", name])
    found: dict[str, Any] = {}
    for choice in BIDE_HEADERS:
        rows = RowConverter(("value", name), {"to": "q"}, CLOCK, bide_headers=choice)
        if problems := rows.problems(batch, NOW):
            found[choice] = problems[0]
            continue
        (message,) = rows.messages(batch, [0], run="r")
        assert isinstance(message, OutgoingMessage)
        prepared = MessageChecker().check(message)
        found[choice] = prepared.wire_values(None, NOW)["headers"]
    assert found["fail"].endswith("reserved for bide: rename it, or set the option bideHeaders to drop or keep")
    assert found["drop"] == {"a": "b", "bide-sent": NOW.timestamp() * 1000}
    assert found["keep"] == {"bide-sent": "5" if name == "headers" else 5, "a": "b"}


def test_times_in_headers_outside_the_amqp_range_are_a_problem() -> None:
    headers = pa.array([[("seen", micros)] for micros in (0, -1_000_000, 2**62)], TIMES[0])
    batch = pa.RecordBatch.from_arrays([pa.array(["x", "y", "z"]), headers], names=["value", "headers"])
    found = RowConverter(("value", "headers"), {"to": "q"}, CLOCK).problems(batch, NOW)
    assert [*found] == [1, 2]
    assert found[1].startswith("the header 'seen' is 1970-01-01T08:59:59+09:00, but AMQP timestamps begin in")
    assert found[2] == (
        "the column headers holds a value that cannot be sent: a time outside the years 1 to 9999: give a time in this "
        "range"
    )


def test_a_due_time_too_far_away_is_a_problem_of_its_column() -> None:
    batch = batch_of(value=["x"], deliver_at=[NOW + timedelta(days=100)])
    found = RowConverter(("value", "deliver_at"), {"to": "q"}, CLOCK).problems(batch, NOW)
    assert found[0].startswith("the column deliver_at: the delay 100 d is longer than")


def test_a_numeric_delay_is_milliseconds() -> None:
    (message,) = RowConverter(("value", "delay"), {"to": "q"}, CLOCK).messages(
        batch_of(value=["a"], delay=[1500]), [0], run="r"
    )
    assert message.delay == timedelta(seconds=1.5)


def keyed(**columns: Any) -> RowConverter:
    return RowConverter(("value", "key", *columns), {"to": "q"}, CLOCK)


def test_rows_with_keys_are_schedules_that_wait_as_long_as_they_like() -> None:
    far = datetime(2100, 1, 1, tzinfo=UTC)
    batch = batch_of(value=["a", "b"], key=["k1", "k2"], deliver_at=[far, far])
    rows = keyed(deliver_at=None)
    assert rows.is_valid(batch, NOW)
    first, second = messages_of(rows, batch, run="r")
    assert isinstance(first, NumberedSchedule)
    assert isinstance(second, NumberedSchedule)
    assert (first.key, first.deliver_at, first.to, first.body) == ("k1", far, "q", b"a")
    assert first.message_id is not None
    assert first.message_id.startswith("r-0-")
    assert first.request != second.request


@pytest.mark.parametrize(
    ("key", "delay", "expected"),
    [
        (None, "1s", "the column key is null: give each row a key"),
        ("", "1s", "the key name is empty: name the key"),
        ("é" * 128, "1s", "takes 256 bytes, the limit is 255"),
        ("a\nb", "1s", "holds control characters: remove them"),
        ("k", None, "the row has neither a delay nor a due time: a row with a key needs one of them"),
    ],
)
def test_a_key_that_cannot_be_one_and_a_missing_time_are_problems(
    key: str | None, delay: str | None, expected: str
) -> None:
    batch = pa.record_batch(
        [pa.array(["a", "b"]), pa.array(["good", key]), pa.array(["1s", delay])], ["value", "key", "delay"]
    )
    found = keyed(delay=None).problems(batch, NOW)
    assert list(found) == [1]
    assert expected in found[1]
