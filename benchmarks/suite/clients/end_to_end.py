"""Latency from sending a task to its start, for systems with workers of their own."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.suite.arrivals import FOLDER_VARIABLE, URL_VARIABLE, Arrivals
from benchmarks.suite.errors import BenchmarkError
from benchmarks.suite.pace import paced
from benchmarks.suite.percentiles import lateness
from benchmarks.suite.processor import Meter
from benchmarks.suite.task import Answer, Job, environment

RATE_OF_A_SENDER: Final = 250
_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 20.0
_GRACE: Final = 60.0
_GLANCE: Final = 0.05
"""Seconds between checks of a file that another process writes."""


def measure(job: Job, *, worker: Sequence[str], variables: Mapping[str, str], sender: str) -> Answer:
    """Start a worker, let senders send at the job's rate, and see when the tasks begin.

    Args:
        worker: arguments of ``python -m``; it writes down every task in :class:`Arrivals`, and says when it is ready.
        variables: more of its environment.
        sender: the function that sends, as ``module:function``; run in processes of their own, see :func:`send`.

    Raises:
        BenchmarkError: the worker does not start, or no task arrived.
    """
    rate = job.options["rate"]
    with TemporaryDirectory(prefix="bide-bench-") as name, _worker(job, Path(name), worker, variables) as arrivals:
        number = math.ceil(rate / RATE_OF_A_SENDER)
        meter = Meter(job.pid)
        sent, sent_per_second = _send(job, sender, number)
        _wait(lambda: arrivals.count >= sent, seconds=job.options["longest"] + _GRACE)
        if not arrivals.count:
            raise BenchmarkError(f"of {sent} tasks none began")
        broker_cpu = meter.broker_cpu(sent)
        milliseconds = arrivals.milliseconds()
    values = lateness(milliseconds, expected=sent, sent_per_second=sent_per_second, rate=rate)
    note = "" if values["sustained"] else "not sustained"
    return Answer(values={**values, "broker_cpu": broker_cpu}, note=note)


def send(job: Job, publish: Callable[[int, float], Any]) -> Answer:
    """Send at an even rate; the work of one sender.

    Args:
        publish: called with the delay in seconds and the due time.
    """
    longest, sent = job.options["longest"], 0
    start = time.perf_counter()
    for number in paced(job.options["rate"], job.options["seconds"]):
        if time.perf_counter() - start > 2 * job.options["seconds"]:
            break  # far behind: the rate is not sustained
        delay = 1 + number * _STRIDE % longest
        publish(delay, time.time() + delay)
        sent += 1
    return Answer(values={"messages": sent, "seconds": time.perf_counter() - start})


_STRIDE: Final = 7919
"""A prime: the delays come in no order, and each as often as the others."""


def _send(job: Job, sender: str, number: int) -> tuple[int, float]:
    """Send with several processes; return the number of messages and the rate per second."""
    options = {**job.options, "rate": job.options["rate"] / number}
    one = Job(work=sender, options=options, url=job.url, pid=job.pid).to_json()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.suite"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(number)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(one)
        process.stdin.close()
        process.stdin = None
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise BenchmarkError("a sender failed")
    values = [Answer.from_json(text).values for text in outputs]
    sent = round(sum(one["messages"] for one in values))
    return sent, sum(one["messages"] / one["seconds"] for one in values)


@contextmanager
def _worker(job: Job, folder: Path, arguments: Sequence[str], variables: Mapping[str, str]) -> Iterator[Arrivals]:
    arrivals = Arrivals(folder)
    log = folder / "worker.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=environment(**variables, **{FOLDER_VARIABLE: str(folder), URL_VARIABLE: job.url}),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        _wait(lambda: arrivals.is_ready or process.poll() is not None, seconds=_START_SECONDS)
        if not arrivals.is_ready:
            lines = log.read_text().strip().splitlines()
            raise BenchmarkError(f"the worker did not start: {lines[-1] if lines else 'it said nothing'}")
        yield arrivals
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(condition: Callable[[], bool], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(_GLANCE)
