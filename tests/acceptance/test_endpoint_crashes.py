"""An endpoint with crashing handlers, killed processes and a restarted broker."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import bide
from bide.error_queues import ErrorQueue
from bide.topology import Queue
from tests.acceptance.crashing_endpoint import CLOCK, ERROR, POISON_AFTER, QUEUE
from tests.support import Rabbitmq, flush_declarations
from tests.timeouts import TIMEOUT

log = logging.getLogger(__name__)

WORKER = Path(__file__).with_name("crashing_endpoint.py")
MESSAGES = 1000
KILLERS = (120, 700)
KILL_AT = (150, 450)
RESTART_BROKER_AT = 300
FIRST = 600
"""Messages that are sent at first. The others are sent after the last fault, so that there is work left for it."""
LONGEST = 800.0
MOST_STARTS = 40


class EndpointProcess:
    """Keeps the program running, as a service manager does, and reads its account."""

    def __init__(self, url: str, account: Path) -> None:
        self._account = account
        # A broker closes a connection whose client gets no processor time, unless it has no heartbeats: this would be
        # a reason for duplicates that the test does not know.
        self._environment = {
            **os.environ,
            "BIDE_URL": f"{url}?heartbeat=0",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self.deaths: list[tuple[float, int]] = []
        self.starts = 0

    def lines(self) -> list[dict[str, Any]]:
        """All that the program wrote down; a line that was cut by a kill is not yet one."""
        if not self._account.exists():
            return []
        return [json.loads(line) for line in self._account.read_bytes().splitlines() if line.endswith(b"}")]

    def restart_if_dead(self) -> None:
        """Start the program if it does not run."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            # Nothing but a kill ends it: an error of its own would be a finding.
            assert code == -signal.SIGKILL, f"the program ended by itself, with {code}"
            self.deaths.append((time.time(), self._process.pid))
        assert self.starts < MOST_STARTS
        self.starts += 1
        self._process = subprocess.Popen([sys.executable, str(WORKER), str(self._account)], env=self._environment)

    def kill(self) -> None:
        """Kill it from outside."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(TIMEOUT)

    def stop(self) -> int:
        """Ask it to end, and return its exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(TIMEOUT)


async def send(url: str, numbers: range) -> dict[str, str]:
    """Messages, killers among them; returns their types by their ids."""
    types = {
        f"{number:04}": "killer" if number in KILLERS else "always" if number % 5 == 0 else "twice"
        for number in numbers
    }
    async with bide.connect(url, infrastructure=CLOCK) as client:
        await client.declare(bide.Topology(queues=[Queue.quorum(QUEUE), Queue.quorum(ERROR)]))
        for name, kind in types.items():
            await client.publish(name, to=QUEUE, message_id=name, type=kind)
        await client.bind(QUEUE)
    return types


async def parked(url: str) -> list[str]:
    """The message ids in the error queue."""
    async with bide.connect(url, infrastructure=CLOCK) as client:
        return [str(one.message_id) async for one in ErrorQueue(client, ERROR, audit=False).messages()]


@pytest.mark.long
def test_every_message_survives_killed_workers_and_a_broker_restart(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    with rabbitmq.start(tmp_path / "broker") as broker:
        types = asyncio.run(send(broker.url, range(FIRST)))
        flush_declarations(broker)
        endpoint = EndpointProcess(broker.url, tmp_path / "account")
        kills = list(KILL_AT)
        restart: tuple[float, float] | None = None
        deadline = time.monotonic() + LONGEST
        ended: set[str] = set()
        while len(types) < MESSAGES or ended != set(types):
            assert time.monotonic() < deadline, f"{len(set(types) - ended)} messages are not done with"
            endpoint.restart_if_dead()
            lines = endpoint.lines()
            ended = {one["id"] for one in lines if one["what"] in ("processed", "parked")}
            if kills and len(ended) >= kills[0]:
                kills.pop(0)
                endpoint.kill()
            if restart is None and len(ended) >= RESTART_BROKER_AT:
                begun = time.time()
                broker.restart()
                restart = begun, time.time()
            if not kills and restart is not None and len(types) < MESSAGES:
                types |= asyncio.run(send(broker.url, range(FIRST, MESSAGES)))
            time.sleep(0.02)  # between two looks at the progress
        assert not kills
        assert restart is not None
        assert endpoint.stop() == 0
        in_error_queue = asyncio.run(parked(broker.url))
    lines = endpoint.lines()
    done = Counter(one["id"] for one in lines if one["what"] == "done")
    killed = Counter(one["id"] for one in lines if one["what"] == "kill")

    # Every message ended where it should, and none is lost.
    assert set(done) == {name for name, kind in types.items() if kind == "twice"}
    assert set(in_error_queue) == {name for name, kind in types.items() if kind != "twice"}
    # A poison message is parked after exactly POISON_AFTER deaths; others are not mistaken for it (see above).
    assert set(killed) == {name for name, kind in types.items() if kind == "killer"}
    assert all(1 <= count <= POISON_AFTER for count in killed.values())
    assert len(endpoint.deaths) == killed.total() + len(KILL_AT)

    # Every duplicate has its reason: the process died, or the broker went away, after the first time. The broker takes
    # seconds to stop, and the endpoint goes on for some of them.
    breaks = [*((at, at) for at, _ in endpoint.deaths), restart]
    times: dict[str, list[float]] = defaultdict(list)
    for one in lines:
        if one["what"] == "done":
            times[one["id"]].append(one["at"])
    duplicates = {name: found for name, found in times.items() if len(found) > 1}
    for name, found in duplicates.items():
        for before, after in pairwise(found):
            assert any(before - 1 < end and begin < after for begin, end in breaks), (
                f"{name} was handled twice for no reason"
            )
    repeated = sum(len(found) - 1 for found in duplicates.values())
    parked_twice = len(in_error_queue) - len(set(in_error_queue))
    # At most the unsettled messages of each break: five handlers, and five copies that they had just sent.
    assert repeated + parked_twice <= len(breaks) * 10
    log.info(
        "%d messages, %d starts, %d deaths, 1 broker restart: %d processed, %d parked; %d and %d of them twice",
        *(MESSAGES, endpoint.starts, len(endpoint.deaths), len(done), len(set(in_error_queue)), repeated, parked_twice),
    )
