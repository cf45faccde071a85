"""Options of the Spark data source."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bide.errors import InvalidOptionError
from bide.spark.options import Options, parse_time


def test_option_names_are_case_insensitive() -> None:
    options = Options({"maxoffsetspertrigger": "5", "FAILONDATALOSS": "False"})
    assert options.count("maxOffsetsPerTrigger") == 5
    assert options.flag("failOnDataLoss", default=True) is False
    assert "maxOffsetsPerTrigger" in options


def test_missing_options_have_their_defaults() -> None:
    options = Options({})
    assert options.text("stream") is None
    assert options.count("minPartitions") is None
    assert options.time("startingTimestamp") is None
    assert options.flag("failOnDataLoss", default=True) is True
    assert options.choice("mode", "peek", "drain") == "peek"
    assert "stream" not in options


def test_an_unknown_option_is_named_with_the_known_ones() -> None:
    options = Options(
        {"maxOfsetsPerTrigger": "5", "stream": "a", "checkpointLocation": "/tmp/x", "url": "amqp://u:secret@h"}
    )
    with pytest.raises(InvalidOptionError, match=r"for reading: maxofsetspertrigger: choose from .*stream") as caught:
        options.refuse_unknown(frozenset({"stream", "url"}), purpose="reading")
    assert "secret" not in str(caught.value)
    options.refuse_unknown(frozenset({"stream", "url", "maxOfsetsPerTrigger"}), purpose="reading")


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_option_is_refused(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="stream is empty"):
        Options({"stream": text}).text("stream")


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "1e3", "ten", "9223372036854775808", "99999999999999999999"])
def test_counts_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(InvalidOptionError, match=r"minPartitions is .* from 1 to"):
        Options({"minPartitions": text}).count("minPartitions")


def test_unknown_flags_and_choices_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="'yes': give true or false"):
        Options({"failOnDataLoss": "yes"}).flag("failOnDataLoss", default=True)
    with pytest.raises(InvalidOptionError, match="'eat': give one of peek, drain"):
        Options({"mode": "eat"}).choice("mode", "peek", "drain")
    assert Options({"mode": " DRAIN "}).choice("mode", "peek", "drain") == "drain"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", datetime(1970, 1, 1, tzinfo=UTC)),
        ("1700000000123", datetime(2023, 11, 14, 22, 13, 20, 123000, tzinfo=UTC)),
        ("2026-11-21T06:00:00Z", datetime(2026, 11, 21, 6, tzinfo=UTC)),
        ("2026-11-21T06:00:00+02:00", datetime(2026, 11, 21, 4, tzinfo=UTC)),
    ],
)
def test_times_are_milliseconds_or_iso_8601(text: str, expected: datetime) -> None:
    assert parse_time(text, "startingTimestamp") == expected


@pytest.mark.parametrize(
    "text",
    [
        *("2026-11-21T06:00:00", "2026-11-21", "now", "-5", "999999999999999", "1.5"),
        *("0001-01-01T00:00:00+05:00", "9999-12-31T23:00:00-05:00"),
    ],
)
def test_times_without_a_zone_or_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="startingTimestamp"):
        Options({"startingTimestamp": text}).time("startingTimestamp")


@given(st.text(max_size=30))
@example("0\x1f")
def test_any_text_is_parsed_or_refused_with_the_option_name(text: str) -> None:
    options = Options({"x": text})
    for read in (options.count, options.time, options.text):
        refused = ""
        try:
            assert read("x") is not None
        except InvalidOptionError as error:
            refused = str(error)
        assert not refused or "option x is" in refused
    with suppress(InvalidOptionError):
        assert options.duration("x") is not None


def test_the_url_comes_from_the_option_then_the_environment() -> None:
    assert Options({"URL": "amqp://a"}).url({"BIDE_URL": "amqp://b"}) == "amqp://a"
    assert Options({}).url({"BIDE_URL": "amqp://b"}) == "amqp://b"
    assert Options({}).url({}) == "amqp://guest:guest@localhost:5672/"
