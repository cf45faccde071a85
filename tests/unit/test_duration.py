"""Delays and due times as people give them."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.duration import from_milliseconds, parse_delay, parse_due_time, to_milliseconds
from bide.errors import InvalidDelayError, InvalidDueTimeError


@pytest.mark.parametrize(
    ("text", "delay"),
    [
        ("90s", timedelta(seconds=90)),
        ("1h30m", timedelta(minutes=90)),
        ("1h 30min", timedelta(minutes=90)),
        (" 250ms ", timedelta(milliseconds=250)),
        ("1.5h", timedelta(minutes=90)),
        ("0s", timedelta(0)),
        ("2w", timedelta(days=14)),
        ("3d", timedelta(days=3)),
        ("PT1H30M", timedelta(minutes=90)),
        ("P1DT12H", timedelta(hours=36)),
        ("P2W", timedelta(days=14)),
        ("PT0.5S", timedelta(milliseconds=500)),
        ("0.1s", timedelta(milliseconds=100)),
        ("1.001s", timedelta(milliseconds=1001)),
        ("0.29s", timedelta(milliseconds=290)),
        ("0.0000001s", timedelta(microseconds=1)),
        (timedelta(seconds=1), timedelta(seconds=1)),
    ],
)
def test_delays(text: Any, delay: timedelta) -> None:
    assert parse_delay(text) == delay


@pytest.mark.parametrize(
    "value",
    [
        *["", "5", "s", "nan", "inf", "NaNs", "5 parsecs", "-5s", "P", "PT", "P1M", "P1Y", "1h-30m", "٣s", "1..5s"],
        *["s5", "99999999999999d", "P99999999999D", "9" * 400 + "s"],
        *[5, 5.0, None, True, timedelta(seconds=-1)],
    ],
)
def test_what_is_no_delay(value: Any) -> None:
    with pytest.raises(InvalidDelayError):
        parse_delay(value)


@given(st.integers(0, 10**12))
def test_milliseconds_are_exact(number: int) -> None:
    assert parse_delay(f"{number}ms") == timedelta(milliseconds=number)
    assert parse_delay(f"{number // 1000}.{number % 1000:03}s") == timedelta(milliseconds=number)


@given(st.text(max_size=20))
def test_any_text_is_a_delay_or_a_clear_error(text: str) -> None:
    with suppress(InvalidDelayError):
        assert parse_delay(text) >= timedelta(0)


def test_due_times() -> None:
    expected = datetime(2026, 12, 24, 17, tzinfo=UTC)
    assert parse_due_time("2026-12-24T18:00:00+01:00") == expected
    assert parse_due_time("2026-12-24T17:00:00Z") == expected
    assert parse_due_time(datetime(2026, 12, 24, 18, tzinfo=timezone(timedelta(hours=1)))) == expected


@pytest.mark.parametrize(
    "value",
    [
        datetime(2026, 12, 24, 18),  # noqa: DTZ001 (the very fault)
        "2026-12-24T18:00:00",
        "tomorrow",
        "",
        5,
        None,
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))),
    ],
)
def test_what_is_no_due_time(value: Any) -> None:
    with pytest.raises(InvalidDueTimeError):
        parse_due_time(value)


@given(st.datetimes(timezones=st.just(UTC), min_value=datetime(1, 1, 1), max_value=datetime(9999, 12, 31)))  # noqa: DTZ001
def test_a_due_time_is_never_stamped_early(moment: datetime) -> None:
    stamped = from_milliseconds(to_milliseconds(moment))
    assert stamped is not None
    assert timedelta(0) <= stamped - moment < timedelta(milliseconds=1)


def test_a_stamp_beyond_the_calendar_is_none() -> None:
    assert from_milliseconds(10**18) is None
