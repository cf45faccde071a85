"""Options of a read: streams, queues and offsets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bide.durations import to_milliseconds
from bide.errors import InvalidOptionError, InvalidUrlError
from bide.spark.admission import TriggerLimits
from bide.spark.options import Options
from bide.spark.read_options import QueueOptions, ReadOptions


def read(*, streaming: bool = False, **given: Any) -> ReadOptions:
    return ReadOptions.read(Options(given), {}, streaming=streaming)


def test_a_batch_reads_everything_and_a_query_starts_at_the_end() -> None:
    batch, query = read(stream="s"), read(stream="s", streaming=True)
    assert (batch.start, batch.end, query.start) == ("earliest", "latest", "latest")
    assert batch.streams == ("s",)
    assert (batch.super_stream, batch.port, batch.min_partitions) == (None, None, None)
    assert not batch.limits.is_set
    assert batch.fail_on_data_loss
    assert not batch.raw


def test_stream_names_are_a_list_or_json() -> None:
    assert read(stream="a, b,c").streams == ("a", "b", "c")
    assert read(stream='["a,b", "c"]').streams == ("a,b", "c")
    assert read(stream="[]", streaming=True).streams == ()
    assert read(superStream="s").super_stream == "s"


@pytest.mark.parametrize("text", ["a,,b", ",", "[1]", "[", '[""]', "a,a"])
def test_invalid_stream_names_are_refused(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="the option stream"):
        read(stream=text)


def test_exactly_one_source_is_required() -> None:
    with pytest.raises(InvalidOptionError, match=r"no options: give stream, superStream or queue"):
        read()
    with pytest.raises(InvalidOptionError, match=r"one of the options stream .*, superStream and queue"):
        read(stream="a", superStream="b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Earliest", "earliest"),
        ("2026-11-21T06:00:00Z", datetime(2026, 11, 21, 6, tzinfo=UTC)),
        ('{"s": 23}', {"s": 23}),
        ('{"s": -2}', {"s": "earliest"}),
        ('{"s": "earliest"}', {"s": "earliest"}),
        ('{"s": "2026-11-21T06:00:00Z"}', {"s": datetime(2026, 11, 21, 6, tzinfo=UTC)}),
    ],
)
def test_starting_offsets_are_parsed(text: str, expected: object) -> None:
    assert read(stream="s", startingOffsets=text).start == expected


def test_times_of_single_streams_are_parsed() -> None:
    six = datetime(2026, 11, 21, 6, tzinfo=UTC)
    text = f'{{"a": "2026-11-21T06:00:00Z", "b": {to_milliseconds(six)}}}'
    assert read(stream="a,b", startingOffsetsByTimestamp=text).start == {"a": six, "b": six}
    assert read(stream="a,b", endingOffsetsByTimestamp=text).end == {"a": six, "b": six}


@pytest.mark.parametrize("text", ["5", "[]", "noon", '{"a": "noon", "b": 1}', '{"a": 1, "a": 2}', '{"a": 1}'])
def test_invalid_times_of_single_streams_are_refused(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="the option startingOffsetsByTimestamp"):
        read(stream="a,b", startingOffsetsByTimestamp=text)


def test_limits_of_micro_batches_are_parsed() -> None:
    found = read(
        stream="s",
        streaming=True,
        maxOffsetsPerTrigger="100",
        minOffsetsPerTrigger="10",
        maxBytesPerTrigger="1000",
        maxTriggerDelay="5m",
    ).limits
    assert found == TriggerLimits(max_offsets=100, min_offsets=10, max_bytes=1000, max_delay=timedelta(minutes=5))
    assert read(stream="s", streaming=True, minOffsetsPerTrigger=1).limits.max_delay == timedelta(minutes=15)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"minOffsetsPerTrigger": 10, "maxOffsetsPerTrigger": 9}, "10, more than maxOffsetsPerTrigger, 9"),
        ({"maxTriggerDelay": "5m"}, "maxTriggerDelay needs minOffsetsPerTrigger"),
        ({"minOffsetsPerTrigger": 1, "maxTriggerDelay": "soon"}, "the option maxTriggerDelay"),
        ({"maxBytesPerTrigger": "1m"}, "the option maxBytesPerTrigger is '1m'"),
    ],
)
def test_invalid_limits_of_micro_batches_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidOptionError, match=reason):
        read(stream="s", streaming=True, **given)


def test_ending_offsets_and_timestamps_are_parsed() -> None:
    assert read(stream="s", endingOffsets='{"s": -1}').end == {"s": "latest"}
    assert read(stream="s", endingTimestamp="1000").end == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert read(stream="s", streaming=True, startingOffsets='{"s": "latest"}').start == {"s": "latest"}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"startingOffsets": "23"}, "startingOffsets is '23'"),
        ({"startingOffsets": "yesterday"}, "startingOffsets is 'yesterday'"),
        ({"startingOffsets": '{"s": true}'}, "startingOffsets of s is True"),
        ({"startingOffsets": '{"s": -3}'}, "startingOffsets of s is -3"),
        ({"startingOffsets": '{"s": 1.5}'}, "startingOffsets of s is 1.5"),
        ({"startingOffsets": '{"s": {"0": 1}}'}, "startingOffsets of s is"),
        ({"startingOffsets": '{"s": 1, "s": 2}'}, "gives a stream twice: give each one once"),
        ({"startingOffsets": '{"s": 1'}, "is not JSON"),
        ({"startingOffsets": '{"t": 1}'}, "positions of t, but the option stream names s"),
        ({"startingOffsets": "{}"}, "positions of no stream"),
        ({"startingOffsets": "latest"}, "the batch would be empty"),
        ({"startingOffsets": '{"s": -1}'}, "startingOffsets is latest for 's', so nothing would be read from it"),
        ({"endingOffsets": '{"s": "earliest"}'}, "endingOffsets is earliest for 's', so nothing would be read from it"),
        ({"endingOffsets": "earliest"}, "the batch would be empty"),
        ({"startingOffsets": "earliest", "startingTimestamp": "1"}, "startingOffsets and startingTimestamp were given"),
        ({"maxOffsetsPerTrigger": "5"}, "for streaming queries only"),
        ({"endingOffsets": "latest", "streaming": True}, "for batches only"),
        ({"endingTimestamp": "1", "streaming": True}, "for batches only"),
        ({"mode": "peek"}, "unknown option for reading streams: mode"),
        ({"streamPort": "70000"}, "from 1 to 65,535"),
        ({"undecodable": "drop"}, "give one of fail, raw"),
        ({"kafka.bootstrap.servers": "x"}, "unknown option"),
    ],
)
def test_invalid_read_options_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidOptionError, match=reason):
        read(stream="s", **given)


def test_an_invalid_url_is_refused_on_the_driver() -> None:
    with pytest.raises(InvalidUrlError):
        read(stream="s", url="http://somewhere")
    with pytest.raises(InvalidUrlError):
        QueueOptions.read(Options({"queue": "q", "url": "http://somewhere"}), {}, streaming=False)


def test_printing_options_never_shows_the_password() -> None:
    url = "amqp://ana:secret@shop.example"
    queue = QueueOptions.read(Options({"queue": "q", "url": url}), {}, streaming=False)
    for options in (read(stream="s", url=url), queue):
        assert options.url == url
        assert "secret" not in repr(options)


def test_times_are_rounded_up() -> None:
    time = datetime(2026, 11, 21, 6, 0, 0, 1500, tzinfo=UTC)
    assert to_milliseconds(time) == int(datetime(2026, 11, 21, 6, tzinfo=UTC).timestamp()) * 1000 + 2
    assert to_milliseconds(datetime(1970, 1, 1, tzinfo=UTC)) == 0
