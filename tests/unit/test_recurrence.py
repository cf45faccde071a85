"""Recurrences, the claims that follow from them, and the clock of a gate."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.durations import to_milliseconds
from bide.errors import InvalidDueTimeError, InvalidRecurrenceError, ScheduleRecordError
from bide.schedules.entries import WaitingSchedule
from bide.schedules.gate_clock import HOLD, TOLERANCE, GateClock
from bide.schedules.message import ScheduledMessage
from bide.schedules.planning import plan
from bide.schedules.recurrence import CATCH_UPS, Recurrence

NOW = datetime(2026, 11, 23, 7, 30, tzinfo=UTC)
PRESENT = to_milliseconds(NOW)
MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000


def times(recurrence: Recurrence, count: int, after: int = PRESENT) -> list[str]:
    found = islice(recurrence.runs(after), count)
    return [datetime.fromtimestamp(one / 1000, UTC).isoformat() for one in found]


class TestRuns:
    def test_an_interval_is_counted_from_now(self) -> None:
        assert times(Recurrence.of("15m", now=NOW), 2) == ["2026-11-23T07:45:00+00:00", "2026-11-23T08:00:00+00:00"]

    def test_an_interval_is_counted_from_the_first_run(self) -> None:
        recurrence = Recurrence.of("1d", now=NOW, first_run="2026-11-25T06:00:00+01:00")
        assert times(recurrence, 2) == ["2026-11-25T05:00:00+00:00", "2026-11-26T05:00:00+00:00"]

    def test_a_cron_expression_runs_in_its_zone(self) -> None:
        recurrence = Recurrence.of("0 8 * * MON-FRI", now=NOW, time_zone="Europe/Berlin")
        assert times(recurrence, 2) == ["2026-11-24T07:00:00+00:00", "2026-11-25T07:00:00+00:00"]

    def test_no_run_before_the_first_and_after_the_last(self) -> None:
        recurrence = Recurrence.of(
            "0 * * * *", now=NOW, first_run="2026-11-23T09:00:00Z", last_run="2026-11-23T10:30:00Z"
        )
        assert times(recurrence, 9) == ["2026-11-23T09:00:00+00:00", "2026-11-23T10:00:00+00:00"]

    @pytest.mark.parametrize(
        ("every", "given_values"),
        [
            ("0.5s", {}),
            (timedelta(0), {}),
            ("90000d", {}),
            ("nonsense", {}),
            (5, {}),
            (None, {}),
            ("1h", {"time_zone": "Europe/Berlin"}),
            ("0 8 * * *", {"time_zone": "Europe/Nowhere"}),
            ("0 8 * * *", {"catch_up": "some"}),
            ("0 8 * * *", {"last_run": "2020-01-01T00:00:00Z"}),
            ("0 8 * * *", {"jitter": "2d"}),
        ],
    )
    def test_what_cannot_be_used_is_refused(self, every: Any, given_values: dict[str, Any]) -> None:
        with pytest.raises(InvalidRecurrenceError):
            Recurrence.of(every, now=NOW, **given_values)

    def test_a_run_without_a_zone_is_refused(self) -> None:
        with pytest.raises(InvalidDueTimeError):
            Recurrence.of("1h", now=NOW, first_run="2026-11-25T06:00:00")

    @given(
        st.sampled_from(["0 8 * * *", "*/7 * * * *", "45s", "36h"]),
        st.sampled_from(CATCH_UPS),
        st.none() | st.integers(0, 3600),
    )
    def test_a_recurrence_is_read_as_it_was_written(self, every: str, catch_up: str, jitter: int | None) -> None:
        shift = None if jitter is None else timedelta(seconds=jitter)
        recurrence = Recurrence.of(every, now=NOW, catch_up=catch_up, jitter=shift, last_run="2030-01-01T00:00:00Z")
        assert Recurrence.parse(recurrence.spec()) == recurrence

    @pytest.mark.parametrize(
        "spec",
        [
            {},
            {"catch_up": "last"},
            {"catch_up": "some", "interval": 5000},
            {"catch_up": "last", "interval": 5000, "cron": "* * * * *"},
            {"catch_up": "last", "interval": 1},
            {"catch_up": "last", "interval": 5000, "more": 1},
            {"catch_up": "last", "interval": 5000, "jitter": 2**63 - 1},
            {"catch_up": "last", "interval": 2**63 - 1},
        ],
    )
    def test_a_foreign_recurrence_is_refused(self, spec: dict[str, Any]) -> None:
        with pytest.raises(ScheduleRecordError):
            Recurrence.parse(spec)

    @given(
        st.sampled_from(["*/7 * * * *", "0 8 * * *", "*/20 * * * * *", "90s", "36h"]),
        st.integers(0, 10 * DAY),
        st.none() | st.integers(0, 5 * DAY),
    )
    def test_the_latest_run_is_the_last_one_until_then(self, every: str, later: int, last: int | None) -> None:
        end = None if last is None else NOW + timedelta(days=2, milliseconds=last)
        recurrence = Recurrence.of(every, now=NOW, last_run=end)
        first = recurrence.after(PRESENT)
        assert first is not None
        found = recurrence.latest(first, first + later)
        following = recurrence.after(found)
        assert first <= found <= first + later
        assert following is None or following > first + later

    @given(st.integers(0, DAY), st.integers(0, 2**45))
    def test_jitter_delays_by_a_part_of_it_and_always_the_same(self, jitter: int, nominal: int) -> None:
        recurrence = Recurrence(interval=DAY, jitter=jitter)
        assert nominal <= recurrence.due("a-1", nominal) <= nominal + jitter
        assert recurrence.due("a-1", nominal) == recurrence.due("a-1", nominal)

    def test_the_end_of_the_calendar_ends_the_runs(self) -> None:
        assert Recurrence.of("0 8 * * *", now=NOW).after(to_milliseconds(datetime(9999, 12, 31, tzinfo=UTC))) is None
        assert Recurrence(interval=DAY).after(2**60) is None


class TestClaims:
    @staticmethod
    def waiting(recurrence: Recurrence | None, **changed: Any) -> WaitingSchedule:
        values: dict[str, Any] = {"nominal": PRESENT, "due": PRESENT, "resumed_at": None, **changed}
        return WaitingSchedule(
            key="k",
            id="a-1",
            version="a-1",
            target="q:x",
            routing_key="",
            recurrence=None if recurrence is None else recurrence.spec(),
            message=ScheduledMessage(b"\0\0", b""),
            **values,
        )

    def test_a_single_message_has_no_following_occurrence(self) -> None:
        item = plan(self.waiting(None), PRESENT + DAY)
        assert (item.skip, item.next_nominal) == (False, None)

    def test_a_claim_names_the_following_occurrence_with_its_jitter(self) -> None:
        recurrence = Recurrence(interval=HOUR, anchor=PRESENT, jitter=MINUTE)
        item = plan(self.waiting(recurrence), PRESENT)
        assert (item.skip, item.next_nominal) == (False, PRESENT + HOUR)
        assert item.next_due == recurrence.due("a-1", PRESENT + HOUR)

    @pytest.mark.parametrize(
        ("catch_up", "skip", "following"),
        [("all", False, PRESENT + HOUR), ("last", True, PRESENT + 5 * HOUR), ("none", True, PRESENT + 6 * HOUR)],
    )
    def test_catch_up_decides_about_missed_runs(self, catch_up: Any, skip: bool, following: int) -> None:
        recurrence = Recurrence(interval=HOUR, anchor=PRESENT, catch_up=catch_up)
        item = plan(self.waiting(recurrence), PRESENT + 5 * HOUR + 30 * MINUTE)
        assert (item.skip, item.next_nominal) == (skip, following)

    @pytest.mark.parametrize("catch_up", CATCH_UPS)
    def test_a_run_that_is_a_little_late_is_not_missed(self, catch_up: Any) -> None:
        recurrence = Recurrence(interval=HOUR, anchor=PRESENT, catch_up=catch_up)
        assert not plan(self.waiting(recurrence), PRESENT + MINUTE).skip

    @pytest.mark.parametrize("catch_up", CATCH_UPS)
    def test_a_run_that_was_moved_is_not_missed_at_its_new_time(self, catch_up: Any) -> None:
        recurrence = Recurrence(interval=DAY, anchor=PRESENT, catch_up=catch_up)
        assert not plan(self.waiting(recurrence, due=PRESENT + 4 * HOUR), PRESENT + 4 * HOUR).skip

    @pytest.mark.parametrize("catch_up", CATCH_UPS)
    def test_runs_of_a_pause_are_skipped(self, catch_up: Any) -> None:
        recurrence = Recurrence(interval=HOUR, anchor=PRESENT, catch_up=catch_up)
        item = plan(self.waiting(recurrence, resumed_at=PRESENT + 3 * HOUR - 1), PRESENT + 3 * HOUR)
        assert (item.skip, item.next_nominal) == (True, PRESENT + 3 * HOUR)


class TestTheClockOfAGate:
    def test_it_follows_small_corrections(self) -> None:
        clock = GateClock()
        for second in range(100):
            wall = second * 1000 + second * TOLERANCE // 2
            assert clock.now(wall=wall, monotonic=second * 1000) == wall

    def test_a_step_forward_is_not_believed_at_once(self) -> None:
        clock = GateClock()
        clock.now(wall=0, monotonic=0)
        assert clock.now(wall=3_601_000, monotonic=1000) == 1000
        assert clock.is_held
        assert clock.now(wall=2000, monotonic=2000) == 2000
        assert not clock.is_held

    def test_a_step_forward_is_believed_after_a_while(self) -> None:
        clock = GateClock()
        clock.now(wall=0, monotonic=0)
        clock.now(wall=3_600_000, monotonic=0)
        assert clock.now(wall=3_600_000 + HOLD, monotonic=HOLD) == 3_600_000 + HOLD

    def test_a_step_forward_is_believed_when_another_machine_confirms_it(self) -> None:
        clock = GateClock()
        clock.now(wall=0, monotonic=0)
        clock.now(wall=3_600_000, monotonic=0)
        clock.hear(3_600_000, 1000)
        assert clock.is_held
        clock.hear(3_600_000, 3_600_010)
        assert clock.now(wall=3_600_500, monotonic=500) == 3_600_500

    def test_a_step_back_is_believed_and_so_is_its_correction(self) -> None:
        clock = GateClock()
        clock.now(wall=10_000, monotonic=0)
        assert clock.now(wall=6000, monotonic=1000) == 6000
        assert clock.now(wall=12_000, monotonic=2000) == 12_000

    def test_a_step_forward_long_after_a_step_back_is_not_believed_at_once(self) -> None:
        """The clock was two hours ahead when the gate started, and was set right."""
        clock = GateClock()
        clock.now(wall=7_200_000, monotonic=0)
        for monotonic in (1000, HOLD, HOLD + 2000):
            assert clock.now(wall=monotonic, monotonic=monotonic) == monotonic
        assert clock.now(wall=HOLD + 5_403_000, monotonic=HOLD + 3000) == HOLD + 3000

    @given(st.lists(st.tuples(st.integers(0, 5000), st.integers(-5000, 5000)), max_size=30))
    def test_it_is_never_ahead_of_the_true_time_while_steps_are_short_lived(self, steps: list[tuple[int, int]]) -> None:
        clock, true = GateClock(), 100_000
        clock.now(wall=true, monotonic=true)
        for passed, error in steps:
            true += passed
            assert clock.now(wall=true + error, monotonic=true) <= true + TOLERANCE * (len(steps) + 1)
