"""The histogram of due times."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.cli.pipeline_view import histogram, span_for

START = datetime(2026, 11, 21, tzinfo=UTC)


@given(st.timedeltas(timedelta(0), timedelta(days=3199)))
def test_the_spans_of_a_histogram_are_few(length: timedelta) -> None:
    span = span_for(START, START + length)
    assert length / span <= 32
    assert span_for(None, None) > timedelta(0)


def test_lines_for_what_is_due_and_what_is_not() -> None:
    hour = timedelta(hours=1)
    times = [(START, 10), (START + 2 * hour, 40), (START + 6 * hour, 1)]
    assert histogram(times, hour) == [
        f"2026-11-21 00:00  {'10':>11}  {'█' * 10}",
        f"2026-11-21 01:00  {'0':>11}",
        f"2026-11-21 02:00  {'40':>11}  {'█' * 40}",
        "                  (3 spans with none)",
        f"2026-11-21 06:00  {'1':>11}  █",
    ]
    assert histogram([], hour) == []


def test_a_last_line_after_which_there_is_no_time() -> None:
    year = timedelta(days=365)
    spans = (datetime.max.replace(tzinfo=UTC) - START) // year
    lines = histogram([(START, 1), (START + spans * year, 2)], year)
    assert lines == [
        f"2026-11-21  {'1':>11}  {'█' * 20}",
        f"            ({spans - 1} spans with none)",
        f"{START + spans * year:%Y-%m-%d}  {'2':>11}  {'█' * 40}",
    ]


@pytest.mark.parametrize(
    ("every", "text"),
    [
        (timedelta(seconds=5), "2026-11-21 00:00:00"),
        (timedelta(minutes=30), "2026-11-21 00:00"),
        (timedelta(days=7), "2026-11-21"),
    ],
)
def test_times_are_as_fine_as_the_spans(every: timedelta, text: str) -> None:
    (line,) = histogram([(START, 1)], every)
    assert line.split("  ")[0] == text
