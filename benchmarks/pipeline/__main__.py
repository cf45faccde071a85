"""Benchmark of source, sink, schedule, audit and plan, with another checkout and limits.

``python -m benchmarks.pipeline --before DIR --result benchmarks/pipeline.json`` starts a broker of its own. DIR is
another checkout: ``git worktree add --detach DIR COMMIT``. Both run on this Python and its packages.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.pipeline.commands import AUDIT, PLAN, SCHEDULE
from benchmarks.pipeline.data_source import SINK, SOURCE
from benchmarks.pipeline.figures import BEFORE, NOW, Figures
from benchmarks.pipeline.running import ROOT, temporary_bench
from benchmarks.pipeline.table import tables
from benchmarks.suite.machine import circumstances, release_of, source

PARTS: Final = {part.name: part for part in (SOURCE, SINK, SCHEDULE, AUDIT, PLAN)}
PACKAGES: Final = ("pyspark", "pyarrow", "numpy", "duckdb")


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; may be repeated")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of rows, for a look")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=max(2, min(os.cpu_count() or 1, 4)), help="of a parallel read")
    parser.add_argument("--chroot", type=Path, help="the root of another system whose RabbitMQ is started")
    parser.add_argument("--result", type=Path, help="a file for all figures, as JSON")
    parser.add_argument("--from", dest="kept", type=Path, help="print the tables of this file, and measure nothing")
    wanted = parser.parse_args(arguments)
    if wanted.kept is not None:
        found = json.loads(wanted.kept.read_text(encoding="utf-8"))
        print(tables(found, Figures.from_json(found["figures"]), wanted.only), end="")
        return
    # Terminated, the benchmark ends its processes and its broker.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sides = {NOW: ROOT, **({BEFORE: wanted.before.resolve()} if wanted.before else {})}
    facts: dict[str, Any] = {
        **circumstances(),
        "before": source(sides[BEFORE] / "src/bide") if wanted.before else "",
        "scale": wanted.scale,
        "rounds": wanted.rounds,
        "load_average": [round(os.getloadavg()[0], 2)],
    }
    bench = temporary_bench(
        sides=sides, scale=wanted.scale, rounds=wanted.rounds, tasks=wanted.tasks, chroot=wanted.chroot
    )
    with bench as running:
        facts["releases"] = {"RabbitMQ": running.broker.release, **_releases()}
        for name in wanted.only or PARTS:
            running.measure(PARTS[name])
            facts["load_average"][1:] = [round(os.getloadavg()[0], 2)]
            if wanted.result is not None:
                text = json.dumps({**facts, "figures": running.figures.to_json()}, indent=1)
                wanted.result.write_text(f"{text}\n", encoding="utf-8")
    print(tables(facts, running.figures), end="")


def _releases() -> dict[str, str]:
    java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=True).stderr
    found = re.search(r'"(.+?)"', java)
    packages = {package: release_of(package) or "" for package in PACKAGES}
    return {"Python": platform.python_version(), **packages, "Java": found[1] if found else ""}


if __name__ == "__main__":
    main()
