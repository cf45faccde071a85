"""The calls that Spark makes on a stream reader, in the orders of several releases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from bide.errors import InvalidOptionError, OffsetsLostError
from bide.spark.columns import STREAM_COLUMNS, table_schema
from bide.spark.offsets import document
from bide.spark.options import Options
from bide.spark.read_options import ReadOptions
from bide.spark.source import StreamsQueryReader
from tests.spark.streams import Streams
from tests.support import apply_retention

IN_2100 = "4102444800000"


@contextmanager
def reading(streams: Streams, **more: Any) -> Iterator[StreamsQueryReader]:
    given = Options(streams.options(**more))
    schema = table_schema(STREAM_COLUMNS, include_headers=False)
    reader = StreamsQueryReader(ReadOptions.read(given, {}, streaming=True), schema)
    try:
        yield reader
    finally:
        reader.stop()


def ranges(reader: StreamsQueryReader, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    found = [one.value for one in reader.partitions(start, end)]
    return [(one.stream, one.start, one.end) for one in found]


@pytest.mark.parametrize("more", [{}, {"startingTimestamp": IN_2100}, {"failOnDataLoss": False}])
def test_with_available_now_a_start_behind_the_end_gives_an_empty_batch(streams: Streams, more: dict[str, Any]) -> None:
    """Spark asks where to end before it asks where to begin, which is then behind that."""
    streams.declare("s")
    streams.fill("s", range(3))
    with reading(streams, stream="s", **more) as reader:
        reader.prepareForTriggerAvailableNow()
        streams.fill("s", ["between"])
        start = reader.initialOffset()
        assert start["streams"] == {"s": 4}
        assert reader.latestOffset(start) == start


def test_a_partition_added_while_available_now_starts_is_not_read_yet(streams: Streams) -> None:
    streams.declare_super("super", 0)
    streams.fill("super-0", range(2))
    with reading(streams, superStream="super", startingOffsets="earliest") as reader:
        reader.prepareForTriggerAvailableNow()
        streams.declare_super("super", 1)
        streams.fill("super-1", ["later"])
        start = reader.initialOffset()
        end = reader.latestOffset(start)
        assert ranges(reader, start, end) == [("super-0", 0, 2)]
        assert reader.latestOffset(end) == end


def test_a_recreated_empty_stream_is_a_loss(streams: Streams) -> None:
    """Its old position holds no more: what comes later has the same offsets."""
    streams.declare("s")
    start = document({"s": 5})
    with reading(streams, stream="s") as strict, pytest.raises(OffsetsLostError, match="5, and now it ends at 0"):
        strict.latestOffset(start)
    with reading(streams, stream="s", failOnDataLoss=False) as reader:
        end = reader.latestOffset(start)
        assert ranges(reader, start, end) == []
        streams.fill("s", range(7))
        assert ranges(reader, end, reader.latestOffset(end)) == [("s", 0, 7)]


def test_with_pyspark_before_4_2_the_end_knows_the_start_of_a_new_query(streams: Streams) -> None:
    """And without a position: the end is where a new query starts."""
    streams.declare("s")
    streams.fill("s", range(5))
    with reading(streams, stream="s", startingOffsets='{"s": 2}') as reader:
        end = reader.latestOffset()
        start = reader.initialOffset()
        assert ranges(reader, start, end) == [("s", 2, 5)]
        assert reader.latestOffset() == end
        assert ranges(reader, end, end) == []
        streams.fill("s", ["more"])
        assert ranges(reader, end, reader.latestOffset()) == [("s", 5, 6)]


def test_with_pyspark_before_4_2_a_recreated_stream_is_a_loss(streams: Streams) -> None:
    """It does not tell where the query is when it asks for the end: that is seen as the batch is planned."""
    streams.declare("s")
    streams.fill("s", range(2))
    read = document({"s": 5})
    with reading(streams, stream="s") as strict:
        end = strict.latestOffset()
        with pytest.raises(OffsetsLostError, match="was read up to offset 5, and now it ends at 2"):
            strict.partitions(read, end)
    with reading(streams, stream="s", failOnDataLoss=False) as reader:
        assert ranges(reader, read, reader.latestOffset()) == [("s", 0, 2)]


def test_with_pyspark_before_4_2_a_missing_stream_is_an_error(streams: Streams) -> None:
    streams.declare_super("super", 0)
    streams.fill("super-0", range(2))
    read = document({"super-0": 1, "super-1": 3})
    with reading(streams, superStream="super") as strict:
        end = strict.latestOffset()
        with pytest.raises(InvalidOptionError, match="has positions of super-1, which the batch that it has begun"):
            strict.partitions(read, end)
    with reading(streams, superStream="super", failOnDataLoss=False) as reader:
        assert ranges(reader, read, reader.latestOffset()) == [("super-0", 1, 2)]


def test_a_query_without_any_stream_left_is_an_error(streams: Streams) -> None:
    """The stream's existence is recorded nowhere else."""
    read = document({"s": 5})
    with reading(streams, stream="[]") as strict, pytest.raises(InvalidOptionError, match="has positions of s, which"):
        strict.latestOffset(read)
    with reading(streams, stream="[]", failOnDataLoss=False) as reader:
        forgotten = reader.latestOffset(read)
        assert ranges(reader, read, forgotten) == []
    with reading(streams, stream="[]") as strict:
        assert strict.latestOffset(forgotten) == forgotten, "it is allowed once"


@pytest.mark.parametrize(
    "more", [{}, {"startingTimestamp": IN_2100}, {"startingOffsets": "earliest"}, {"startingOffsets": '{"super-0": 2}'}]
)
def test_with_pyspark_before_4_2_a_new_partition_is_read_from_its_start(streams: Streams, more: dict[str, Any]) -> None:
    """Where a new query begins is of no matter to one that goes on."""
    streams.declare_super("super", 0, 1)
    for number in range(2):
        streams.fill(f"super-{number}", range(3))
    with reading(streams, superStream="super", **more) as reader:
        assert ranges(reader, document({"super-0": 2}), reader.latestOffset()) == [("super-0", 2, 3), ("super-1", 0, 3)]


def test_messages_dropped_before_the_first_read_are_not_a_loss(streams: Streams) -> None:
    """With and without the query's position from Spark."""
    streams.declare("old")
    streams.declare("new", **{"x-max-length-bytes": 100_000, "x-stream-max-segment-size-bytes": 50_000})
    streams.fill("new", ["x" * 5_000] * 100)
    apply_retention(streams.vhost.broker)
    start = document({"old": 0})
    with reading(streams, stream="old,new") as reader:
        for end in (reader.latestOffset(start), reader.latestOffset()):
            ((name, first, last),) = ranges(reader, start, end)
            assert name == "new"
            assert 0 < first < last


def test_with_pyspark_before_4_2_a_new_query_has_to_name_all_streams(streams: Streams) -> None:
    """It may be an old one when it asks for the end."""
    streams.declare_super("super", 0, 1)
    with reading(streams, superStream="super", startingOffsets='{"super-0": 2}') as reader:
        reader.latestOffset()
        with pytest.raises(InvalidOptionError, match="gives positions of super-0, but the super stream consists of"):
            reader.initialOffset()


def test_an_error_names_the_option_that_gave_the_positions(streams: Streams) -> None:
    streams.declare_super("super", 0, 1)
    for given, option, of in (
        ({"startingOffsetsByTimestamp": '{"super-0": 0}'}, "startingOffsetsByTimestamp", "super-0"),
        ({"startingOffsets": "{}"}, "startingOffsets", "no stream"),
    ):
        with (
            reading(streams, superStream="super", **given) as reader,
            pytest.raises(
                InvalidOptionError, match=f"the option {option} gives positions of {of}, but the super stream"
            ),
        ):
            reader.initialOffset()
