"""Rounds of the pipeline's benchmark, and the processes and commands of its sides."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.pipeline.figures import BEFORE, LIMIT, NOW, Figures, Measured
from benchmarks.suite.errors import BenchmarkError
from benchmarks.suite.processor import processor_seconds
from bide.local_broker import LocalBroker

ROOT: Final = Path(__file__).parents[2]
SITE: Final = Path(__file__).with_name("site")
WARM_UP: Final = 0
"""The round that is not recorded; the others count from one."""
_SHARE_TO_WARM_UP: Final = 5
_ERROR: Final = re.compile(r"[\w.]+(Error|Exception): .")


class NotThereError(BenchmarkError):
    """A checkout cannot do what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A case on one side.

    Attributes:
        run: called with the number of rows.
        limits: the names of the limits of this case.
    """

    name: str
    side: str
    rows: int = 0
    run: Callable[[int], Measured]
    limits: tuple[str, ...] = ()


Rounds = Callable[[int], Iterable[Sequence[Step]]]
"""Number of a round -> groups of steps: the groups come in order, and the steps of a group in turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the pipeline.

    Attributes:
        warms_up: whether its processes stay, so that a smaller round warms them up.
    """

    name: str
    prepare: Callable[[Bench], AbstractContextManager[Rounds]]
    warms_up: bool = False


class Bench:
    """What all parts use.

    Args:
        folder: for all files.
        sides: the checkout of each side.
        scale: of the numbers of rows.
        tasks: of a read by several tasks.
    """

    def __init__(
        self, broker: LocalBroker, folder: Path, *, sides: dict[str, Path], scale: float, rounds: int, tasks: int
    ) -> None:
        self.broker = broker
        self.folder = folder
        self.sides = sides
        self.tasks = tasks
        self.figures = Figures()
        self._scale = scale
        self._rounds = rounds
        self._numbers = count()

    def rows(self, number: int) -> int:
        """This number of rows, as far as the scale lets it: whole hundreds, and one at least."""
        return max(round(number * self._scale / 100), 1) * 100

    def sizes(self, rows: int) -> tuple[int, int]:
        """The number of rows of a warm-up, and of a round."""
        return rows // _SHARE_TO_WARM_UP, rows

    def new_name(self, start: str) -> str:
        """A name that was not there before."""
        return f"{start}-{next(self._numbers)}"

    @contextmanager
    def vhost(self, name: str) -> Iterator[str]:
        """A virtual host of its own for the block; yields its URL. After an error it stays, for the broker ends too."""
        name = self.new_name(name)
        yield self.broker.add_vhost(name)
        self.broker.delete_vhost(name)

    def measure(self, part: Part) -> None:
        """Run all rounds of a part."""
        with part.prepare(self) as rounds:
            for number in range(WARM_UP if part.warms_up else 1, self._rounds + 1):
                for group in rounds(number):
                    for step in group if number % 2 else reversed(group):
                        self._measure(part.name, step, number)

    def _measure(self, part: str, step: Step, number: int) -> None:
        entry = self.figures.entry(part, step.name, step.side, rows=step.rows, limits=step.limits)
        if entry.missing:
            return
        rows = step.rows if number else self.sizes(step.rows)[0]
        pid = self.broker.pid
        assert pid is not None
        load, used = os.getloadavg()[0], processor_seconds(pid)
        try:
            found = step.run(rows)
        except NotThereError as error:
            if step.side != BEFORE or entry.runs:
                raise
            entry.missing = _reason(str(error))
            print(f"{part}, {step.name}, {step.side}: not there: {entry.missing}", file=sys.stderr, flush=True)
            return
        found = replace(found, load=load, broker_seconds=processor_seconds(pid) - used)
        if number:
            entry.runs.append(found)
        print(
            f"round {number}, {part}, {step.name}, {step.side}: {found.seconds:.2f} s, "
            f"{found.processor_seconds:.2f} s of processor time",
            file=sys.stderr,
            flush=True,
        )

    def command(self, side: str, *arguments: str, **variables: str) -> tuple[Measured, str]:
        """Run Python from start to exit with the bide of a side.

        Returns:
            what it took, and what it printed.
        """
        result = self.folder / self.new_name("metered")
        command = [sys.executable, "-m", "benchmarks.pipeline.metered", str(result), sys.executable, *arguments]
        process = subprocess.Popen(
            command,
            env=self._environment(side, **variables),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            printed, errors = process.communicate()
        except BaseException:
            # The JVM of a command outlives it for a moment.
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if process.returncode:
            raise BenchmarkError(f"{side}: {' '.join(arguments)}: {errors.strip() or printed.strip()}")
        return Measured(**json.loads(result.read_text(encoding="utf-8"))), printed

    def bide(self, side: str, *arguments: str, expect: str = "", **variables: str) -> Measured:
        """Run a command of bide from start to exit, whose output has to have a text."""
        found, printed = self.command(side, "-m", "bide", *arguments, **variables)
        if expect not in printed:
            raise BenchmarkError(f"{side}: bide {' '.join(arguments)} printed no {expect!r}: {printed.strip()}")
        return found

    def worker(self, side: str, module: str, *arguments: str) -> Worker:
        """Start a process of this package that answers jobs, with the bide of a side."""
        command = [sys.executable, "-m", f"benchmarks.pipeline.{module}", *arguments]
        return Worker(command, self._environment(side), self.folder, self.folder / f"{self.new_name(module)}.log")

    def _environment(self, side: str, **variables: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BIDE_")}
        source = self.sides[NOW if side == LIMIT else side] / "src"
        return {**kept, **variables, "PYTHONPATH": os.pathsep.join(map(str, (source, SITE, ROOT)))}


def _reason(error: str) -> str:
    """The innermost error of a stack trace of Spark and Python."""
    found = [line.strip() for line in error.splitlines() if _ERROR.match(line)]
    return (found or [error])[-1]


class Worker:
    """A process that answers jobs."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], cwd: Path, log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                bufsize=1,
            )

    def ask(self, job: str, **arguments: Any) -> Measured:
        """Let it do a job.

        Raises:
            NotThereError: it cannot.
            BenchmarkError: it has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"job": job, **arguments}), file=self._process.stdin)
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError(f"a process has ended: {self._log.read_text(encoding='utf-8')[-2000:]}")
        found = json.loads(line)
        if "error" in found:
            raise NotThereError(found["error"])
        return Measured(**found)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until it has ended. After an error, it does not finish its job."""
        if error is not None:
            self._process.kill()
        self._process.communicate()


@contextmanager
def temporary_bench(**arguments: Any) -> Iterator[Bench]:
    """A bench with a broker and a folder of its own.

    Args:
        arguments: those of :class:`Bench`, and ``chroot``.
    """
    with (
        tempfile.TemporaryDirectory(prefix="bide-bench-", ignore_cleanup_errors=True) as name,
        LocalBroker.start(ephemeral=True, chroot=arguments.pop("chroot", None)) as broker,
    ):
        yield Bench(broker, Path(name), **arguments)
