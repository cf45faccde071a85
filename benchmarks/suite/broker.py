"""The measured broker, and the processes that measure it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Final, Self

from benchmarks.suite.errors import BenchmarkError
from benchmarks.suite.machine import busy_cores
from benchmarks.suite.measurement import DEFAULT_PREFETCH, Case
from benchmarks.suite.processor import processor_seconds
from benchmarks.suite.task import Answer, Job, environment
from bide.errors import LocalBrokerError
from bide.local_broker import LocalBroker

_PLUGINS: Final = ("rabbitmq_management",)
_IDLE: Final = 0.15
"""Part of one core: a broker that uses less has nothing to do any more."""

_GLANCE: Final = 0.25
_TIMEOUT: Final = 20.0


class Host:
    """Runs cases, each in a process of its own, and in a virtual host of its own on a private broker.

    Args:
        root: folder of another system whose RabbitMQ is used.
        broker: None where the cases start brokers themselves.
    """

    def __init__(self, root: Path | None, broker: LocalBroker | None) -> None:
        self._root = root
        self._broker = broker
        self._numbers = count(1)

    @classmethod
    @contextmanager
    def start(cls, root: Path | None, *, broker: bool, dead_letter_prefetch: int = DEFAULT_PREFETCH) -> Iterator[Self]:
        """A host with a fresh broker, or without one.

        Raises:
            LocalBrokerError: it does not start, or this is not Linux.
        """
        if sys.platform != "linux":
            raise LocalBrokerError("the benchmark reads from /proc what processes have used: it needs Linux")
        if not broker:
            yield cls(root, None)
            return
        with LocalBroker.start(
            ephemeral=True, chroot=root, plugins=_PLUGINS, dead_letter_prefetch=dead_letter_prefetch
        ) as started:
            yield cls(root, started)

    def releases(self) -> dict[str, str]:
        """The release of Erlang, asked from the broker."""
        if self._broker is None:
            return {}
        return {"Erlang": str(self._broker.management.call("GET", "overview")["erlang_version"])}

    def run(self, case: Case) -> tuple[Answer, float]:
        """Measure one case.

        Returns:
            What came of it, and how many cores the machine was using just before, for whatever.

        Raises:
            BenchmarkError: it failed, with the last line that it said, or took too long.
        """
        root = None if self._root is None else str(self._root)
        broker = self._broker
        if broker is None:
            busy = busy_cores()
            return _measured(case, Job(work=case.work, options=case.options, root=root)), busy
        name, pid = f"bench-{next(self._numbers)}", broker.pid
        if pid is None:
            raise BenchmarkError("the broker has ended")
        url = broker.add_vhost(name)
        try:
            _wait_until_idle(pid)
            busy = busy_cores()
            return _measured(case, Job(work=case.work, options=case.options, url=url, pid=pid, root=root)), busy
        finally:
            broker.delete_vhost(name)


def _wait_until_idle(pid: int) -> None:
    """Give a broker that still clears away what was before the time to do so. There is no event for that."""
    deadline = time.monotonic() + _TIMEOUT
    while time.monotonic() < deadline:
        before = processor_seconds(pid)
        time.sleep(_GLANCE)
        if processor_seconds(pid) - before < _IDLE * _GLANCE:
            return


def _measured(case: Case, job: Job) -> Answer:
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.suite"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        # With whatever it starts, so that all of it can be ended.
        process_group=0,
    ) as process:
        try:
            stdout, stderr = process.communicate(job.to_json(), timeout=case.timeout)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"it was not done after {case.timeout:g} s") from None
        finally:
            _end_group(process.pid)
    if process.returncode != 0 or not stdout:
        lines = stderr.strip().splitlines()
        raise BenchmarkError(lines[-1] if lines else f"it ended with status {process.returncode}")
    return Answer.from_json(stdout)


def _end_group(leader: int) -> None:
    """End whatever is left of the processes that one has started, and that one."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass
