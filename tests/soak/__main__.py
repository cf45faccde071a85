"""``make soak``, or ``python -m tests.soak --help``."""

from __future__ import annotations

import argparse
import fcntl
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Final

from bide.local_broker import LocalBroker
from tests.soak.account import Account, summary
from tests.soak.job_run import REPOSITORY, end
from tests.soak.round import Plan, Round

SHARES: Final = {"worker": 4, "daemon": 1, "stop": 3, "cancel": 2}
"""How often a kill that is not one of the JVM is of each kind."""
_LEAST_JVM: Final = 0.08


def main() -> int:
    """Run rounds until there are as many kills as are wanted, in all runs together."""
    arguments = parsed()
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another run is at work in {folder}", file=sys.stderr)
            return 2
        return soak(arguments, folder)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Kill Spark at random, and count.")
    parser.add_argument("--kills", type=int, default=500, help="in all runs together")
    parser.add_argument("--jvm", type=int, default=50, help="how many of them of the whole JVM, at least")
    parser.add_argument("--per-round", type=int, default=40, help="number of kills before each check")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no more kills after that in this run")
    parser.add_argument("--root", type=Path, help="the root of another system whose RabbitMQ is to run")
    parser.add_argument("--seed", type=int, help="of the kills; another one each time unless given")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / ".soak", help="where everything is kept")
    parser.add_argument("--report", action="store_true", help="only print the account")
    return parser.parse_args()


def soak(arguments: argparse.Namespace, folder: Path) -> int:
    """One run; 0 if the account has no failure."""
    account = Account(folder / "account.jsonl")
    chance = random.Random(arguments.seed)
    until = time.monotonic() + arguments.seconds

    def choose() -> str:
        totals = account.totals()
        jvm = arguments.jvm - totals.of_kind("jvm")
        if chance.random() < max(_LEAST_JVM, jvm / max(1, arguments.kills - totals.all)):
            return "jvm"
        return chance.choices([*SHARES], [*SHARES.values()])[0]

    if not arguments.report:
        account.add("run", seed=arguments.seed)
    while not arguments.report and time.monotonic() < until:
        plan = next_round(arguments, account, folder)
        if plan is None:
            break
        place = place_of(folder, plan.number)
        if Round(plan, place, account, chance=chance, choose=choose, until=until, say=say).run():
            discard(place)
        else:
            place.rename(place.with_name(f"failed-{plan.number:04}"))
    totals = account.totals()
    say(summary(totals))
    return bool(totals.failures)


def next_round(arguments: argparse.Namespace, account: Account, folder: Path) -> Plan | None:
    """The round that an earlier run left, or a new one; None if there are kills enough."""
    totals = account.totals()
    for place in sorted(folder.glob("round-*")):
        plan = Plan.load(place)
        if plan is not None and plan.number not in totals.ended:
            return plan
        # It was never begun, or only its removal was not finished.
        discard(place)
    missing = max(arguments.kills - totals.all, arguments.jvm - totals.of_kind("jvm"))
    if missing <= 0:
        return None
    chroot = str(arguments.root.resolve()) if arguments.root else None
    plan = Plan(number=max(totals.ended, default=0) + 1, chroot=chroot, kills=min(missing, arguments.per_round))
    place = place_of(folder, plan.number)
    place.mkdir()
    plan.save(place)
    return plan


def place_of(folder: Path, number: int) -> Path:
    """Where a round has its files."""
    return folder / f"round-{number:04}"


def discard(place: Path) -> None:
    """Remove the folder of a round, and remaining processes of its job and broker."""
    end(place)
    LocalBroker(place / "broker").stop()
    shutil.rmtree(place)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
