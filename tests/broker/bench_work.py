"""Work of the tests for the benchmark's runner; most of it needs no broker."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.suite.errors import BenchmarkError
from benchmarks.suite.task import Answer, Job
from bide.local_broker import LocalBroker
from bide.local_broker.processes import FOLDER_MARK


def answer(job: Job) -> Answer:
    """Measured at once."""
    sys.stdout.write("what a library prints\n")
    return Answer(values=job.options["values"])


def prefetch(job: Job) -> Answer:
    """The dead-letter prefetch of the broker's node."""
    environment = Path(f"/proc/{job.pid}/environ").read_bytes().split(b"\0")
    (folder,) = (one.partition(b"=")[2] for one in environment if one.startswith(f"{FOLDER_MARK}=".encode()))
    broker = LocalBroker(Path(os.fsdecode(folder)))
    answer = broker.rabbitmqctl("eval", "application:get_env(rabbit, dead_letter_worker_consumer_prefetch).")
    return Answer(values={"prefetch": int(answer.strip().removeprefix("{ok,").removesuffix("}"))})


def hang(job: Job) -> Answer:
    """Start another process, and never end."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # a child to kill
    Path(job.options["file"]).write_text(str(process.pid))
    time.sleep(600)  # longer than the limit of a case
    return Answer(values={})


def turn(job: Job) -> Answer:
    """The number of calls, counted in a file; the first calls fail."""
    file = Path(job.options["file"])
    turns = int(file.read_text()) + 1 if file.exists() else 1
    file.write_text(str(turns))
    if turns <= job.options["values"].get("fails", 0):
        raise BenchmarkError("a disturbance")
    return Answer(values={"rate": float(turns)})
