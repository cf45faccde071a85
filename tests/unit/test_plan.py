"""The arithmetic of plans: levels, flows, capacities."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bide
from benchmarks.suite import burst
from benchmarks.suite.results import Results
from bide.cli.pipeline.plan import size_of
from bide.delay.protocol import QueueTarget
from bide.errors import InvalidDelayError, InvalidInputError
from bide.pipelines.plan.capacity import HOP_RATES, RELEASE_RATES, Capacity, judge
from bide.pipelines.plan.flows import MAX_POINTS, Flow, delay_range, flows_of, parse_rate
from bide.pipelines.plan.levels import PlanLevels, check_delays
from bide.runtime.wording import in_bytes

ROOT = Path(__file__).parents[2]
DAY = 86_400_000
LAYOUTS = (bide.Clock(), bide.NServiceBus())
MIDNIGHT = int(datetime(2026, 11, 21, tzinfo=UTC).timestamp() * 1000)


@pytest.mark.parametrize("infrastructure", LAYOUTS, ids=lambda one: one.name)
@given(delay=st.one_of(st.integers(1, 100_000), st.integers(1, 268_435_455_000)))
def test_stays_equal_the_queues_on_the_route(infrastructure: bide.DelayInfrastructure, delay: int) -> None:
    layout = PlanLevels.of(infrastructure)
    intervals = list(layout.intervals(0, delay))
    steps = infrastructure.steps(timedelta(milliseconds=delay), QueueTarget("orders"))
    waits = [(step.routed_to, step.delay // timedelta(milliseconds=1)) for step in steps if step.delay]
    assert [(layout.levels[one.level].queue_of(one.digit), one.leave - one.enter) for one in intervals] == waits
    assert [one.enter for one in intervals] == [0, *(one.leave for one in intervals[:-1])]
    assert intervals[-1].leave == layout.wait(delay) >= delay > layout.wait(delay) - layout.resolution


@pytest.mark.parametrize("infrastructure", LAYOUTS, ids=lambda one: one.name)
def test_each_unit_is_a_whole_number_of_the_next(infrastructure: bide.DelayInfrastructure) -> None:
    """What makes digits a matter of one division and one remainder."""
    layout = PlanLevels.of(infrastructure)
    for above, below in zip(layout.levels, layout.levels[1:], strict=False):
        assert above.unit == below.unit * (below.highest + 1)
    assert layout.longest < layout.levels[0].unit * (layout.levels[0].highest + 1)


@pytest.mark.parametrize("infrastructure", LAYOUTS, ids=lambda one: one.name)
def test_a_longer_delay_than_that_of_the_layout_is_refused(infrastructure: bide.DelayInfrastructure) -> None:
    """Also one that no timedelta can hold."""
    layout = PlanLevels.of(infrastructure)
    check_delays(layout.longest, layout)
    for delay, shown in ((layout.longest + 1, r"\d+ days, [\d:.]+"), (2**63 - 1, "9,223,372,036,854,775,807 ms")):
        with pytest.raises(InvalidInputError, match=f"there is a delay of {shown}, but .*: leave out longer delays"):
            check_delays(delay, layout)


def test_celery_cannot_be_planned_for() -> None:
    with pytest.raises(InvalidInputError, match="does not support the layout 'celery': choose clock or nservicebus"):
        PlanLevels.of(bide.Celery())


@pytest.mark.parametrize(
    ("text", "rate"),
    [("5000/s", 5000), ("1e9/d", 1e9 / 86400), ("1,200 per hour", 1 / 3), ("90/min", 1.5), (2, 2), ("0/s", 0)],
)
def test_rates_are_parsed(text: str | float, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["5000", "", "fast", "-1/s", -1, "1/week", True, None])
def test_invalid_rates_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="rate"):
        parse_rate(text)


def test_a_delay_can_be_a_range() -> None:
    assert delay_range("5m") == (300_000, 300_000)
    assert delay_range("1h..PT2H") == (3_600_000, 7_200_000)
    with pytest.raises(InvalidInputError, match="is shorter than the first"):
        delay_range("2h..1h")
    with pytest.raises(InvalidDelayError):
        delay_range("1h..")


def test_flows_share_a_rate_by_weight() -> None:
    flows = flows_of([{"rate": "8/s", "delay": {"1m": 3, "0s..1h": 1}, "size": 5}], length=timedelta(hours=2))
    assert [(one.rate, one.shortest, one.longest, one.points) for one in flows] == [
        (6, 60_000, 60_000, 1),
        (2, 0, 3_600_000, MAX_POINTS),
    ]
    assert [one.messages for one in flows] == [6 * 7200, 2 * 7200]
    assert [one.undelayed for one in flows] == [0, pytest.approx(2 * 7200 / MAX_POINTS)]


def test_a_profile_follows_the_hours_of_the_day() -> None:
    flow = Flow(
        rate=10, shortest=0, longest=0, size=1, first=MIDNIGHT + DAY // 4 + 60_000, length=DAY, profile=(0, 1, 3, 0)
    )
    quarter = DAY // 4
    assert flow.changes() == [
        (MIDNIGHT + quarter + 60_000, 10.0),
        (MIDNIGHT + 2 * quarter, 20.0),
        (MIDNIGHT + 3 * quarter, -30.0),
        (MIDNIGHT + 5 * quarter, 10.0),
        (MIDNIGHT + 5 * quarter + 60_000, -10.0),
    ]
    assert flow.messages == pytest.approx(10 * DAY / 1000), "a whole day has the mean rate"


@pytest.mark.parametrize(
    ("flow", "expected"),
    [
        ({"rate": "1/s"}, "flow 1 has no delay"),
        ({"rate": "1/s", "delay": "1s", "sise": 1}, "flow 1 has unknown keys, sise: choose from delay"),
        ({"rate": "1/s", "delay": {"1s": 0}}, "weights are all zero"),
        (
            {"rate": "1/s", "delay": ["5m", "1h"]},
            r"^flow 1 has the delay \['5m', '1h'\]: give a delay such as '5m'",
        ),
        ({"rate": "1/s", "delay": 300}, "flow 1 has the delay 300: give"),
        ({"rate": "1/s", "delay": {}}, "flow 1 has the delay {}: give"),
        ({"rate": "1/s", "delay": {5: 1}}, "flow 1 has the delay {5: 1}: give"),
        ({"rate": "1/s", "delay": {"1s": "much"}}, "a weight of 'much'"),
        ({"rate": "1/s", "delay": "1s", "size": -1}, "the size -1"),
        ({"rate": "1/s", "delay": "1s", "profile": []}, "the profile"),
        ({"rate": "1/s", "delay": "1s", "profile": [0, 0]}, "profile whose weights"),
        ("1/s", "give a table"),
    ],
)
def test_invalid_flows_are_refused(flow: dict[str, object], expected: str) -> None:
    with pytest.raises(InvalidInputError, match=expected):
        flows_of([flow])


def test_verdicts_compare_demand_with_capacity() -> None:
    capacity = Capacity.measured("clock", broker="3.10", prefetch=32, hops=10_000, disk=10**9)
    found = {
        one.what: one for one in judge(capacity, hops=7_000, release=20_000, messages=10**6, bytes=5 * 10**8, lanes=2)
    }
    assert {name: one.verdict for name, one in found.items()} == {
        "hops/s": "fits",
        "release/s": "too much",
        "disk": "tight",
        "memory": "not judged",
    }
    assert found["release/s"].wanted == 10_000, "lanes share"
    assert found["release/s"].lanes == 5
    (enough,) = [
        one for one in judge(capacity, hops=0, release=20_000, messages=0, bytes=0, lanes=5) if one.what == "release/s"
    ]
    assert enough.verdict == "fits"
    for values in ({"broker": "3.9"}, {"prefetch": 64}):
        with pytest.raises(InvalidInputError, match="not measured"):
            Capacity.measured("clock", **values)
    with pytest.raises(InvalidInputError, match="not measured"):
        Capacity.measured("celery")


def test_planned_release_rates_do_not_exceed_the_measured_ones() -> None:
    """By the benchmark's newest burst, give or take a twentieth, and by the page that has other releases too."""
    kept = [Results.load(file) for file in sorted((ROOT / "benchmarks/results").glob("*-4.3.*.json"))]
    for prefetch, setting in ((32, burst.LOW), (1000, burst.HIGH)):
        rates = [one.median("burst", burst.ONE_LANE, setting, "rate") for one in kept]
        newest = [rate for rate in rates if rate is not None][-1]
        assert RELEASE_RATES[prefetch]["4.3"] <= 1.05 * newest
    page = (ROOT / "docs/delays.md").read_text()
    for prefetch, row in ((32, "32"), (1000, "workers replaced")):
        cells = " | ".join(f"{RELEASE_RATES[prefetch][release]:,}/s" for release in ("3.10", "4.3"))
        assert f"\n| {row} | {cells} |\n" in page


def test_the_page_shows_the_capacities_of_the_verdicts() -> None:
    page = (ROOT / "docs/pipeline-plan.md").read_text()
    for row, figures in (
        ("hops/s, `Clock`", {release: of["clock"] for release, of in HOP_RATES.items()}),
        ("hops/s, cascade", {release: of["nservicebus"] for release, of in HOP_RATES.items()}),
        ("released/s by one queue, `dead_letter_worker_consumer_prefetch` 32", RELEASE_RATES[32]),
        ("the same with 1,000", RELEASE_RATES[1000]),
    ):
        assert f"\n| {row} | {figures['3.10']:,} | {figures['4.3']:,} |\n" in page


def test_sizes_are_parsed_and_formatted() -> None:
    assert [size_of("--disk", text) for text in (None, "5", "200G", "1.5tb", "3 k")] == [
        None,
        5,
        200 * 10**9,
        15 * 10**11,
        3_000,
    ]
    for text in ("", "G", "much", "-1G", "0", "nan", "1e30"):
        with pytest.raises(click.UsageError, match=r"is not a size|is out of range"):
            size_of("--disk", text)
    assert [in_bytes(count) for count in (0, 999, 1_000, 1.2e9, 3e16)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.2 GB",
        "30.0 PB",
    ]
