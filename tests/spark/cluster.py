"""A standalone Spark cluster on loopback with a Python without bide; a Connect server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tests.polling import wait_until
from tests.spark import commands
from tests.spark.spark_processes import QUICK_JAVA
from tests.timeouts import TIMEOUT

WORKERS: Final = 2
BIN: Final = Path(sys.executable).parent

SETTINGS: Final = {
    # One task at a time on each of two executors; nothing begins before both are there.
    "spark.cores.max": "2",
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": f"{TIMEOUT:.0f}s",
    "spark.driver.extraJavaOptions": QUICK_JAVA,
    "spark.executor.extraJavaOptions": QUICK_JAVA,
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.ui.enabled": "false",
}
"""Of a session on the standalone cluster."""

_MASTER: Final = "org.apache.spark.deploy.master.Master"
_CONNECT: Final = "org.apache.spark.sql.connect.service.SparkConnectServer"
_WORKER: Final = "org.apache.spark.deploy.worker.Worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalSpark:
    """A Spark in other processes, for programs of the tests.

    Attributes:
        url: of a master, or of a Connect server.
        variables: of the environment of programs that use it.
    """

    url: str
    variables: Mapping[str, str]

    @property
    def environment(self) -> Mapping[str, str]:
        """That of programs that use it."""
        usual = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "SPARK_"))}
        return {**usual, **self.variables}

    def called(self, folder: Path, *command: str | Path) -> str:
        """What a program prints that uses it, from a folder that does not have bide in it."""
        done = subprocess.run(
            command, cwd=folder, env=self.environment, capture_output=True, text=True, check=False, timeout=900
        )
        assert done.returncode == 0, done.stderr[-4_000:]
        return done.stdout

    @contextmanager
    def commands(self, folder: Path, settings: Mapping[str, str]) -> Iterator[Callable[..., Any]]:
        """Commands of ``bide pipeline``, called with their words, all in one session: to start one takes its time."""
        errors = folder / "commands.err"
        program = (sys.executable, str(commands.__file__), self.url, json.dumps(settings))
        with (
            errors.open("w") as log_file,
            subprocess.Popen(
                program,
                cwd=folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
            ) as process,
        ):
            assert process.stdin is not None
            assert process.stdout is not None
            tell, answers = process.stdin, process.stdout

            def call(*words: str) -> Any:
                tell.write(json.dumps(words) + "\n")
                tell.flush()
                answer = answers.readline()
                assert answer, errors.read_text()[-4_000:]
                return json.loads(answer)

            try:
                yield call
                tell.close()
                assert process.wait(TIMEOUT) == 0
            finally:
                process.kill()


@contextmanager
def standalone(folder: Path) -> Iterator[ExternalSpark]:
    """A master and two workers, each a process of its own, on ports that are free."""
    with ExitStack() as stack:
        log = folder / "master.log"
        stack.enter_context(_running(_MASTER, folder, log))
        wait_until(lambda: "I have been elected leader" in log.read_text(), "the master leads")
        found = re.search(r"Starting Spark master at (spark://\S+)", log.read_text())
        assert found is not None
        for number in range(WORKERS):
            place = folder / f"worker-{number}"
            own = ("--cores", "2", "--memory", "1g", "--work-dir", str(place), found[1])
            stack.enter_context(_running(_WORKER, folder, folder / f"{place.name}.log", *own))
        wait_until(lambda: log.read_text().count("Registering worker") == WORKERS, "all workers are there")
        # Of the executors, and of what the driver starts.
        python = bare_python(folder / "python")
        yield ExternalSpark(url=found[1], variables={"PYSPARK_PYTHON": str(python), "SPARK_LOCAL_IP": "127.0.0.1"})


@contextmanager
def connect_server(folder: Path) -> Iterator[ExternalSpark]:
    """A Spark Connect server with two cores, whose Python is this one."""
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.driver.extraJavaOptions": QUICK_JAVA,
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
    }
    words = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    log = folder / "connect.log"
    with _script("spark-submit", folder, log, "--class", _CONNECT, "--master", "local[2]", *words, "spark-internal"):
        started = re.compile(r"Spark Connect server started at: (\S+:[1-9][0-9]*)")
        wait_until(lambda: started.search(log.read_text()) is not None, "the server answers")
        found = started.search(log.read_text())
        assert found is not None
        url = f"sc://{found[1]}"
        yield ExternalSpark(url=url, variables={"SPARK_REMOTE": url})


def _running(service: str, folder: Path, log: Path, *arguments: str) -> AbstractContextManager[None]:
    where = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    return _script("spark-class", folder, log, service, *where, *arguments)


@contextmanager
def _script(name: str, folder: Path, log: Path, *arguments: str) -> Iterator[None]:
    environment = {
        **os.environ,
        "SPARK_HOME": str(_package("pyspark")),
        "SPARK_DAEMON_MEMORY": "768m",
        "SPARK_DAEMON_JAVA_OPTS": f"{QUICK_JAVA} -Dspark.master.rest.enabled=false",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }
    command = [str(_package("pyspark") / "bin" / name), *arguments]
    with (
        log.open("w") as log_file,
        subprocess.Popen(command, env=environment, cwd=folder, stdout=log_file, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield
        finally:
            # The script becomes the JVM: there is no other process.
            process.terminate()


def bare_python(place: Path) -> Path:
    """A Python that has PySpark and PyArrow, and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (site,) = place.glob("lib/python3*/site-packages")
    for name in ("pyspark", "py4j", "pyarrow"):
        (site / name).symlink_to(_package(name))
    return place / "bin" / "python"


def _package(name: str) -> Path:
    found = find_spec(name)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent
