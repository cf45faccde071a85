"""Errors of pipelines when Spark cannot start as requested."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bide.cli.app import run
from bide.errors import BideError
from bide.pipelines.session import spark_errors
from tests.polling import wait_until, wait_while_running
from tests.spark.spark_processes import LOCAL
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ANY_PLAN = ("pipeline", "plan", "--rate", "1/s", "--delay", "5m", "--for", "1m", "--engine", "spark")


def test_without_java_it_says_what_to_install(tmp_path: Path) -> None:
    elsewhere = {**os.environ, "JAVA_HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "bide", *ANY_PLAN],
        env=elsewhere,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "bide: Spark needs Java 17 or later, but found none: install it, or set JAVA_HOME to its folder; "
        "Spark is needed because --engine spark was given\n"
    )


def test_ctrl_c_while_spark_starts_leaves_no_process() -> None:
    """A JVM whose start is interrupted would otherwise stay."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bide", *ANY_PLAN],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    wait_while_running(
        process,
        lambda: any(program.startswith("java") for program in programs_of(process.pid)),
        "the JVM has started",
        step=0.01,
    )
    os.killpg(process.pid, signal.SIGINT)
    try:
        # To the end of what it says: a process that was left would hold on to the pipe.
        output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, output.strip()) == (130, "")


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_java_is_reported_in_one_line(tmp_path: Path) -> None:
    """In the middle of a job, as the kernel does it where memory runs out."""
    source = tmp_path / "rows.csv"
    source.write_text("order_id,due\n" + "o-1,2026-01-01\n" * 1_000_000)
    events = tmp_path / "events"
    events.mkdir()
    event_log = {"enabled": "true", "dir": events.as_uri(), "compress": "false", "rolling.enabled": "false"}
    settings = (one for name, value in event_log.items() for one in ("--spark-conf", f"spark.eventLog.{name}={value}"))
    process = subprocess.Popen(
        [sys.executable, "-m", "bide", "pipeline", "schedule", str(source), "--to", "orders", "--at-column", "due",
         "--dry-run", *LOCAL, *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(lambda: any(events.iterdir()), "Java writes its events")
        # Looked up before the job: it may take longer to find than the job takes.
        java = java_of(process.pid)
        wait_until(lambda: any(b"SparkListenerJobStart" in one.read_bytes() for one in events.iterdir()), "a job runs")
        os.kill(java, signal.SIGKILL)
        output = process.communicate(timeout=TIMEOUT)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, output[0]) == (1, "")
    assert output[1] == (
        "bide: Spark's Java process has ended: it was killed, or ran out of memory. Give it more memory, such as with "
        "spark.driver.memory=4g in --spark-conf\n"
    )


def java_of(group: int) -> int:
    """The process of a group that is Java."""
    listed = subprocess.run(
        ["ps", "-eo", "pgid=,pid=,comm="], capture_output=True, text=True, check=True, timeout=TIMEOUT
    )
    rows = (line.split(maxsplit=2) for line in listed.stdout.splitlines())
    (found,) = (int(pid) for number, pid, program in rows if int(number) == group and program == "java")
    return found


def programs_of(group: int) -> list[str]:
    """The names of the programs of a process group."""
    listed = subprocess.run(["ps", "-eo", "pgid=,comm="], capture_output=True, text=True, check=True, timeout=TIMEOUT)
    rows = (line.split(maxsplit=1) for line in listed.stdout.splitlines())
    return [program for number, program in rows if int(number) == group]


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("zone", ["Mars/Olympus", ""])
def test_an_unknown_time_zone_is_refused(zone: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ANY_PLAN, "--time-zone", zone]) == 2
    assert capsys.readouterr().err == (
        f"bide: Spark does not know the time zone {zone!r}: give one such as UTC, Europe/Berlin or +02:00\n"
    )


def test_an_error_in_a_batch_is_reported_briefly(spark: SparkSession, tmp_path: Path) -> None:
    """The function of a streaming query, and a task that it starts: what Spark wraps around it is many lines."""

    def broken(batch: DataFrame, number: int) -> None:
        raise ZeroDivisionError(f"in batch {number}\nand another line")

    def broken_task(batch: DataFrame, number: int) -> None:
        batch.rdd.map(lambda row: 1 // (row.value * 0)).collect()

    for function, reason in ((broken, "ZeroDivisionError: in batch 0"), (broken_task, "ZeroDivisionError: ")):
        rows = spark.readStream.format("rate").load()
        query = (
            rows.writeStream.foreachBatch(function)
            .option("checkpointLocation", str(tmp_path / function.__name__))
            .start()
        )
        with pytest.raises(BideError, match=re.escape(reason)) as caught, spark_errors():
            query.awaitTermination(int(TIMEOUT))
        assert "\n" not in str(caught.value)
        assert "STREAM_FAILED" in str(caught.value)
