"""Tasks that the real Celery delays, moved into ``Clock`` before they are due."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import bide
from bide.admin.infrastructure import install
from bide.topology import Binding, Queue, Topology
from tests.broker import celery_app
from tests.broker.celery_app import EXCHANGE, ROUTING_KEY, TASK, WORK
from tests.broker.receiving import connected, receive
from tests.broker.test_celery_interop import running_worker
from tests.support import Vhost
from tests.timeouts import MAX_LATENESS, TIMEOUT

SEEN = "seen"
"""A queue with a copy of each task. A worker that gets a task too early keeps it until its ``eta``."""

DELAY = 20
"""Seconds: longer than the command takes."""

MAX_EARLINESS = timedelta(seconds=1)
"""Celery truncates the time until an ``eta`` to whole seconds (``Celery.send_task``)."""

TASKS = 3
"""The number of tasks of each kind."""


def send_tasks(url: str) -> dict[str, datetime]:
    """Let Celery delay tasks by ``countdown`` and by ``eta``, and return the times at which they are due."""
    app: Any = celery_app.create(url)
    send = app.tasks[TASK].apply_async
    due = {}
    try:
        for place in range(TASKS):
            for name in ("countdown", "eta"):
                moment = datetime.now(UTC) + timedelta(seconds=DELAY + place)
                given = {"countdown": DELAY + place} if name == "countdown" else {"eta": moment}
                send((f"{name} {place}",), queue=WORK, **given)
                due[f"{name} {place}"] = moment
    finally:
        app.close()
    return due


def migrate(vhost: Vhost) -> dict[str, Any]:
    """Run ``bide delay migrate``, and return what it counted."""
    options = ("--from-layout", "celery", "--to-layout", "clock", "--allow", f"x:{EXCHANGE}", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "bide", "delay", "migrate", *options],
        capture_output=True,
        env={**os.environ, "BIDE_URL": vhost.url, "BIDE_MANAGEMENT_URL": vhost.broker.management_url},
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    counts: dict[str, Any] = json.loads(done.stdout)
    return counts


async def test_moved_celery_tasks_run_once_and_on_time(vhost: Vhost, tmp_path: Path) -> None:
    layout = bide.Celery()
    # The second binding is for tasks that become due before the command moves them.
    bindings = [
        Binding(EXCHANGE, SEEN, ROUTING_KEY),
        Binding(layout.delivery_exchange, SEEN, layout.cascade.exact_key(ROUTING_KEY)),
    ]
    seen = Topology(queues=[Queue.quorum(SEEN)], bindings=bindings)
    async with bide.connect(vhost.url) as client, connected(vhost.url) as connection:
        # Declare Clock first: on a slow machine that takes seconds, in which tasks could become due.
        await install(connection, bide.Clock())
        async with running_worker(client, vhost.url, tmp_path / "worker.log") as worker:
            await client.declare(seen, external={EXCHANGE, layout.delivery_exchange})
            receiving = asyncio.create_task(receive(client, SEEN, 2 * TASKS + 1))
            due = await asyncio.to_thread(send_tasks, vhost.url)
            counts = await asyncio.to_thread(migrate, vhost)
            migrated = datetime.now(UTC)
            assert (counts["left"], counts["set_aside"], counts["uncertain"]) == ({}, {}, 0)
            reports = [await worker.report() for _ in due]

            # Both queues are in order: a duplicate would arrive before this message.
            await client.publish(
                json=[["last"], {}, {}],
                exchange=EXCHANGE,
                routing_key=ROUTING_KEY,
                headers={"task": TASK, "id": "last", "lang": "py"},
            )
            assert (await worker.report()).label == "last"
        *copies, last = await receiving

    assert last.headers["id"] == "last"
    assert sorted(one.label for one in reports) == sorted(due)
    assert {one.json()[0][0] for one in copies} == set(due)
    for one in copies:
        (label,) = one.json()[0]
        assert one.received_at < due[label] + MAX_LATENESS
        if one.due is None:
            # Celery delivered it, before the command could move it.
            assert due[label] - MAX_EARLINESS <= min(one.received_at, migrated)
        else:
            assert due[label] <= one.received_at
            assert (one.exchange, one.routing_key) == (EXCHANGE, ROUTING_KEY)
    of_clock = [one.due - datetime.fromisoformat(one.headers["eta"]) for one in copies if one.due is not None]
    assert len(of_clock) == counts["moved"]
    # Rounded up to a millisecond.
    assert all(timedelta(0) <= one <= timedelta(milliseconds=1) for one in of_clock)
