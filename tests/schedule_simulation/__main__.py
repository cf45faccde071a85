"""See :mod:`tests.schedule_simulation.simulation`."""

from __future__ import annotations

import logging
import sys
import time

from tests.schedule_simulation.directed import DIRECTED
from tests.schedule_simulation.simulation import Result, Simulation, run

_REPORT_EVERY = 60.0
"""Seconds."""


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 (a program)


def main() -> int:
    numbers = [int(one) for one in sys.argv[1:] if one.isdigit()]
    wanted, seed, operations = [*numbers, *(1000, 0, 150)[len(numbers) :]]
    if "-v" in sys.argv:
        logging.basicConfig(level=logging.INFO)
    else:
        logging.getLogger("bide").setLevel(logging.CRITICAL)
    fault = sys.argv[sys.argv.index("--fault") + 1] if "--fault" in sys.argv else None
    kind = DIRECTED.get(fault or "", Simulation)
    first, started, total, bad = seed, time.monotonic(), Result(), 0
    reported = started

    def report() -> None:
        say(
            f"{total.schedules} occurrences in {seed - first} histories (seeds {first} to {seed - 1}), {total.records} "
            f"records, {total.received} deliveries, {total.starts} starts of gates, "
            f"{time.monotonic() - started:.0f} s: {bad} bad histories"
        )

    while total.schedules < wanted:
        result = run(seed, operations, fault, kind=kind)
        total.schedules += result.schedules
        total.received += result.received
        total.records += result.records
        total.starts += result.starts
        bad += bool(result.problems)
        for line in result.problems[:5]:
            say(line)
        seed += 1
        if time.monotonic() - reported > _REPORT_EVERY and total.schedules < wanted:
            reported = time.monotonic()
            report()
    report()
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
