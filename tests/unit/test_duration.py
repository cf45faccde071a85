"""Delays and due times as users write them."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from fractions import Fraction
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.delay.clock import Clock
from bide.delay.clock_digits import MAX_DELAY
from bide.delay.protocol import QueueTarget
from bide.durations import (
    LONGEST,
    format_delay,
    from_milliseconds,
    parse_delay,
    parse_due_time,
    sending_time,
    to_milliseconds,
)
from bide.errors import InvalidDelayError, InvalidDueTimeError

# -- delays


@pytest.mark.parametrize(
    ("text", "delay"),
    [
        ("90s", timedelta(seconds=90)),
        ("1h30m", timedelta(minutes=90)),
        ("1h 30min", timedelta(minutes=90)),
        ("1 h 30 m", timedelta(minutes=90)),
        (" 250ms ", timedelta(milliseconds=250)),
        ("2m30s\n", timedelta(seconds=150)),
        ("1.5h", timedelta(minutes=90)),
        ("1d1d", timedelta(days=2)),
        ("0s", timedelta(0)),
        ("2w", timedelta(days=14)),
        ("1.5w", timedelta(days=10, hours=12)),
        ("3d", timedelta(days=3)),
        ("3 days", timedelta(days=3)),
        ("3days", timedelta(days=3)),
        ("1 week 1 day 1 hour 1 minute 1 second", timedelta(days=8, hours=1, minutes=1, seconds=1)),
        ("2 weeks 2 hours 2 minutes 2 seconds", timedelta(days=14, hours=2, minutes=2, seconds=2)),
        ("5sec 10 milliseconds 1 millisecond", timedelta(seconds=5, milliseconds=11)),
        ("0.1s", timedelta(milliseconds=100)),
        ("1.001s", timedelta(milliseconds=1001)),
        ("0.29s", timedelta(milliseconds=290)),
        ("0.0000001s", timedelta(microseconds=1)),
        ("0.0001ms", timedelta(microseconds=1)),
        ("3199.1d", timedelta(days=3199, hours=2, minutes=24)),
        ("999999999d", timedelta(days=999_999_999)),
        ("PT1H30M", timedelta(minutes=90)),
        ("pt5s", timedelta(seconds=5)),
        ("P1DT12H", timedelta(hours=36)),
        ("P1.5D", timedelta(hours=36)),
        ("P2W", timedelta(days=14)),
        ("PT0.5S", timedelta(milliseconds=500)),
        ("P0D", timedelta(0)),
        ("P1W2DT3H4M5.006S", timedelta(weeks=1, days=2, hours=3, minutes=4, seconds=5, milliseconds=6)),
        (timedelta(seconds=1), timedelta(seconds=1)),
        (timedelta(0), timedelta(0)),
        (LONGEST, LONGEST),
    ],
)
def test_delays_are_parsed(text: Any, delay: timedelta) -> None:
    assert parse_delay(text) == delay


@pytest.mark.parametrize(
    "value",
    [
        *[
            "",
            " ",
            "5",
            "s",
            "days",
            "3 dayss",
            "3 months",
            "3 Days",
            "nan",
            "inf",
            "NaNs",
            "5 parsecs",
            "٣s",
            "1..5s",
            "s5",
            "5S",
            "1h30",
            "1 0s",
            "5s5",
        ],
        *["days", "3 dayss", "3 months", "3 Days"],
        *["-5s", "+5s", "−5s", "1h-30m", ".5s", "5.s", "5e3s", "1,5s", "1_000s", "\ud800s"],
        *["P", "PT", "PT5", "P1DT", "P-1D", "P1M", "P1Y", "P1Y2D", "1h PT1H"],
        *["99999999999999d", "P99999999999D", "1000000000d", "999999999d24h"],
        *["9" * 400 + "s", "9" * 5000 + "s", "0." + "0" * 5000 + "1s", "1s" * 101],
        *[5, 5.0, float("nan"), float("inf"), None, True, b"5s"],
        *[timedelta(seconds=-1), timedelta(microseconds=-1), timedelta.min],
    ],
)
def test_invalid_delays_are_refused(value: Any) -> None:
    with pytest.raises(InvalidDelayError) as caught:
        parse_delay(value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "the delay 5 has no unit: give '5s' if it is in seconds, or '5ms' in milliseconds; give a timedelta, text"),
        (0.5, "the delay 0.5 has no unit: give '0.5s' if it is in seconds, or '0.5ms' in milliseconds"),
        ("300", "the delay '300' has no unit: give '300s' if it is in seconds, or '300ms' in milliseconds"),
        (1e-9, "the delay 1e-09 has no unit: give a timedelta, text such as '1h30m', '90s' or '250ms', or ISO 8601"),
        (True, "the delay True has no unit: give a timedelta, text such as '1h30m', '90s' or '250ms', or ISO 8601"),
        ("soon", "the delay 'soon' cannot be read: give a timedelta, text such as '1h30m', "),
        ("-5s", "the delay '-5s' is negative: give zero or more"),
        (timedelta(seconds=-5), "the delay -0:00:05 is negative: give zero or more"),
        ("99999999999999d", "the delay '99999999999999d' is longer than 999999999 d: give a shorter one"),
        (timedelta.max, "the delay 999999999 d 23:59:59.999999 is longer than 999999999 d: give a shorter one"),
        ("9" * 5000 + "s", "... of 5001 characters cannot be read: "),
    ],
)
def test_the_error_names_the_delay_and_the_way_out(value: Any, message: str) -> None:
    with pytest.raises(InvalidDelayError) as caught:
        parse_delay(value)
    assert message in str(caught.value)


@given(st.integers(0, 10**12))
def test_milliseconds_are_exact(number: int) -> None:
    assert parse_delay(f"{number}ms") == timedelta(milliseconds=number)
    assert parse_delay(f"{number // 1000}.{number % 1000:03}s") == timedelta(milliseconds=number)


UNITS = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86_400),
    "w": Fraction(604_800),
}
units = st.sampled_from(sorted(UNITS))
numbers = st.from_regex(r"[0-9]{1,6}(\.[0-9]{1,12})?", fullmatch=True)


@given(number=numbers, unit=units)
def test_a_number_is_exact_to_the_microsecond_and_never_too_short(number: str, unit: str) -> None:
    seconds = Fraction(number) * UNITS[unit]
    assert parse_delay(f"{number}{unit}") == timedelta(microseconds=ceil(seconds * 1_000_000))


@given(parts=st.lists(st.tuples(st.integers(0, 9999), units), min_size=1, max_size=6))
def test_parts_of_a_delay_are_added_up(parts: list[tuple[int, str]]) -> None:
    total = sum((parse_delay(f"{number}{unit}") for number, unit in parts), timedelta(0))
    for space in ("", " ", "  \t"):
        assert parse_delay(space.join(f"{number}{unit}" for number, unit in parts)) == total


@given(hours=st.integers(0, 99), minutes=st.integers(0, 99), seconds=numbers)
def test_iso_8601_gives_the_same_delay(hours: int, minutes: int, seconds: str) -> None:
    assert parse_delay(f"PT{hours}H{minutes}M{seconds}S") == parse_delay(f"{hours}h{minutes}m{seconds}s")


@given(hundredths=st.integers(0, 10**9))
def test_hundredths_of_a_second_are_not_rounded_up(hundredths: int) -> None:
    """0.57 as a float is a little too much: rounded up to the resolution, that would be a step of 10 ms."""
    text = f"{hundredths // 100}.{hundredths % 100:02}s"
    wait = hundredths * timedelta(milliseconds=10)
    assert parse_delay(text) == wait
    if wait <= MAX_DELAY:
        assert Clock().route(parse_delay(text), QueueTarget("q")).delay == wait


@given(st.one_of(st.text(max_size=20), st.text(alphabet="PT0123456789WDHMS.smhdwin -", max_size=20)))
def test_any_text_is_parsed_or_refused_as_an_invalid_delay(text: str) -> None:
    with suppress(InvalidDelayError):
        assert parse_delay(text) >= timedelta(0)


@pytest.mark.parametrize(
    ("delay", "text"),
    [
        (timedelta(0), "0:00:00"),
        (timedelta(seconds=10), "0:00:10"),
        (timedelta(seconds=-1), "-0:00:01"),
        (timedelta(milliseconds=10), "0:00:00.01"),
        (timedelta(microseconds=1), "0:00:00.000001"),
        (timedelta(hours=23, minutes=59, seconds=59), "23:59:59"),
        (timedelta(days=1), "1 d"),
        (timedelta(days=1, microseconds=1), "1 d 0:00:00.000001"),
        (timedelta(days=-1, seconds=-1), "-1 d 0:00:01"),
        (MAX_DELAY, "3199 d 23:59:59.99"),
    ],
)
def test_delays_are_formatted_as_days_and_hours_minutes_seconds(delay: timedelta, text: str) -> None:
    assert format_delay(delay) == text


# -- due times


@pytest.mark.parametrize(
    "value",
    [
        "2026-12-24T18:00:00+01:00",
        " 2026-12-24T17:00:00Z\n",
        "2026-12-24 17:00Z",
        "20261224T170000Z",
        "2026-W52-4T17:00:00+00:00",
        datetime(2026, 12, 24, 17, tzinfo=UTC),
        datetime(2026, 12, 24, 18, tzinfo=timezone(timedelta(hours=1))),
        datetime(2026, 12, 24, 2, tzinfo=timezone(timedelta(hours=-15))),
    ],
)
def test_due_times_are_parsed_as_utc(value: Any) -> None:
    due = parse_due_time(value)
    assert (due, due.tzinfo) == (datetime(2026, 12, 24, 17, tzinfo=UTC), UTC)


class Nowhere(tzinfo):
    """A time zone that does not know its offset: a datetime in it is naive all the same."""

    def utcoffset(self, moment: datetime | None) -> None:
        return None

    def dst(self, moment: datetime | None) -> None:
        return None

    def tzname(self, moment: datetime | None) -> str:
        return "nowhere"


@pytest.mark.parametrize(
    "value",
    [
        datetime(2026, 12, 24, 18),  # noqa: DTZ001 (the very fault)
        datetime(2026, 12, 24, 18, tzinfo=Nowhere()),
        *["2026-12-24T18:00:00", "2026-12-24", "18:00+01:00", "2026-13-24T18:00:00Z", "1795225654"],
        *["tomorrow", "", "9" * 5000],
        *[5, None, date(2026, 12, 24)],
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=1))),
    ],
)
def test_invalid_due_times_are_refused(value: Any) -> None:
    with pytest.raises(InvalidDueTimeError):
        parse_due_time(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            datetime(2026, 12, 24, 18),  # noqa: DTZ001 (the very fault)
            "the due time 2026-12-24T18:00:00 has no time zone: give an aware datetime, such as 2026-12-24T18:00:00+00",
        ),
        ("soon", "the due time 'soon' cannot be read: give ISO 8601 with an offset, as 2026-12-24T18:00:00+01:00"),
        (5, "the due time 5 is not a datetime: give one with a time zone"),
        (
            datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))),
            "the due time 9999-12-31T23:59:59.999999-01:00 lies outside the years 1 to 9999",
        ),
    ],
)
def test_the_error_names_the_due_time_and_the_way_out(value: Any, message: str) -> None:
    with pytest.raises(InvalidDueTimeError) as caught:
        parse_due_time(value)
    assert message in str(caught.value)


@given(
    st.datetimes(
        timezones=st.timezones() | st.just(UTC),
        min_value=datetime(2, 1, 1),  # noqa: DTZ001 (the strategy adds the time zone)
        max_value=datetime(9998, 12, 31),  # noqa: DTZ001 (the zone is added)
        allow_imaginary=False,
    )
)
def test_a_due_time_is_the_same_moment_in_utc_and_as_text(moment: datetime) -> None:
    offset = moment.utcoffset()
    assert offset is not None
    for given_as in (moment, moment.isoformat()):
        due = parse_due_time(given_as)
        assert due.tzinfo is UTC
        assert due.replace(tzinfo=None) == moment.replace(tzinfo=None, fold=0) - offset


# -- stamps


@given(st.datetimes(timezones=st.just(UTC), min_value=datetime(1, 1, 1), max_value=datetime(9999, 12, 31)))  # noqa: DTZ001 (the zone is added)
def test_a_due_time_is_never_stamped_early(moment: datetime) -> None:
    stamped = from_milliseconds(to_milliseconds(moment))
    assert stamped is not None
    assert timedelta(0) <= stamped - moment < timedelta(milliseconds=1)


@pytest.mark.parametrize(
    ("moment", "stamp"),
    [
        (datetime(1970, 1, 1, tzinfo=UTC), 0),
        (datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=UTC), 1),
        (datetime(1970, 1, 1, 0, 0, 0, 1000, tzinfo=UTC), 1),
        (datetime(1970, 1, 1, 0, 0, 0, 1001, tzinfo=UTC), 2),
        (datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), 0),
        (datetime(2026, 11, 21, 1, 47, 34, 756_000, tzinfo=UTC), 1_795_225_654_756),
        (datetime(2026, 11, 21, 2, 47, 34, 756_000, tzinfo=timezone(timedelta(hours=1))), 1_795_225_654_756),
    ],
)
def test_stamps_are_milliseconds_rounded_up(moment: datetime, stamp: int) -> None:
    assert to_milliseconds(moment) == stamp


def test_a_sending_time_is_rounded_down_to_a_millisecond() -> None:
    for _ in range(100):
        before, sent, after = datetime.now(UTC), sending_time(), datetime.now(UTC)
        assert before - timedelta(milliseconds=1) < sent <= after
        assert from_milliseconds(to_milliseconds(sent)) == sent


@pytest.mark.parametrize("stamp", [3 * 10**14, -(10**14), 10**18, -(10**18), 10**40])
def test_a_stamp_beyond_the_calendar_is_none(stamp: int) -> None:
    assert from_milliseconds(stamp) is None
