"""The virtual clock of the in-memory broker."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.errors import InvalidDelayError, InvalidDueTimeError
from bide.testing.rules.clock import DEFAULT_START, VirtualClock


def test_the_clock_stands_still_by_itself() -> None:
    clock = VirtualClock()
    assert clock.now() == clock.now() == DEFAULT_START


def test_the_clock_advances_by_delays_and_to_due_times() -> None:
    clock = VirtualClock("2024-02-28T23:00:00+01:00")
    clock.advance("1h30m")
    assert clock.now() == datetime(2024, 2, 28, 23, 30, tzinfo=UTC)
    clock.advance_to("2024-02-29T00:00:00Z")
    assert clock.now() == datetime(2024, 2, 29, tzinfo=UTC)
    assert clock.milliseconds == 1_709_164_800_000


def test_the_clock_does_not_pass_the_year_9999() -> None:
    clock = VirtualClock()
    with pytest.raises(InvalidDelayError, match="beyond the year 9999"):
        clock.advance("3000000d")
    assert clock.now() == DEFAULT_START
    clock.advance(datetime.max.replace(tzinfo=UTC) - DEFAULT_START)
    assert clock.now().year == 9999


def test_the_clock_does_not_go_back() -> None:
    clock = VirtualClock()
    with pytest.raises(InvalidDelayError):
        clock.advance(timedelta(seconds=-1))
    with pytest.raises(InvalidDueTimeError, match="0:00:01 before"):
        clock.advance_to(DEFAULT_START - timedelta(seconds=1))
    with pytest.raises(InvalidDueTimeError):
        VirtualClock(datetime(2024, 1, 1))  # noqa: DTZ001 (on purpose)


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(0, 100))
def test_callbacks_run_in_order_at_their_due_times(delays: list[int], until: int) -> None:
    clock = VirtualClock()
    start = clock.microseconds
    happened: list[tuple[int, int]] = []

    def note(number: int) -> None:
        happened.append((clock.microseconds - start, number))

    for number, delay in enumerate(delays):
        clock.call_at(start + delay, partial(note, number))
    clock.advance(timedelta(microseconds=until))
    assert happened == sorted((delay, number) for number, delay in enumerate(delays) if delay <= until)
    left = [delay for delay in delays if delay > until]
    due = clock.next_due
    assert (None if due is None else due - DEFAULT_START) == (timedelta(microseconds=min(left)) if left else None)


def test_callbacks_can_schedule_more_callbacks() -> None:
    clock = VirtualClock()
    times: list[datetime] = []

    def tick() -> None:
        times.append(clock.now())
        clock.call_at(clock.microseconds + 1_000_000, tick)

    tick()
    clock.advance("3s")
    assert times == [DEFAULT_START + timedelta(seconds=number) for number in range(4)]


def test_cancelled_timers_do_not_run() -> None:
    clock = VirtualClock()
    timer = clock.call_at(clock.microseconds + 1, lambda: pytest.fail("it happened"))
    timer.cancel()
    clock.advance("1s")
    assert timer.cancelled
    assert clock.next_due is None
