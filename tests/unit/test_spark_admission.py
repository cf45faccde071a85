"""Limits of micro-batches."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from bide.spark.admission import Admission, TriggerLimits


class Clock:
    """A clock that tests set."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def admission(clock: Clock, *, least: int | None = None, most: int | None = None, size: int | None = None) -> Admission:
    limits = TriggerLimits(min_offsets=least, max_offsets=most, max_bytes=size, max_delay=timedelta(seconds=60))
    return Admission(limits, clock)


def test_a_batch_waits_for_the_least_number_or_for_the_delay() -> None:
    clock = Clock()
    made = admission(clock, least=10)
    assert not made.must_wait({"s": 0}, {"s": 1}), "the first batch does not wait"
    clock.now += 59
    assert made.must_wait({"s": 1}, {"s": 10})
    assert not made.must_wait({"s": 1}, {"s": 11})
    clock.now += 59
    assert made.must_wait({"s": 11}, {"s": 12})
    clock.now += 1
    assert not made.must_wait({"s": 11}, {"s": 12}), "a minute has passed since the last batch"
    assert made.must_wait({"s": 12}, {"s": 13})


def test_an_idle_time_does_not_count_as_a_batch() -> None:
    clock = Clock()
    made = admission(clock, least=10)
    assert not made.must_wait({"s": 0}, {"s": 0})
    assert not made.must_wait({"s": 0}, {"s": 1})


def test_a_limit_in_bytes_is_shared_by_the_backlogs() -> None:
    sizes = {"small": 100.0, "large": 1000.0}
    begin, ends = {"small": 0, "large": 50}, {"small": 1000, "large": 150}
    # 200,000 bytes in all.
    found = admission(Clock(), size=20_000).limit(begin, ends, lambda stream, _: sizes[stream])
    assert found == {"small": 100, "large": 60}
    assert admission(Clock(), size=200_000).limit(begin, ends, lambda stream, _: sizes[stream]) == ends
    assert admission(Clock(), size=20_000, most=11).limit(begin, ends, lambda stream, _: sizes[stream]) == {
        "small": 10,
        "large": 51,
    }


@given(
    st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(0, 9), st.integers(0, 50)), min_size=1),
    st.integers(1, 1000),
    st.floats(0, 500),
)
def test_a_limited_batch_always_makes_progress(backlogs: dict[str, tuple[int, int]], limit: int, size: float) -> None:
    begin = {stream: first for stream, (first, _) in backlogs.items()}
    ends = {stream: first + count for stream, (first, count) in backlogs.items()}
    found = admission(Clock(), size=limit).limit(begin, ends, lambda _, __: size)
    assert all(begin[stream] <= found[stream] <= ends[stream] for stream in ends)
    assert (found != begin) == (ends != begin)


def test_the_rate_is_that_between_the_last_two_observations() -> None:
    clock = Clock()
    made = admission(clock)
    found = []
    for seconds, ends in ((0, {"a": 10}), (2, {"a": 15, "new": 1000}), (10, {"a": 15, "new": 1000})):
        clock.now += seconds
        made.observe(ends)
        found.append(made.arriving_per_second)
    assert found == [None, 2.5, 0]
