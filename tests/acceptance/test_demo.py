"""``bide demo`` as a subprocess, on a real broker and a real Spark."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import httpx2
import pyarrow.parquet
import pytest

from tests.acceptance.test_cli import Program
from tests.polling import wait_until, wait_while_running
from tests.readme import without_slow_api
from tests.spark.spark_processes import QUICK_JAVA
from tests.support import Vhost, stream_port
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Mapping


class Demo:
    """Runs ``bide demo`` on one virtual host."""

    def __init__(self, vhost: Vhost, into: Path) -> None:
        self.environment = {
            **Program(vhost).environment,
            # Warnings of Spark's own code are not ours to forbid.
            "PYTHONWARNINGS": "default",
            "PYSPARK_SUBMIT_ARGS": f"--driver-java-options '{QUICK_JAVA}' pyspark-shell",
        }
        self.into = into
        self.vhost = vhost

    def start(self, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        where = ("--into", str(self.into), "--stream-port", str(stream_port(self.vhost.broker)))
        return subprocess.Popen(
            [sys.executable, "-m", "bide", "demo", *where, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.environment, **(environment or {})},
        )

    def left(self) -> list[Any]:
        """What there is on the virtual host, beside what RabbitMQ makes itself."""
        call = self.vhost.broker.management.call
        found = [*call("GET", "queues", self.vhost.name), *call("GET", "exchanges", self.vhost.name)]
        return [one["name"] for one in found if one["name"] and not one["name"].startswith("amq.")]


@pytest.fixture
def demo(vhost: Vhost, tmp_path: Path) -> Demo:
    return Demo(vhost, tmp_path / "demo")


@pytest.mark.slow
@pytest.mark.long
def test_the_demo_loses_nothing_and_writes_its_report(demo: Demo) -> None:
    process = demo.start("--messages", "300", "--longest", "2s", "--json")
    stdout, progress = process.communicate(timeout=600)
    assert process.returncode == 0, progress
    figures = json.loads(stdout)
    assert (figures["published"], figures["lost"], figures["early"], figures["misrouted"]) == (300, 0, 0, 0)
    assert figures["delivered"] == figures["expected"] > 300
    assert 0 <= figures["lateness_ms"]["p50"] < 30_000

    shop, report = figures["shop"], figures["report"]
    assert (shop["orders"], shop["pending"], shop["wrong"]) == (15, 38, 0)
    assert shop["handled"] + shop["parked"] == 15
    assert shop["parked"] >= 1
    head = report["headline"]
    assert (head["scheduled"], head["delivered"], head["pending"]) == (300 + 15 + 38, 300 + 15, 38)
    assert (head["overdue"], head["lost"], head["early"], head["missing"]) == (0, 0, 0, [])
    assert (head["failures"], head["failure_groups"]) == (shop["failed"], 3)
    assert figures["no_report"] is None

    page = Path(report["page"])
    assert page == demo.into / "report.html"
    assert f">{head['scheduled']}<" in page.read_text(encoding="utf-8")
    assert ElementTree.parse(report["picture"]).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    messages = pyarrow.parquet.read_table(Path(report["tables"]) / "messages").to_pylist()
    ends = [one["outcome"] for one in messages if one["type"] == "Order"]
    assert (ends.count("processed"), ends.count("parked")) == (shop["handled"], shop["parked"])

    assert "draw the report" in progress
    assert demo.left() == []


def test_the_console_shows_the_messages_of_the_demo_until_ctrl_c(demo: Demo, request: pytest.FixtureRequest) -> None:
    process = demo.start("--messages", "50", "--longest", "500ms", "--no-report", "--console")
    request.addfinalizer(process.kill)  # it ends at a signal only
    assert process.stdout is not None
    address = next(line for line in process.stdout if line.startswith("console on ")).split()[-1]
    origin, _, token = address.partition("/#token=")
    with httpx2.Client(base_url=origin, timeout=TIMEOUT, trust_env=False) as page:
        assert "<title>" in page.get("/").text
        assert page.get("/api/levels").status_code == 401
        assert page.post("/session", json={"token": token}).status_code == 200

        def failed() -> int:
            # A broker without processor time may answer neither request.
            if not (queues := page.get("/api/queues").json().get("queues")):
                return 0
            found = page.get("/api/failures", params={"queue": queues[0]["name"]}).json()
            return int(found.get("total", 0))

        # The management API counts every few seconds.
        wait_until(
            lambda: page.get("/api/levels").json().get("total") == 7, "the console counts the messages that wait"
        )
        wait_until(lambda: failed() >= 1, "the console shows the failed messages")
        lateness = page.get("/api/lateness").json()
    assert lateness["why"] == ""
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=TIMEOUT)
    # On a busy machine, the console assumes the default delivery limit, and says so.
    assert (process.returncode, without_slow_api(stderr)) == (0, "")
    assert "clean up" in stdout
    assert "bide demo --console" not in stdout
    assert demo.left() == []


def test_a_demo_with_a_console_prints_no_json(demo: Demo) -> None:
    process = demo.start("--json", "--console")
    stdout, stderr = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, stdout) == (2, "")
    assert "--console prints an address" in stderr


def test_without_java_the_demo_ends_after_the_first_part(demo: Demo, tmp_path: Path) -> None:
    elsewhere = {"JAVA_HOME": str(tmp_path), "PATH": str(Path(sys.executable).parent)}
    process = demo.start("--messages", "50", "--longest", "500ms", environment=elsewhere)
    stdout, stderr = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, stderr) == (0, "")
    assert "  no report: Spark needs Java 17 or later, but found none" in stdout
    assert "  published   50 messages, each confirmed" in stdout
    assert "  all well: nothing lost, nothing early" in stdout
    assert stdout.endswith("\n  bide demo --console keeps the messages, and shows them on a web page\n")
    assert "endpoint" not in stdout
    assert not demo.into.exists()
    assert demo.left() == []


def test_a_failed_report_does_not_hide_the_figures(demo: Demo) -> None:
    process = demo.start(
        *("--messages", "50", "--longest", "500ms"),
        environment={"PYSPARK_SUBMIT_ARGS": "--master nowhere pyspark-shell"},
    )
    stdout, stderr = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1, stderr
    assert "  no report: Spark: [JAVA_GATEWAY_EXITED]" in stdout
    assert "  all well: nothing lost, nothing early" in stdout
    assert not (demo.into / "report.html").exists()
    assert demo.left() == []


@pytest.mark.long
@pytest.mark.slow
def test_a_demo_interrupted_during_the_audit_leaves_nothing_on_the_broker(demo: Demo) -> None:
    process = demo.start("--messages", "50", "--longest", "500ms")
    wait_while_running(process, (demo.into / "tables" / "_state").exists, "the audit has begun")
    os.kill(process.pid, signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert "Traceback" not in stderr
    assert "queues and" in stdout
    assert demo.left() == []
