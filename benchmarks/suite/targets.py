"""The performance targets of bide, as ratios within one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.suite import (
    burst,
    cancel,
    consume,
    keyed,
    lateness,
    memory,
    publish,
    schedules,
    store,
    sustained,
    takeover,
)
from benchmarks.suite.results import Results
from bide.local_broker.installation import numbers

_AT: Final = "1,500/s"
_FLAT_MB: Final = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """One number in the results: a median."""

    measurement: str
    case: str
    setting: str
    quantity: str

    def value(self, results: Results) -> float | None:
        """The number, None where it was not measured."""
        return results.median(self.measurement, self.case, self.setting, self.quantity)

    def values(self, results: Results) -> list[float]:
        """The number of each round."""
        row = results.find(self.measurement, self.case, self.setting)
        return [] if row is None else row.values.get(self.quantity, [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something to reach.

    Attributes:
        title: what it is about.
        of: the number that matters.
        to: what it is divided by; None for the number itself.
        at_least: whether more is better.
    """

    title: str
    of: Place
    to: Place | None
    limit: float
    at_least: bool

    def ratio(self, results: Results) -> float | None:
        """What was reached; None where it was not measured."""
        value = self.of.value(results)
        if self.to is None or value is None:
            return value
        base = self.to.value(results)
        return value / base if base else None

    def each_round(self, results: Results) -> list[float]:
        """What was reached in each round; nothing where the two were not measured equally often."""
        values = self.of.values(results)
        if self.to is None:
            return values
        bases = self.to.values(results)
        if len(values) != len(bases) or not all(bases):
            return []
        return [value / base for value, base in zip(values, bases, strict=True)]

    def is_met(self, ratio: float) -> bool:
        """Whether so much is enough."""
        return ratio >= self.limit if self.at_least else ratio <= self.limit

    @property
    def wanted(self) -> str:
        """The limit in words."""
        return f"at {'least' if self.at_least else 'most'} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bar, and what was reached.

    Attributes:
        ratio: of the medians, which decides.
        rounds: the same round by round, which says how firm that is.
    """

    bar: Bar
    ratio: float
    rounds: Sequence[float] = ()

    @property
    def is_met(self) -> bool:
        """Whether it is enough."""
        return self.bar.is_met(self.ratio)

    @property
    def reached(self) -> str:
        """The ratio in two digits behind the point; the lowest and the highest of the rounds where they differ."""
        ratio = f"{self.ratio:.2f}"
        if not self.rounds:
            return ratio
        low, high = (f"{one:.2f}" for one in (min(self.rounds), max(self.rounds)))
        return ratio if low == high else f"{ratio} ({low}–{high})"

    @property
    def word(self) -> str:
        """The verdict."""
        return "met" if self.is_met else "not met"


def verdicts(results: Results) -> list[Verdict]:
    """The verdict on every target that these results have numbers for."""
    found = ((bar, bar.ratio(results)) for bar in bars(results.releases["RabbitMQ"]))
    return [Verdict(bar, ratio, bar.each_round(results)) for bar, ratio in found if ratio is not None]


def bars(release: str) -> Iterator[Bar]:
    """All bars for a release of RabbitMQ."""
    for size in (publish.SMALL, publish.LARGE):
        for one, other, limit in (
            (publish.BULK, publish.RAW, 0.9),
            (publish.BULK, publish.AIO_PIKA, 4.0),
            (publish.BULK, publish.CELERY, 20.0),
            (publish.ASYNC, publish.AIO_PIKA, 1.5),
        ):
            yield Bar(
                title=f"publish {size}: {one} / {other}",
                of=Place(publish.PUBLISH.name, one, size, "rate"),
                to=Place(publish.PUBLISH.name, other, size, "rate"),
                limit=limit,
                at_least=True,
            )
    yield Bar(
        title=f"consume: {consume.ENDPOINT} / {consume.BIDE}",
        of=Place(consume.CONSUME.name, consume.ENDPOINT, "", "rate"),
        to=Place(consume.CONSUME.name, consume.BIDE, "", "rate"),
        limit=0.6,
        at_least=True,
    )
    yield from _lateness()
    yield Bar(
        title=f"sustained: {sustained.CLOCK} / {sustained.CASCADE}",
        of=Place(sustained.SUSTAINED.name, sustained.CLOCK, "", "rate"),
        to=Place(sustained.SUSTAINED.name, sustained.CASCADE, "", "rate"),
        limit=2.0 if numbers(release) < (4,) else 1.7,
        at_least=True,
    )
    for case, setting in (
        (burst.ONE_MOMENT, burst.LOW),
        (burst.FOUR_LANES, burst.LOW),
        (burst.ONE_MOMENT, burst.HIGH),
        (burst.ONE_LANE, burst.HIGH),
        (burst.FOUR_LANES, burst.HIGH),
    ):
        yield Bar(
            title=f"burst: {case}, {setting} / {burst.ONE_LANE}, {burst.LOW}",
            of=Place(burst.BURST.name, case, setting, "seconds"),
            to=Place(burst.BURST.name, burst.ONE_LANE, burst.LOW, "seconds"),
            limit=0.4,
            at_least=False,
        )
    yield from _floors()
    yield Bar(
        title="store: messages lost",
        of=Place(store.STORE.name, lateness.CLOCK, "", "lost"),
        to=None,
        limit=0,
        at_least=False,
    )
    yield Bar(
        title="memory of a bulk publish: growth in MB",
        of=Place(memory.MEMORY.name, memory.BULK, "", "growth"),
        to=None,
        limit=_FLAT_MB,
        at_least=False,
    )
    yield from _schedules()


def _floors() -> Iterator[Bar]:
    """A burst through ``Clock`` against one hop, with the same setting."""
    for measurement in (burst.BURST, burst.MILLION):
        for case in (burst.ONE_MOMENT, burst.FOUR_LANES):
            yield Bar(
                title=f"{measurement.name}, {burst.HIGH}: {case} / {burst.FLOOR}",
                of=Place(measurement.name, case, burst.HIGH, "seconds"),
                to=Place(measurement.name, burst.FLOOR, burst.HIGH, "seconds"),
                limit=1.5,
                at_least=False,
            )


def _schedules() -> Iterator[Bar]:
    for setting in (cancel.ALONE, cancel.STEADY):
        yield Bar(
            title=f"cancel {setting}, p99: a cancel / a confirmed publish",
            of=Place(cancel.CANCELS.name, cancel.CANCEL, setting, "times_p99"),
            to=None,
            limit=5,
            at_least=False,
        )
    for setting in keyed.SETTINGS:
        for quantity, what in (("p50", "p50"), ("p99", "p99"), ("broker_cpu", "broker CPU")):
            yield Bar(
                title=f"lateness at {setting}, {what}: {schedules.KEYED} / {schedules.UNKEYED}",
                of=Place(keyed.KEYED_LATENESS.name, schedules.KEYED, setting, quantity),
                to=Place(keyed.KEYED_LATENESS.name, schedules.UNKEYED, setting, quantity),
                limit=1,
                at_least=False,
            )
    yield Bar(
        title="take-over from a killed gate: the longest, in s",
        of=Place(takeover.TAKEOVERS.name, takeover.TAKEOVER, "", "takeover_max"),
        to=None,
        limit=5,
        at_least=False,
    )


def _lateness() -> Iterator[Bar]:
    for case, quantity, limit in (
        (lateness.CLOCK, "p50", 0.5),
        (lateness.CLOCK, "p99", 0.8),
        (lateness.CLOCK, "broker_cpu", 0.65),
        (lateness.HUNDREDTHS, "p50", 1.0),
        (lateness.HUNDREDTHS, "p99", 1.0),
        (lateness.HUNDREDTHS, "broker_cpu", 1.0),
    ):
        what = "broker CPU" if quantity == "broker_cpu" else quantity
        yield Bar(
            title=f"lateness at {_AT}, {what}: {case} / {lateness.CASCADE}",
            of=Place(lateness.LATENESS.name, case, _AT, quantity),
            to=Place(lateness.LATENESS.name, lateness.CASCADE, _AT, quantity),
            limit=limit,
            at_least=False,
        )
