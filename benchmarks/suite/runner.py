"""The runner: every case once per round, round after round."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from benchmarks.suite import machine
from benchmarks.suite.broker import Host
from benchmarks.suite.errors import BenchmarkError
from benchmarks.suite.measurement import Case, Measurement, Plan
from benchmarks.suite.quantities import QUANTITIES
from benchmarks.suite.results import Results, Row, Run
from benchmarks.suite.task import Answer
from bide.errors import InvalidInputError
from bide.local_broker.installation import find_installation

Listener = Callable[[Row, str], None]
"""Called after every run of a case with its row so far and a note about the run."""

NOT_INSTALLED: Final = "not installed"

_CALM: Final = 0.1
"""Part of a virtual machine that its host may take: from whom it takes more is measured again, at full size."""

_ATTEMPTS: Final = 3
"""How often such a case is measured at most. Of as many, the calmest counts, whatever came of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """One try of a case: the values and where they come from, or why there are none."""

    stolen: float
    outcome: tuple[Answer, Run] | BenchmarkError


def run(
    measurements: Sequence[Measurement],
    plan: Plan,
    *,
    root: Path | None = None,
    only: Sequence[str] = (),
    listener: Listener = lambda row, note: None,
    keeper: Callable[[Results], object] = lambda results: None,
) -> Results:
    """Measure.

    Args:
        root: folder of another system whose RabbitMQ is used.
        only: patterns (``bide*``); of the cases, those whose name or setting matches one of them. All if empty.
        listener: called after every run.
        keeper: given the results at the beginning and after every measurement: an end that comes early costs little.

    Raises:
        InvalidInputError: nothing is what was asked for.
        LocalBrokerError: the broker does not start. A case that fails is reported in the results.
    """
    chosen = {one.name: [case for case in one.cases(plan) if _is_wanted(case, only)] for one in measurements}
    if not any(chosen.values()):
        cases = [case for one in measurements for case in one.cases(plan)]
        named = dict.fromkeys(name for case in cases for name in (case.setting, case.name) if name)
        raise InvalidInputError(f"nothing is called {' or '.join(map(repr, only))}: choose of {', '.join(named)}")
    results = Results(
        date=_now(),
        scale=plan.scale,
        rounds=plan.rounds,
        machine=machine.describe(),
        releases={"RabbitMQ": find_installation(chroot=root).release, **machine.releases()},
    )
    keeper(results)
    for measurement in measurements:
        cases = chosen[measurement.name]
        if not cases:
            continue
        rounds = min(plan.rounds, measurement.most_rounds or plan.rounds)
        with Host.start(root, broker=measurement.broker == "shared") as host:
            for case in [case for _ in range(rounds) for case in cases]:
                _run(host, root, measurement, case, results, listener)
        keeper(results)
    return results


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _is_wanted(case: Case, only: Sequence[str]) -> bool:
    return not only or any(fnmatch(text, pattern) for pattern in only for text in (case.name, case.setting))


def _run(
    host: Host, root: Path | None, measurement: Measurement, case: Case, results: Results, listener: Listener
) -> None:
    row = results.row(measurement.name, case.name, case.setting)
    note = ""
    if case.rival is not None and machine.release_of(case.rival) is None:
        row.note(note := NOT_INSTALLED)
    elif case.unless_failed is not None and _failed_before(results, measurement, case):
        row.note(note := f"not tried: not sustained at {case.unless_failed}")
    else:
        outcome = _calmest(
            lambda: _attempt(host, root, measurement, case, results),
            lambda text: listener(row, text),
            attempts=_ATTEMPTS if results.scale >= 1 else 1,
        ).outcome
        if isinstance(outcome, BenchmarkError):
            row.note(note := f"failed: {outcome}")
            results.failures.append(f"{row.name}: {outcome}")
        else:
            row.add(*outcome)
            note = _in_short(outcome[0])
    listener(row, note)


def _calmest(measure: Callable[[], _Attempt], tell: Callable[[str], None], *, attempts: int) -> _Attempt:
    """Measure, and again if the host of the machine was in the way: chosen by that alone, never by what came of it."""
    limit = _CALM * (os.cpu_count() or 1)
    made = [measure()]
    while made[-1].stolen > limit and len(made) < attempts:
        tell(f"again: the host of this machine took {made[-1].stolen:.1f} cores")
        made.append(measure())
    return min(made, key=lambda attempt: attempt.stolen)


def _attempt(host: Host, root: Path | None, measurement: Measurement, case: Case, results: Results) -> _Attempt:
    begun, source, before, start = _now(), machine.source(), machine.stolen_seconds(), time.monotonic()
    measured: tuple[Answer, float] | BenchmarkError
    try:
        measured = _measured(host, root, measurement, case, results)
    except BenchmarkError as error:
        measured = error
    stolen = (machine.stolen_seconds() - before) / (time.monotonic() - start)
    if isinstance(measured, BenchmarkError):
        return _Attempt(stolen=stolen, outcome=measured)
    answer, busy = measured
    run = Run(begun=begun, source=source, busy=round(busy, 2), stolen=round(stolen, 2))
    return _Attempt(stolen=stolen, outcome=(answer, run))


def _measured(
    host: Host, root: Path | None, measurement: Measurement, case: Case, results: Results
) -> tuple[Answer, float]:
    if measurement.broker != "fresh":
        results.releases |= host.releases()
        return host.run(case)
    with Host.start(root, broker=True, dead_letter_prefetch=case.dead_letter_prefetch) as fresh:
        results.releases |= fresh.releases()
        return fresh.run(case)


def _failed_before(results: Results, measurement: Measurement, case: Case) -> bool:
    assert case.unless_failed is not None
    row = results.find(measurement.name, case.name, case.unless_failed)
    return row is not None and not results.median(row.measurement, row.case, row.setting, "sustained")


def _in_short(answer: Answer) -> str:
    parts = [
        f"{one.title} {one.shown(answer.values[name])}" for name, one in QUANTITIES.items() if name in answer.values
    ]
    return "; ".join(parts)
