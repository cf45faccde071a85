"""Cron expressions in all time zones, compared with a second implementation."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.errors import InvalidRecurrenceError
from bide.schedules.cron import CronExpression
from bide.schedules.local_time import zone_of
from tests.examples import examples
from tests.time_zones import Zone, read, zones

NEW_YORK = zone_of("America/New_York")

FIXED = ("30 2 * * *", "0 0 * * *", "0,30 1-3 * * *", "15 1 * * SUN", "5 3 1,15 * MON")
ELAPSED = ("*/15 * * * *", "0 * * * *", "30 */2 * * *", "* 2 * * *", "*/20 0-3 * * SUN")


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def runs(expression: str, zone: str, start: str, count: int) -> list[str]:
    cron, here, found = CronExpression.parse(expression, zone_of(zone)), moment(start), []
    for _ in range(count):
        following = cron.after(here)
        assert following is not None
        here = following
        found.append(here.astimezone(zone_of(zone)).isoformat())
    return found


class TestASkippedHour:
    def test_fixed_times_run_once_when_the_clocks_go_on(self) -> None:
        assert runs("0,30 2 * * *", "Europe/Berlin", "2026-03-28T12:00Z", 3) == [
            "2026-03-29T03:00:00+02:00",
            "2026-03-30T02:00:00+02:00",
            "2026-03-30T02:30:00+02:00",
        ]

    def test_repeated_runs_leave_it_out(self) -> None:
        assert runs("*/30 2 * * *", "Europe/Berlin", "2026-03-28T12:00Z", 2) == [
            "2026-03-30T02:00:00+02:00",
            "2026-03-30T02:30:00+02:00",
        ]

    def test_midnight_itself_may_be_skipped(self) -> None:
        assert runs("0 0 * * *", "America/Havana", "2026-03-07T12:00Z", 2) == [
            "2026-03-08T01:00:00-04:00",
            "2026-03-09T00:00:00-04:00",
        ]

    def test_a_whole_day_may_be_skipped(self) -> None:
        """Samoa went over the date line and had no 30 December 2011."""
        assert runs("0 12 * * *", "Pacific/Apia", "2011-12-29T20:00:00-10:00", 2) == [
            "2011-12-31T00:00:00+14:00",
            "2011-12-31T12:00:00+14:00",
        ]


class TestARepeatedHour:
    def test_fixed_times_run_the_first_time_only(self) -> None:
        assert runs("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00Z", 2) == [
            "2026-10-25T02:30:00+02:00",
            "2026-10-26T02:30:00+01:00",
        ]

    def test_it_is_not_run_again_by_a_gate_that_starts_in_between(self) -> None:
        assert runs("30 2 * * *", "Europe/Berlin", "2026-10-25T01:10Z", 1) == ["2026-10-26T02:30:00+01:00"]

    def test_repeated_runs_go_on_in_both(self) -> None:
        assert runs("*/30 2 * * *", "Europe/Berlin", "2026-10-24T12:00Z", 4) == [
            "2026-10-25T02:00:00+02:00",
            "2026-10-25T02:30:00+02:00",
            "2026-10-25T02:00:00+01:00",
            "2026-10-25T02:30:00+01:00",
        ]

    def test_it_may_be_half_an_hour(self) -> None:
        assert runs("*/15 1 * * *", "Australia/Lord_Howe", "2026-04-04T14:29Z", 5) == [
            "2026-04-05T01:30:00+11:00",
            "2026-04-05T01:45:00+11:00",
            "2026-04-05T01:30:00+10:30",
            "2026-04-05T01:45:00+10:30",
            "2026-04-06T01:00:00+10:30",
        ]


@pytest.mark.parametrize(
    ("expression", "first"),
    [
        ("0 8 * * MON-FRI", "2026-11-23T08:00:00-05:00"),
        ("@daily", "2026-11-23T00:00:00-05:00"),
        ("0 0 L * *", "2026-11-30T00:00:00-05:00"),
        ("0 9 * * MON#1", "2026-12-07T09:00:00-05:00"),
        ("0 0 29 2 *", "2028-02-29T00:00:00-05:00"),
        ("*/10 * * * * *", "2026-11-22T10:00:10-05:00"),
    ],
)
def test_the_first_run_follows_the_expression(expression: str, first: str) -> None:
    assert runs(expression, "America/New_York", "2026-11-22T10:00:00-05:00", 1) == [first]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "* * * *",
        "61 * * * *",
        "0 0 30 2 *",
        "a b c d e",
        "0 0 * * MON#6",
        "@reboot",
        "* * * * ²",
        "0 0 31 4 *",
        "*" * 300,
    ],
)
def test_an_expression_that_cannot_be_used_is_refused(text: str) -> None:
    with pytest.raises(InvalidRecurrenceError):
        CronExpression.parse(text, NEW_YORK)


@given(st.text(alphabet="0123456789*/,-#LWMONTUESA @²", max_size=40))
def test_any_other_text_is_refused_with_our_error(text: str) -> None:
    moment = datetime(2000, 1, 1, tzinfo=UTC)
    try:
        found = CronExpression.parse(text, NEW_YORK).after(moment)
    except InvalidRecurrenceError:
        return
    assert found is not None
    assert found > moment


@pytest.mark.parametrize("name", ["Europe/Nowhere", "../etc/passwd", "/etc/passwd", "", "a\0b"])
def test_an_unknown_zone_is_refused(name: str) -> None:
    with pytest.raises(InvalidRecurrenceError, match="unknown"):
        zone_of(name)


# -- the second implementation


@cache
def field_matches(field: str, value: int, lowest: int, highest: int) -> bool:
    for part in field.split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        start = lowest if span == "*" else int(first)
        end = highest if span == "*" else int(last or first)
        if start <= value <= end and (value - start) % int(step or 1) == 0:
            return True
    return False


@cache
def fields_of(expression: str) -> list[str]:
    return expression.replace("SUN", "0").replace("MON", "1").split()


def matches(expression: str, local: datetime) -> bool:
    minute, hour, day, month, weekday = fields_of(expression)
    if not field_matches(minute, local.minute, 0, 59) or not field_matches(hour, local.hour, 0, 23):
        return False
    day_fits = field_matches(day, local.day, 1, 31)
    weekday_fits = field_matches(weekday, local.isoweekday() % 7, 0, 6)
    both = day.startswith("*") or weekday.startswith("*")
    date_fits = (day_fits and weekday_fits) if both else (day_fits or weekday_fits)
    return date_fits and field_matches(month, local.month, 1, 12)


def walk(expressions: tuple[str, ...], zone: Zone, start: int, end: int) -> dict[str, list[int]]:
    """The runs from *start* to *end*, in seconds: look at each minute."""
    found: dict[str, list[int]] = {one: [] for one in expressions}
    furthest = datetime.fromtimestamp(start + zone.offset(start) - 60, UTC)
    for here in range(start, end + 1, 60):
        local = datetime.fromtimestamp(here + zone.offset(here), UTC)
        new, one = [], furthest + timedelta(minutes=1)
        while one <= local:
            new.append(one)
            one += timedelta(minutes=1)
        furthest = max(furthest, local)
        for expression in expressions:
            is_fixed = not expression.startswith("*") and not expression.split()[1].startswith("*")
            if any(matches(expression, one) for one in new) if is_fixed else matches(expression, local):
                found[expression].append(here)
    return found


def compare(name: str, zone: Zone, change: int, expressions: tuple[str, ...]) -> None:
    shift = abs(zone.offset(change) - zone.offset(change - 1))
    start, end = (change - 3 * 3600 - shift) // 60 * 60, (change + 3 * 3600 + shift) // 60 * 60
    for expression, expected in walk(expressions, zone, start, end).items():
        cron = CronExpression.parse(expression, ZoneInfo(name))
        here, found = datetime.fromtimestamp(start - 1, UTC), list[int]()
        while (following := cron.after(here)) is not None and following.timestamp() <= end:
            here = following
            found.append(int(here.timestamp()))
        assert found == expected, (name, expression, datetime.fromtimestamp(change, UTC))


def kind_of(zone: Zone, change: int) -> tuple[int, int]:
    """By how much clocks are set, and at which local time."""
    before = zone.offset(change - 1)
    return zone.offset(change) - before, (change + before) % 86_400


def test_both_implementations_agree_in_every_zone() -> None:
    """At one change of each kind per zone. The long test looks at all changes from 2000 to 2100."""
    seen = set()
    for zone, name in zones().items():
        for change in zone.changes:
            if (kind := kind_of(zone, change)) not in seen:
                seen.add(kind)
                compare(name, zone, change, (*FIXED, *ELAPSED))
    assert len(seen) > 40


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_both_implementations_agree_at_every_change_from_2000_to_2100(part: int) -> None:
    for number, (zone, name) in enumerate(zones().items()):
        if number % 8 == part:
            for change in zone.changes:
                compare(name, zone, change, (*FIXED, *ELAPSED))


def test_the_second_reading_of_the_zones_is_that_of_zoneinfo() -> None:
    zone = read("Europe/Berlin")
    assert len(zone.changes) == 200
    for change in zone.changes:
        for here in (change - 1, change):
            offset = datetime.fromtimestamp(here, ZoneInfo("Europe/Berlin")).utcoffset()
            assert offset == timedelta(seconds=zone.offset(here))


@examples(0.3)
@given(
    st.sampled_from([*FIXED, *ELAPSED]),
    st.integers(946_684_800, 4_070_908_800),
    st.sampled_from(["Europe/London", "UTC"]),
)
def test_the_next_run_is_the_first_that_matches(expression: str, start: int, name: str) -> None:
    cron, zone = CronExpression.parse(expression, ZoneInfo(name)), read(name)
    following = cron.after(datetime.fromtimestamp(start, UTC))
    assert following is not None
    end = int(following.timestamp())
    begin = max(start // 60 * 60 + 60, end - 7200)
    assert end > start
    # A day before: the clocks may have been set back meanwhile.
    found = walk((expression,), zone, begin - 86_400, end)[expression]
    assert [one for one in found if one >= begin] == [end]
