"""The time until the console shows what waits, with few and with a million schedules.

``python -m benchmarks.console_first_view`` starts a private broker, a gate and a console, and opens the first view in
Chromium: with a thousand schedules, and again after the others were sent. A figure is the time from the navigation to
the complete view. The first one of each is on a console that has just started.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Final

import bide
from benchmarks.suite.gates import GateProcess, wait_for_schedules
from benchmarks.suite.processor import processor_seconds
from benchmarks.suite.task import environment
from bide.local_broker import LocalBroker
from tests import browser

_FEW: Final = 1_000
_WINDOW: Final = 2_000
_TARGETS: Final = ("reminders", "mail", "billing", "orders")
_SPREAD: Final = timedelta(days=30)
"""Due times are evenly spread over this time, from an hour from now on."""

_LOOK_EVERY: Final = 0.01
_BODY: Final = bytes(200)
_TIMEOUT: Final = timedelta(minutes=20)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.console_first_view", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1_000_000, help="number of schedules that wait")
    parser.add_argument("--views", type=int, default=9, help="number of times that the view is opened")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, LocalBroker.start(ephemeral=True) as broker:
        asyncio.run(run(broker, Path(folder), arguments.schedules, arguments.views))


async def run(broker: LocalBroker, folder: Path, schedules: int, views: int) -> None:
    """Fill the broker, and open the view with few schedules and with all."""
    url = broker.add_vhost("shop")
    async with bide.connect(url, timeout=_TIMEOUT) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(one) for one in _TARGETS]))
        for hours in range(1, 13):
            await client.publish(b"", to="orders", delay=f"{hours}h")
        gate = await GateProcess(url, folder / "gate").wait_until_leading()
        try:
            made = all_schedules(schedules)
            for number in (_FEW, schedules):
                begun = time.perf_counter()
                missing = number - await client.count_scheduled()
                await client.publish_many((next(made) for _ in range(missing)), window=_WINDOW)
                await wait_for_schedules(client, number, look_every=1.0)
                print(f"{number:,} schedules wait after {time.perf_counter() - begun:.0f} s", flush=True)
                await asyncio.to_thread(look, broker, url, gate, folder / f"profile-{number}", views)
        finally:
            gate.kill()


def all_schedules(number: int) -> Iterator[bide.OutgoingSchedule]:
    """Schedules in the order of their keys, due at random times."""
    chance = random.Random(1)
    for one in range(number):
        delay = timedelta(hours=1) + _SPREAD * chance.random()
        yield bide.OutgoingSchedule(_BODY, key=f"invoice:{one:07}", to=chance.choice(_TARGETS), delay=delay)


def look(broker: LocalBroker, url: str, gate: GateProcess, profile: Path, views: int) -> None:
    """Open the first view of a new console several times, and print how long it took."""
    with console(broker, url) as (address, process), browser.start(profile) as page:
        found: list[float] = []
        used = [processor_seconds(gate.pid), processor_seconds(process.pid)]
        for place in range(views):
            if place:
                page.visit("about:blank")
            begun = time.perf_counter()
            page.visit(address if not place else address.partition("#")[0])
            while not page.evaluate("document.querySelector('.view')?.dataset.ready === 'true'"):
                time.sleep(_LOOK_EVERY)  # no event reports that the view is complete
            found.append(time.perf_counter() - begun)
            shown = page.evaluate("document.querySelector('.stats b').innerText")
            asked = page.evaluate(
                "performance.getEntriesByType('resource').filter(one => one.name.includes('api/timeline'))"
                ".map(one => one.duration).at(-1) / 1000"
            )
            now = [processor_seconds(gate.pid), processor_seconds(process.pid)]
            gates, server = (after - before for before, after in zip(used, now, strict=True))
            used = now
            print(
                f"  {shown} schedules: {found[-1]:.2f} s, of these {asked:.2f} s for the skyline; processor time: "
                f"gate {gates:.2f} s, console {server:.2f} s; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
        print(f"  first {found[0]:.2f} s, median of the others {median(found[1:]):.2f} s, most {max(found):.2f} s")


@contextmanager
def console(broker: LocalBroker, url: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A console, with its address."""
    command = [sys.executable, "-m", "bide", "console", "--port", "0"]
    settings = environment(
        BIDE_URL=url, BIDE_MANAGEMENT_URL=broker.management_url, BIDE_STREAM_PORT=str(broker.stream_port)
    )
    with subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split(" on ")[1].strip(), process
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
