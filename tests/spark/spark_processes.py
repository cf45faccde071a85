"""Local Spark programs and their processes, for tests that kill them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import bide
from tests.broker.receiving import connection_of, ready
from tests.polling import wait_until
from tests.soak import processes
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CLASS_ARCHIVE: Final = Path(sys.prefix, "spark-classes.jsa")
"""The archive that ``python -m tests.spark.class_archive`` writes."""

QUICK_JAVA: Final = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
    # Java does not even share its own classes if the archive is missing.
    + (f" -XX:SharedArchiveFile={CLASS_ARCHIVE}" if CLASS_ARCHIVE.exists() else "")
)
"""Options for a Java that ends before thorough compilation pays.

Spark's classes are not verified when they are loaded, which saves a fifth of the processor time of a session with its
first queries.

Java keeps 48 MB for the code of this compiler alone, which the tests of one session fill; then it compiles nothing
any more, and everything takes several times as long. The size is that of a Java with both compilers.
"""

LOCAL: Final = ("--master", "local[2]", "--spark-conf", f"spark.driver.extraJavaOptions={QUICK_JAVA}")
"""Where a pipeline of the command line has a Spark of its own."""


def set_environment() -> None:
    """Set what decides which Python the workers run, and where Spark listens. Spark reads it when it starts."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"


def session_builder(folder: Path, *, java: str = QUICK_JAVA) -> SparkSession.Builder:
    """The settings of every session in a process of the tests: two cores, on loopback.

    Args:
        folder: for files of Spark.
        java: the options of Java.
    """
    from pyspark.sql import SparkSession

    return (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", java)
        # A Python without processor time has to connect to Java within this, to fetch rows; by default within 15 s.
        .config("spark.python.authenticate.socketTimeout", f"{TIMEOUT:.0f}s")
        .config("spark.ui.enabled", "false")
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.sql.shuffle.partitions", "2")
    )


def kill_python_workers(spark: SparkSession) -> int:
    """``kill -9`` every Python worker of a session, and return their number."""
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    daemons = filter(processes.is_daemon, processes.children(gateway.proc.pid))
    return processes.kill(pid for daemon in daemons for pid in processes.children(daemon))


class Program:
    """A process and its children, which tests kill while it works."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Poll until a condition holds, before the program ends."""
        wait_until(lambda: is_so() or self._process.poll() is not None, what)
        assert self._process.poll() is None, "it ended before it could be killed"

    def pause(self) -> None:
        """SIGSTOP to the program alone."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT to the program alone."""
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> int:
        """SIGTERM to the program alone, which may be paused, and its exit code."""
        self._process.terminate()
        self.resume()
        return self._process.wait(TIMEOUT)

    def kill(self) -> None:
        """``kill -9`` of all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def started(
    command: Sequence[str | Path], *, stdout: int | IO[bytes] = subprocess.DEVNULL, stderr: int | None = None
) -> Iterator[Program]:
    """A program, of which nothing is left at the end of the block, whatever happens in it."""
    with subprocess.Popen(command, start_new_session=True, stdout=stdout, stderr=stderr) as process:
        program = Program(process)
        try:
            yield program
        finally:
            program.kill()


class Counter:
    """Counts the messages of a queue, over one connection."""

    def __init__(self, url: str, queue: str) -> None:
        self._client = bide.connect_sync(url)
        self._queue = queue

    def __call__(self) -> int:
        return self._client.wait_for(self._count())

    async def _count(self) -> int:
        return await ready(await connection_of(self._client.client), self._queue)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
