"""The limit on the rate of a task, on a clock of the test."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.spark.rate_limiter import RateLimiter


class Clock:
    """A clock that moves when something sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@given(
    st.integers(1, 100_000),
    st.lists(st.tuples(st.floats(0, 3), st.floats(0, 1)), min_size=1, max_size=40),
)
def test_no_second_has_more_than_the_rate_and_a_step(rate: int, steps: list[tuple[float, float]]) -> None:
    """Whatever time passes between the steps, and however full they are."""
    clock = Clock()
    pace = RateLimiter(rate, clock=clock, sleep=clock.sleep)
    assert pace.step is not None
    sent: list[tuple[float, int]] = []
    for idle, share in steps:
        clock.now += idle
        messages = max(1, int(pace.step * share))
        pace.wait(messages)
        sent.append((clock.now, messages))
    for begun, _ in sent:
        assert sum(messages for at, messages in sent if begun <= at < begun + 0.999) <= rate + pace.step


def test_the_rate_is_reached() -> None:
    clock = Clock()
    pace = RateLimiter(1_000, clock=clock, sleep=clock.sleep)
    for _ in range(101):
        pace.wait(100)
    assert clock.now == pytest.approx(110)


def test_without_a_rate_nothing_waits() -> None:
    clock = Clock()
    pace = RateLimiter(None, clock=clock, sleep=clock.sleep)
    pace.wait(1_000_000)
    assert (pace.step, clock.now) == (None, 100)
