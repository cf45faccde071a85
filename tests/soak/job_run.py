"""One run of the job, until it is killed or has finished, and the gate beside it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final

from tests.soak import processes
from tests.soak.job import QUERIES, SCHEDULED, Task

REPOSITORY: Final = Path(__file__).parents[2]


class SoakError(Exception):
    """What must not happen, whatever is killed."""


class JobRun:
    """Starts a job, and keeps its state from its messages.

    Args:
        folder: of the round; what Spark says goes to ``job.log`` in it.
    """

    def __init__(self, task: Task, folder: Path) -> None:
        self.folder = folder
        self.active: set[str] = set()
        self.ended: list[tuple[str, str]] = []
        self._answers: list[dict[str, Any]] = []
        self._done: set[str] = set()
        self._events: SimpleQueue[dict[str, Any]] = SimpleQueue()
        environment = {
            **os.environ,
            processes.MARK: str(folder),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        with (folder / "job.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.job"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=REPOSITORY,
                start_new_session=True,
                text=True,
            )
        self._tell(task.to_json())
        Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # The last one may be cut off by a kill.
            if line.endswith("\n"):
                self._events.put(json.loads(line))

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise SoakError("the job ended by itself: see job.log") from None

    @property
    def working(self) -> bool:
        """Whether all queries run."""
        return self.active == set(QUERIES)

    @property
    def finished(self) -> bool:
        """Whether all queries are at the end of what there was to do."""
        return self._done == set(QUERIES)

    def look(self) -> None:
        """Process new messages of the job.

        Raises:
            SoakError: it ended by itself.
        """
        while True:
            try:
                event = self._events.get_nowait()
            except Empty:
                break
            match event["event"]:
                case "started":
                    self.active.add(event["query"])
                case "ended":
                    self.active.discard(event["query"])
                    self.ended.append((event["query"], event["text"]))
                case "done":
                    self.active.discard(event["query"])
                    self._done.add(event["query"])
                case _:
                    self._answers.append(event)
        if self.process.poll() is not None and not self.finished:
            raise SoakError(f"the job ended by itself, with status {self.process.returncode}: see job.log")

    def finish(self) -> None:
        """Have all queries end when they have done what there is."""
        self._tell("finish")

    def disturb(self, kind: str, query: str, wait: Callable[[Callable[[], bool], str], None]) -> bool:
        """Stop a query or cancel its job with Spark's API; return whether it was at work."""
        self._answers.clear()
        if kind == "stop":
            self.active.discard(query)
        self._tell(f"{kind} {query}")
        wait(lambda: bool(self._answers), f"an answer to {kind} {query}")
        return bool(self._answers[0]["active"])

    def kill_worker(self, ports: dict[int, tuple[str, ...]], chance: random.Random) -> tuple[str, ...]:
        """Kill a Python worker that is connected to the broker; return the queries that it may be of, none without one.

        Args:
            ports: the queries that use a port of the broker.
        """
        busy = processes.busy_workers(self._processes(), ports)
        if not busy:
            return ()
        victim = chance.choice(busy)
        return victim.queries if processes.kill([victim.pid]) else ()

    def kill_daemon(self, ports: dict[int, tuple[str, ...]], chance: random.Random) -> tuple[str, ...]:
        """Kill a daemon that forked such a worker, with or without its workers."""
        pids = self._processes()
        busy = processes.busy_workers(pids, ports)
        if not busy:
            return ()
        victim = chance.choice(busy)
        with_workers = chance.random() < 0.5
        forks = [one for one in pids if processes.parent(one) == victim.daemon] if with_workers else []
        return victim.queries if processes.kill([victim.daemon]) + processes.kill(forks) else ()

    def kill_jvm(self, chance: random.Random) -> bool:
        """Kill the JVM and the driver; with them all Python workers, or these find out by themselves."""
        pids = self._processes()
        jvms = processes.jvms(pids)
        if chance.random() < 0.5:
            pids = [*jvms, self.process.pid]
        hit = bool(processes.kill(jvms))
        processes.kill(pids)
        self.process.wait()
        return hit

    def _processes(self) -> list[int]:
        """The processes of this run."""
        return processes.of_session(processes.marked(self.folder), self.process.pid)

    def close(self) -> None:
        """End the job, if it has not ended: its JVM goes with it."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue  # a command that was never read


@contextmanager
def gate(url: str, folder: Path) -> Iterator[None]:
    """A gate that delivers the schedules of ``keyed``. It goes on while jobs are killed.

    Raises:
        SoakError: it ended by itself.
    """
    command = [sys.executable, "-m", "bide", "gate", "--allow", f"q:{SCHEDULED}", "--state", str(folder / "gate")]
    environment = {**os.environ, processes.MARK: str(folder), "BIDE_URL": url}
    with (
        (folder / "gate.log").open("ab") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment) as process,
    ):
        try:
            yield
            if process.poll() is not None:
                raise SoakError(f"the gate ended by itself, with status {process.returncode}: see gate.log")
        finally:
            process.kill()


def end(folder: Path, *, seconds: float = 120) -> None:
    """Kill the remaining processes of a job and gate, also of earlier runs, and wait for their end."""
    deadline = time.monotonic() + seconds
    while pids := processes.marked(folder):
        processes.kill(pids)
        if time.monotonic() > deadline:
            raise SoakError(f"processes {pids} do not end")
        # There is no event for the end of a process that is not a child.
        time.sleep(0.02)
