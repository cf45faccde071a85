"""``make race``, or ``python -m tests.schedule_race --help``."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from bide.local_broker import LocalBroker
from tests.schedule_race.checking import Findings, check
from tests.schedule_race.history import HistoryWriter, read_history
from tests.schedule_race.race import Plan, Race

_SHOWN: Final = 20
"""Violations that are printed."""


def main() -> int:
    """Run a race and check its history; 1 if a promise was broken, or the race did not finish."""
    arguments = parsed()
    if arguments.check is not None:
        return report(check(read_history(arguments.check)))
    plan = Plan(
        seed=secrets.randbits(32) if arguments.seed is None else arguments.seed,
        operations=arguments.operations,
        rate=arguments.rate,
        broker_kills=arguments.broker_kills,
        seconds=arguments.seconds,
    )
    history = arguments.folder / f"history-{plan.seed}.jsonl"
    arguments.folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {plan.seed}: {plan.operations} changes; the history is {history}", flush=True)
    begun = time.monotonic()
    finished = run(plan, history, arguments.root)
    print(f"{time.monotonic() - begun:.0f} s", flush=True)
    if not finished:
        print(f"it did not finish within {plan.seconds:g} s", file=sys.stderr)
    return report(check(read_history(history))) or int(not finished)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.schedule_race",
        description="Cancel and replace schedules at the moment of delivery, and kill gates, clients and the broker.",
    )
    parser.add_argument("--operations", type=int, default=200_000, help="cancels and replaces (default 200,000)")
    parser.add_argument("--rate", type=float, default=300.0, help="of them per second, at most (default 300)")
    parser.add_argument("--broker-kills", type=int, default=3, help="how often the broker is killed (default 3)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which it gives up (default 3,600)")
    parser.add_argument("--seed", type=int, help="of the random choices; another one each time unless given")
    parser.add_argument("--root", type=Path, help="the root of another system whose RabbitMQ is to run")
    parser.add_argument("--folder", type=Path, default=Path(".race"), help="for histories (default .race)")
    parser.add_argument("--check", type=Path, metavar="HISTORY", help="only check a history")
    return parser.parse_args()


def run(plan: Plan, history: Path, root: Path | None) -> bool:
    """Run a race with a broker of its own; False if it took too long."""
    with (
        tempfile.TemporaryDirectory(prefix="bide-race-") as folder,
        LocalBroker.start(Path(folder) / "broker", detached=False, chroot=root) as broker,
        HistoryWriter(history) as writer,
    ):
        try:
            asyncio.run(Race(plan, broker, Path(folder), writer).run())
        except TimeoutError:
            return False
        return True


def report(found: Findings) -> int:
    """Print what was found; 1 if a promise was broken."""
    show(found.lines())
    show(f"  {one}" for one in found.violations[:_SHOWN])
    return int(bool(found.violations))


def show(lines: Iterable[str]) -> None:
    """Print lines at once."""
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
