"""The numbers behind the pictures, counted from what the pipelines recorded."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from benchmarks.suite.percentiles import percentile

EVERY: Final = 2.0
LATE_EVERY: Final = 5.0


@dataclass(frozen=True, slots=True)
class Received:
    """A message that the endpoint got: when it was sent, due and received, in seconds since the Unix epoch."""

    sent: float
    due: float
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Messages that were scheduled and came, in equal steps of time since the first was sent.

    Attributes:
        every: seconds of a step.
        due: messages that had to come in each step.
        received: those that did.
        waiting: sent and not received, at the end of each step.
        sent_in: seconds until all were sent.
    """

    every: float
    due: Sequence[int]
    received: Sequence[int]
    waiting: Sequence[int]
    sent_in: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """Outcomes of messages in an audit, in equal steps of due time since the first message was sent.

    Attributes:
        first: seconds from there to the first step.
        every: seconds of a step of outcomes.
        processed: messages that a handler was done with.
        parked: those that failed for good.
        waiting: all others: for their time, or for their handler.
        late_every: seconds of a step of the percentiles.
        p50: of their lateness in ms, None where nothing was delivered or not all may have been seen; *p95* and *p99*
            likewise.
        until: the last delivery that the audit has seen, in seconds since the first message was sent.
    """

    first: float
    every: float
    processed: Sequence[int]
    parked: Sequence[int]
    waiting: Sequence[int]
    late_every: float
    p50: Sequence[float | None]
    p95: Sequence[float | None]
    p99: Sequence[float | None]
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Messages that failed and were sent back, in equal steps of time since the first message was sent.

    Attributes:
        every: seconds of a step.
        parked_from: seconds to the first step of *parked*.
        parked: messages that failed in each step.
        back_from: seconds to the first step of *due* and *received*.
        due: messages that had to be back.
        received: those that were.
    """

    every: float
    parked_from: float
    parked: Sequence[int]
    back_from: float
    due: Sequence[int]
    received: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Messages that a level held, and should have.

    Attributes:
        at: seconds since the first message was sent, of each sample.
    """

    name: str
    at: Sequence[float]
    measured: Sequence[float]
    planned: Sequence[float]


def counts(moments: Iterable[float], *, first: float, every: float, steps: int) -> list[int]:
    """How many lie in each step; what lies in none is left out."""
    found = [0] * steps
    for one in moments:
        number = math.floor((one - first) / every)
        if 0 <= number < steps:
            found[number] += 1
    return found


def lateness(received: Iterable[Received]) -> dict[str, float]:
    """Percentiles of what came after its due time, in milliseconds."""
    late = sorted((one.at - one.due) * 1000 for one in received)
    return {name: round(percentile(late, percent), 1) for name, percent in (("p50", 50), ("p95", 95), ("p99", 99))}


def campaign_of(received: Sequence[Received], start: float) -> Campaign:
    """Counts per step, from the first sending to the last receipt."""
    steps = math.floor((max(one.at for one in received) - start) / EVERY) + 1
    sent, came = sorted(one.sent for one in received), sorted(one.at for one in received)
    edges = [start + EVERY * number for number in range(1, steps + 1)]
    in_steps = partial(counts, first=start, every=EVERY, steps=steps)
    return Campaign(
        every=EVERY,
        due=in_steps(one.due for one in received),
        received=in_steps(came),
        waiting=[bisect_right(sent, edge) - bisect_right(came, edge) for edge in edges],
        sent_in=round(sent[-1] - start, 1),
    )


def audited_of(rows: Sequence[Mapping[str, Any]]) -> Audited:
    """Outcomes and lateness in steps of the due time.

    Args:
        rows: ``due`` and ``delivered`` in seconds, ``lateness_ms``, ``outcome``.
    """
    dues = [row["due"] for row in rows]
    first = math.floor(min(dues) / LATE_EVERY) * LATE_EVERY
    steps = math.floor((max(dues) - first) / EVERY) + 1
    by_outcome: dict[str, list[float]] = {"processed": [], "parked": [], "waiting": []}
    late: list[list[float]] = [[] for _ in range(math.ceil(steps * EVERY / LATE_EVERY))]
    for row in rows:
        outcome = row["outcome"]
        by_outcome[outcome if outcome in by_outcome else "waiting"].append(row["due"])
        if row["lateness_ms"] is not None:
            late[math.floor((row["due"] - first) / LATE_EVERY)].append(row["lateness_ms"])

    def in_steps(outcome: str) -> list[int]:
        return counts(by_outcome[outcome], first=first, every=EVERY, steps=steps)

    until = max(row["delivered"] for row in rows if row["delivered"] is not None)
    # Of what was due just before, only the quickest have come.
    whole = math.floor((until - first) / LATE_EVERY) - 1

    def percentiles(percent: float) -> list[float | None]:
        return [
            round(percentile(sorted(one), percent), 1) if one and number < whole else None
            for number, one in enumerate(late)
        ]

    return Audited(
        first=first,
        every=EVERY,
        processed=in_steps("processed"),
        parked=in_steps("parked"),
        waiting=in_steps("waiting"),
        late_every=LATE_EVERY,
        p50=percentiles(50),
        p95=percentiles(95),
        p99=percentiles(99),
        until=round(until, 1),
    )


def replay_of(parked: Iterable[float], back: Sequence[Received], start: float, over: float) -> Replayed:
    """Both times, with some time before and after.

    Args:
        parked: when messages failed.
        over: seconds that they were spread over.
    """
    failed = [at - start for at in parked]
    before, steps = 2 * EVERY, math.ceil(over / EVERY) + 5
    parked_from, back_from = (
        math.floor((one - before) / EVERY) * EVERY for one in (min(failed), min(one.due for one in back) - start)
    )
    return Replayed(
        every=EVERY,
        parked_from=parked_from,
        parked=counts(failed, first=parked_from, every=EVERY, steps=steps),
        back_from=back_from,
        due=counts((one.due - start for one in back), first=back_from, every=EVERY, steps=steps),
        received=counts((one.at - start for one in back), first=back_from, every=EVERY, steps=steps),
    )


def levels_of(kept: Mapping[str, Any]) -> list[Level]:
    """What ``plan_check.py`` found, from the first message on until the last has come."""
    samples = kept["samples"]
    if "planned" in samples[0]:
        # As it was written at first: moments in milliseconds, and one plan alone.
        plan, a_second = "planned", 1000
        start = next(one["at"] for one in samples if one[plan]["all"])
    else:
        plan, a_second, start = "as planned", 1, 0
    samples = [one for one in samples if one["at"] >= start]
    while len(samples) > 2 and not any(samples[-2]["measured"].values()):
        samples.pop()
    names = [name for name in samples[0][plan] if any(one["measured"].get(name) for one in samples)]
    return [
        Level(
            name=name,
            at=[(one["at"] - start) / a_second for one in samples],
            measured=[one["measured"].get(name, 0) for one in samples],
            planned=[one[plan].get(name, 0.0) for one in samples],
        )
        for name in names
    ]
