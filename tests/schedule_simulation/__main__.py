"""See :mod:`tests.schedule_simulation.simulation`."""

from __future__ import annotations

import logging
import sys
import time

from tests.schedule_simulation.simulation import run

if __name__ == "__main__":
    numbers = [int(one) for one in sys.argv[1:] if one.isdigit()]
    wanted, seed, operations = [*numbers, *(1000, 0, 150)[len(numbers) :]]
    if "-v" in sys.argv:
        logging.basicConfig(level=logging.INFO)
    else:
        logging.getLogger("bide").setLevel(logging.CRITICAL)
    fault = sys.argv[sys.argv.index("--fault") + 1] if "--fault" in sys.argv else None
    first, started, schedules, received, records, starts, bad = seed, time.monotonic(), 0, 0, 0, 0, 0
    while schedules < wanted:
        result = run(seed, operations, fault)
        schedules += result.schedules
        received += result.received
        records += result.records
        starts += result.starts
        bad += bool(result.problems)
        for line in result.problems[:5]:
            print(line, flush=True)  # noqa: T201
        seed += 1
    print(  # noqa: T201
        f"{schedules} occurrences in {seed - first} histories (seeds {first} to {seed - 1}), {records} records, "
        f"{received} deliveries, {starts} starts of gates, {time.monotonic() - started:.0f} s: {bad} bad histories"
    )
    sys.exit(bool(bad))
