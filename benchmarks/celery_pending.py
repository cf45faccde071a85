"""Memory of a Celery worker while many tasks wait for their eta, and what restarts lose.

``python -m benchmarks.celery_pending --tasks 100000`` starts a broker and a worker of its own, and sends tasks that are
all due in the same minute. While they wait it prints the worker's memory and the unacknowledged messages, kills the
worker, restarts the broker, and starts the worker again. At the end it counts the tasks that ran. ``--without-adapter``
does the same with Celery alone, which holds the tasks in the worker's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bide.local_broker import LocalBroker

TASKS = """
import os
{line}
app = Celery("pending", broker=os.environ["BROKER"])
app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True, broker_pool_limit=32,
                broker_transport_options={{"confirm_publish": True}})

@app.task(name="note", acks_late=True)
def note(number):
    with open(os.path.join(os.environ["DONE"], str(os.getpid())), "a") as file:
        file.write(f"{{number}}\\n")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--wait", type=int, default=600, help="seconds from the start until the tasks are due")
    parser.add_argument("--without-adapter", action="store_true")
    chosen = parser.parse_args()
    line = "from bide.integrations.celery import CeleryApp as Celery"
    if chosen.without_adapter:
        line = "from celery import Celery"
    with tempfile.TemporaryDirectory() as text, LocalBroker.start(Path(text) / "broker", detached=False) as broker:
        folder = Path(text)
        (folder / "done").mkdir()
        (folder / "pending_tasks.py").write_text(TASKS.format(line=line))
        os.environ |= {"BROKER": broker.url, "DONE": str(folder / "done")}
        sys.path.insert(0, str(folder))
        figures = measure(broker, folder, chosen.tasks, chosen.wait)
    print(json.dumps(figures, indent=2))
    return 0 if figures["tasks run"] == chosen.tasks else 1


def measure(broker: LocalBroker, folder: Path, tasks: int, wait: int) -> Figures:
    worker = start_worker(folder)
    figures = Figures()
    figures["tasks"] = tasks
    figures["RabbitMQ"] = broker.release
    figures["worker MB before"] = resident(worker)
    due = datetime.now(UTC) + timedelta(seconds=wait)
    started = time.monotonic()
    send(tasks, due)
    figures["seconds to send"] = round(time.monotonic() - started, 1)
    figures["worker MB, all pending"] = resident(worker)
    figures["unacknowledged, all pending"] = unacknowledged(broker)
    stop(worker)
    broker.restart()
    worker = start_worker(folder)
    figures["worker MB after restarts"] = resident(worker)
    figures["unacknowledged after restarts"] = unacknowledged(broker)
    early = len(done(folder))
    figures["seconds left until due"] = round((due - datetime.now(UTC)).total_seconds(), 1)
    if figures["seconds left until due"] <= 0:
        stop(worker)
        sys.exit(f"the tasks were due before the restarts were over: give --wait more than {wait} seconds")
    figures["tasks run before due"] = early
    deadline = time.monotonic() + wait + 1800
    while len(done(folder)) < tasks and time.monotonic() < deadline:
        time.sleep(1)  # the tasks report only to files
    figures["seconds until all ran, after due"] = round((datetime.now(UTC) - due).total_seconds(), 1)
    counted = done(folder)
    figures["tasks run"] = len(counted)
    figures["tasks run more than once"] = sum(1 for times in counted.values() if times > 1)
    figures["worker MB at the end"] = resident(worker)
    stop(worker)
    return figures


class Figures(dict[str, Any]):
    """Figures that are also printed when they are known, because a run takes long."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        print(f"{name}: {value}", file=sys.stderr, flush=True)


def send(tasks: int, due: datetime) -> None:
    """Send from several threads, because Celery waits for each confirm."""
    import pending_tasks  # type: ignore[import-not-found] # written above

    def one(number: int) -> None:
        # The fraction is the same, and the minute is that of the due time.
        pending_tasks.note.apply_async((number,), eta=due + timedelta(milliseconds=10 * (number % 6000)))

    with ThreadPoolExecutor(32) as pool:
        for _ in pool.map(one, range(tasks)):
            pass


def start_worker(folder: Path) -> subprocess.Popen[bytes]:
    """A worker that is ready."""
    log = folder / f"worker-{time.monotonic_ns()}.log"
    options = ["--concurrency", "2", "--loglevel", "info", "--without-gossip", "--without-mingle"]
    with log.open("wb") as output:
        worker = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "pending_tasks", "worker", *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
        )
    while " ready." not in log.read_text():
        assert worker.poll() is None, log.read_text()
        time.sleep(0.2)  # the worker reports its start only in its log
    return worker


def stop(worker: subprocess.Popen[bytes]) -> None:
    """Kill a worker and its children, as a crash does."""
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def resident(worker: subprocess.Popen[bytes]) -> float:
    """The resident memory of the worker's main process, which holds tasks before they run."""
    for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise AssertionError("no VmRSS")


def unacknowledged(broker: LocalBroker) -> int:
    """Unacknowledged messages of the worker's queue: those that a consumer holds."""
    rows = broker.rabbitmqctl("--quiet", "list_queues", "--no-table-headers", "name", "messages_unacknowledged")
    return sum(int(row.split("\t")[1]) for row in rows.splitlines() if row.startswith("celery\t"))


def done(folder: Path) -> Counter[str]:
    """How often each task ran."""
    return Counter(line for file in (folder / "done").iterdir() for line in file.read_text().splitlines())


if __name__ == "__main__":
    sys.exit(main())
