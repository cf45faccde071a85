"""Axes of the report: ticks and labels."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.durations import EARLIEST, LATEST
from bide.pipelines.charts import texts
from bide.pipelines.charts.scale import (
    ROUND_SPANS,
    LinearScale,
    LogarithmicScale,
    TimeScale,
    add_spans,
    floored,
    span_for,
    widened,
)

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("high", "about", "ticks"),
    [
        (1, 4, [0, 1]),
        (7, 4, [0, 2, 4, 6]),
        (10, 2, [0, 5, 10]),
        (4012, 2, [0, 2000, 4000]),
        (1_234_567, 3, [0, 500_000, 1_000_000]),
    ],
)
def test_ticks_are_round_numbers(high: float, about: int, ticks: list[float]) -> None:
    assert LinearScale(0, high, 100, 0).ticks(about) == ticks


@given(st.floats(1, 1e12), st.integers(2, 8))
def test_ticks_are_on_the_axis_and_close_to_the_wanted_number(high: float, about: int) -> None:
    axis = LinearScale(0, high, 200, 20)
    ticks = axis.ticks(about)
    assert 2 <= len(ticks) <= 1.6 * about + 1
    assert all(19.9 <= axis.place(one) <= 200.1 for one in ticks)


def test_logarithmic_ticks_are_usual_durations() -> None:
    axis = LogarithmicScale(1, 1e8, 0, 1000)
    shown = [texts.milliseconds(one) for one in axis.ticks(20)]
    assert shown == ["1 ms", "10 ms", "100 ms", "1 s", "10 s", "1 min", "10 min", "1 h", "10 h", "1 d"]
    assert axis.place(1) == 0
    assert axis.place(1e8) == 1000
    assert axis.place(-5) == 0


@given(st.floats(1e-3, 1e3), st.floats(1.1, 1e9), st.floats(1, 300))
def test_logarithmic_ticks_keep_their_distance(low: float, ratio: float, apart: float) -> None:
    axis = LogarithmicScale(low, low * ratio, 50, 900)
    places = [axis.place(one) for one in axis.ticks(apart)]
    assert all(later - earlier >= apart for earlier, later in pairwise(places))
    assert all(49 <= one <= 901 for one in places)


def test_a_date_is_written_only_where_it_changes() -> None:
    times = TimeScale(NOON, NOON + timedelta(days=1), 0, 700)
    assert [(upper, lower) for _, upper, lower in times.ticks(5)] == [
        ("12:00", "Nov 21"),
        ("18:00", ""),
        ("00:00", "Nov 22"),
        ("06:00", ""),
        ("12:00", ""),
    ]


@given(st.timedeltas(timedelta(milliseconds=10), timedelta(days=3650)), st.integers(2, 12))
def test_ticks_of_times_are_on_the_axis_in_order(whole: timedelta, about: int) -> None:
    times = TimeScale(NOON, NOON + whole, 10, 800)
    places = [times.place(moment) for moment, _, _ in times.ticks(about)]
    assert len(places) <= about + 1
    assert all(10 <= one <= 800 for one in places)
    assert places == sorted(places)


@given(st.timedeltas(timedelta(0), timedelta(days=4000)), st.integers(1, 200))
def test_the_chosen_span_is_the_shortest_that_gives_few_enough_parts(whole: timedelta, parts: int) -> None:
    span = span_for(whole, parts)
    assert whole / span <= parts or span == ROUND_SPANS[-1]
    assert span == ROUND_SPANS[0] or whole / ROUND_SPANS[ROUND_SPANS.index(span) - 1] > parts


@given(st.datetimes(timezones=st.just(UTC)), st.integers(0, 30), st.sampled_from(ROUND_SPANS), st.integers(1, 24))
def test_a_short_range_is_widened_on_both_sides(first: datetime, spans: int, span: timedelta, fewest: int) -> None:
    last = add_spans(first, span, spans)
    start, end = widened(first, last, span, fewest=fewest)
    assert EARLIEST <= start <= first <= last <= end <= LATEST
    if start > EARLIEST and end < LATEST:
        assert (end - start) // span == max(spans, fewest)
        assert timedelta(0) <= (end - last) - (first - start) <= span


@given(st.timedeltas(timedelta(days=-20_000), timedelta(days=20_000)), st.sampled_from(ROUND_SPANS))
def test_a_moment_lies_within_its_span(from_noon: timedelta, span: timedelta) -> None:
    moment = NOON + from_noon
    assert timedelta(0) <= moment - floored(moment, span) < span


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0 ms"),
        (0.04, "0.04 ms"),
        (8.387, "8.39 ms"),
        (135.2, "135 ms"),
        (999.4, "999 ms"),
        (1000.0, "1 s"),
        (90_000.0, "1.5 min"),
        (-2500.0, "-2.5 s"),
        (86_400_000.0 * 3199, "3,199 d"),
    ],
)
def test_durations_are_formatted_briefly(value: float | None, text: str) -> None:
    assert texts.milliseconds(value) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (0.5, "0.5"), (999, "999"), (1000, "1k"), (2_500_000, "2.5M"), (3e9, "3G")]
)
def test_numbers_on_an_axis_are_abbreviated(number: float, text: str) -> None:
    assert texts.brief(number) == text


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (timedelta(milliseconds=200), "200 ms"),
        (timedelta(seconds=1), "second"),
        (timedelta(minutes=15), "15 minutes"),
        (timedelta(hours=1), "hour"),
        (timedelta(days=7), "7 days"),
    ],
)
def test_spans_are_formatted_in_words(span: timedelta, text: str) -> None:
    assert texts.span(span) == text
