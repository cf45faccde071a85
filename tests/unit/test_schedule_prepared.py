"""Checks of schedules and filters, and the records made of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import bide
from bide.errors import (
    InvalidDueTimeError,
    InvalidInputError,
    InvalidNameError,
    InvalidRecurrenceError,
    UnsupportedTargetError,
)
from bide.schedules.encoding import RESERVE, decode, encode, with_reserve
from bide.schedules.prepared import check_due, check_filter, check_schedule
from bide.schedules.records import AddSchedule, ScheduleFilter
from bide.schedules.requests import RequestId

NOW = datetime(2026, 11, 23, 12, 0, 0, 500, tzinfo=UTC)
GIVEN: dict[str, Any] = {"body": None, "key": "k", "to": "q", "delay": "1d"}
REQUEST = RequestId("a", 1)


def record(**fields: Any) -> AddSchedule:
    """The record of a schedule, as a gate decodes it."""
    found = decode(encode(check_schedule(bide.OutgoingSchedule(**fields), NOW).record(REQUEST, NOW)))
    assert isinstance(found, AddSchedule)
    return found


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"key": ""}, InvalidNameError),
        ({"key": "x" * 256}, InvalidNameError),
        ({"key": "a\nb"}, InvalidNameError),
        ({"delay": None}, InvalidDueTimeError),
        ({"deliver_at": "2030-01-01T00:00:00Z"}, InvalidDueTimeError),
        ({"every": "15m"}, InvalidDueTimeError),
        ({"delay": "999999999d"}, InvalidDueTimeError),
        ({"time_zone": "UTC"}, InvalidRecurrenceError),
        ({"catch_up": "all"}, InvalidRecurrenceError),
        ({"delay": None, "every": "0 8"}, InvalidRecurrenceError),
        ({"delay": None, "every": "0 8 * * *" + " " * 300}, InvalidRecurrenceError),
        ({"delay": None, "every": "15m", "first_run": "1960-01-01T00:00:00Z"}, InvalidRecurrenceError),
        ({"delay": None, "every": "15m", "time_zone": "UTC"}, InvalidRecurrenceError),
        ({"delay": None, "every": "15m", "catch_up": "some"}, InvalidRecurrenceError),
        ({"delay": None, "every": "0 8 * * *", "time_zone": ""}, InvalidRecurrenceError),
        ({"delay": None, "every": "0 8 * * *", "time_zone": 5}, InvalidRecurrenceError),
        ({"if_absent": 1}, InvalidInputError),
        ({"if_absent": True, "if_version": "a-1"}, InvalidInputError),
        ({"if_version": ""}, InvalidNameError),
        ({"if_version": 5}, InvalidNameError),
        ({"to": None}, InvalidInputError),
        ({"exchange": "x"}, InvalidInputError),
        ({"to": "bide.v1.schedule.0"}, UnsupportedTargetError),
        ({"to": None, "exchange": "bide.v1.schedule.gates"}, UnsupportedTargetError),
        ({"body": b"x", "json": 1}, InvalidInputError),
        ({"headers": {"bide-key": "x"}}, InvalidInputError),
        ({"headers": {"CC": ["x"]}}, InvalidInputError),
    ],
)
def test_an_invalid_schedule_is_refused(changed: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        record(**{**GIVEN, **changed})


def test_a_due_time_in_the_past_is_due_at_once() -> None:
    assert record(key="k", to="q", deliver_at="1960-01-01T00:00:00Z").due == 0
    assert record(key="k", to="q", delay="0s").due == 1_795_435_200_001


def test_a_value_that_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(InvalidInputError):
        record(**{**GIVEN, "headers": {"x": object()}})


def test_the_first_run_of_an_interval_is_the_given_one() -> None:
    first = NOW + timedelta(hours=1)
    assert record(key="k", to="q", every="15m", first_run=first).nominal == 1_795_438_800_001
    assert record(key="k", to="q", every="15m").nominal == 1_795_436_100_001


def test_a_filter_has_the_conditions_that_were_given() -> None:
    assert check_filter() == ScheduleFilter()
    assert check_filter(prefix="a:", exchange="x", due_from="1960-01-01T00:00:00Z", due_before=NOW) == ScheduleFilter(
        prefix="a:", target="x:x", due_from=0, due_before=1_795_435_200_001
    )
    for wrong in ({"prefix": "x" * 256}, {"prefix": 5}, {"to": ""}, {"to": "q", "exchange": "x"}, {"due_from": "x"}):
        with pytest.raises(InvalidInputError):
            check_filter(**wrong)


def test_a_due_time_is_a_delay_or_a_time() -> None:
    assert check_due("1s", None, NOW) == check_due(None, NOW + timedelta(seconds=1), NOW)
    for delay, time in ((None, None), ("1s", NOW)):
        with pytest.raises(InvalidDueTimeError):
            check_due(delay, time, NOW)


def test_a_large_record_keeps_room_for_the_fields_of_a_gate() -> None:
    small, large = (
        check_schedule(bide.OutgoingSchedule(bytes(size), key="k", to="q", delay="1d"), NOW)
        for size in (1_000, 100_000)
    )
    assert with_reserve(encode(small.record(REQUEST, NOW))) == encode(small.record(REQUEST, NOW))
    body = encode(large.record(REQUEST, NOW))
    assert len(with_reserve(body)) == len(body) + RESERVE
    assert decode(with_reserve(body)) == decode(body)
