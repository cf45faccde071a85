"""``bide check`` on the command line: verdicts, exit codes and refusals."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bide.check.history import Row
from bide.local_broker import LocalBroker
from tests.acceptance.test_cli import COMMAND_LINE
from tests.check_histories import DELIVERED, FAULT, SECOND, SENT, write_history
from tests.timeouts import TIMEOUT
from tests.unit.test_broker_installation import make_home


def bide_check(*arguments: str | Path, state: Path, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run ``bide check``, with its working folders in *state*."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BIDE_")}
    environment = {**kept, "PYTHONWARNINGS": "error", "XDG_STATE_HOME": str(state), **variables}
    return COMMAND_LINE.run(["check", *map(str, arguments)], stdin=b"", environment=environment)


def test_a_kept_history_exits_with_0_and_a_line_for_each_promise(tmp_path: Path) -> None:
    done = bide_check("judge", write_history(tmp_path / "history", SENT, DELIVERED), state=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("kept")] == [
        ["kept", name]
        for name in (
            *("lost", "early", "late", "twice", "refused", "changed", "strange"),
            *("schedules", "neighbours"),
        )
    ]
    assert "queues" in done.stdout.decode()


def test_the_longest_waits_are_printed_for_each_kind_of_fault(tmp_path: Path) -> None:
    slow = replace(SENT, id="slow", sent_at=11 * SECOND, ended_at=14 * SECOND)
    rows: list[Row] = [slow, replace(DELIVERED, id="slow", received_at=SENT.due + 2 * SECOND), FAULT]
    done = bide_check("judge", write_history(tmp_path / "history", *rows), state=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("longest time"))
    assert [" ".join(line.split()) for line in lines[at : at + 3]] == [
        "longest time without confirm of a publish without delivery",
        "during kill 3.00 s 3.00 s 2.00 s",
        "at other times under 0.1 s under 0.1 s under 0.1 s",
    ]


def test_a_broken_promise_exits_with_1_and_names_the_message(tmp_path: Path) -> None:
    early = replace(DELIVERED, received_at=SENT.due - 2 * SECOND)
    folder = write_history(tmp_path / "history", SENT, early)
    done = bide_check("judge", folder, state=tmp_path)
    assert done.returncode == 1
    assert "BROKEN once" in done.stdout.decode()
    assert "m1 in q (run-0001), 1.999 s early" in done.stdout.decode()
    verdict = json.loads(bide_check("judge", folder, "--json", state=tmp_path).stdout)
    assert verdict["violations"] == 1
    assert [one["rule"] for one in verdict["findings"] if one["violations"]] == ["early"]


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--workload", "cascade"], 2, "'cascade' is not a workload: give one of queues, topic,"),
        (["--fault", "flood"], 2, "'flood' is not a fault: give one of kill, pause,"),
        (["--fault", "kill-process"], 2, "kill-process kills gates and relays, and no workload has one"),
        (["--duration", "soon"], 2, "--duration: "),
        (["--rate", "0"], 2, "rate=0 is too small"),
        (["--nodes", "1", "--partition-handling", "autoheal"], 2, "is for clusters, and --nodes is 1: give --nodes 2"),
        (["--cluster", "nowhere"], 1, "no cluster of bide is running in "),
        (["--cluster", "nowhere", "--fault", "clock-step"], 2, "clock faults need a cluster that is started for"),
        (["--url", "amqp://localhost/new", "--fault", "kill"], 2, "the fault kill is for clusters that bide started"),
        (["--url", "amqp://localhost/new", "--cluster", "nowhere"], 2, "--cluster and --url name two clusters"),
        (["--url", "amqp://localhost/new", "--home", "/"], 2, "are for new clusters: omit them, or omit --url"),
        (["--url", "localhost"], 2, "does not start with amqp:// or amqps://"),
        (["--management-url", "http://localhost"], 2, "--management-url belongs to --url"),
        (["--cluster", "nowhere", "--fault", "disk-full"], 2, "disk-full needs a cluster that is started for the run"),
        (["--nodes", "1", "--fault", "disk-full"], 2, "a full disk needs several nodes: give --nodes 3"),
        (["--nodes", "1", "--fault", "partition"], 2, "partitions need several nodes"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(arguments: list[str], code: int, expected: str, tmp_path: Path) -> None:
    done = bide_check("run", tmp_path / "history", *arguments, state=tmp_path)
    [line] = done.stderr.decode().splitlines()
    assert expected in line
    assert done.returncode == code
    assert not (tmp_path / "history").exists()
    assert not list((tmp_path / "bide" / "check").glob("*"))


def test_the_choice_of_partition_handling_is_refused_where_rabbitmq_has_none(tmp_path: Path) -> None:
    home = make_home(tmp_path / "rabbitmq_server-4.3.0", "4.3.0")
    arguments = ["--home", str(home), "--partition-handling", "autoheal"]
    done = bide_check("run", tmp_path / "history", *arguments, state=tmp_path)
    assert done.returncode == 2
    [line] = done.stderr.decode().splitlines()
    assert "RabbitMQ 4.3.0 has no choice of --partition-handling, which was removed in 4.3: omit it" in line
    assert not (tmp_path / "history").exists()


def test_the_workload_spark_needs_java(tmp_path: Path) -> None:
    done = bide_check("run", tmp_path / "history", "--workload", "spark", state=tmp_path, JAVA_HOME=str(tmp_path))
    assert done.returncode == 2
    [line] = done.stderr.decode().splitlines()
    assert "the workload spark: Spark needs Java 17 or later, but found none: install it, or set JAVA_HOME" in line
    assert not (tmp_path / "history").exists()


def test_a_run_on_another_cluster_creates_and_deletes_the_virtual_host_of_its_url(
    broker: LocalBroker, tmp_path: Path
) -> None:
    before = broker.management.call("GET", "vhosts")
    arguments: list[str | Path] = ["run", tmp_path / "history", "--url", broker.vhost_url("check-by-url")]
    arguments += ["--management-url", broker.management_url, "--workload", "queues", "--workload", "gate"]
    arguments += ["--duration", "2s", "--longest", "1s", "--rate", "30", "--max-lateness", f"{TIMEOUT}s", "--json"]
    done = bide_check(*arguments, state=tmp_path)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert {one["workload"] for one in verdict["workloads"] if one["delivered"]} == {"queues", "gate"}
    assert verdict["releases"] == [broker.release]
    assert b"RabbitMQ " in done.stderr
    assert b"1 node\n" in done.stderr
    assert [one["name"] for one in broker.management.call("GET", "vhosts")] == [one["name"] for one in before]
    assert not list((tmp_path / "bide" / "check").glob("*"))


def test_a_run_on_another_cluster_refuses_a_virtual_host_that_exists(broker: LocalBroker, tmp_path: Path) -> None:
    url = broker.add_vhost("check-of-others")
    try:
        done = bide_check(
            *("run", tmp_path / "history", "--url", url, "--management-url", broker.management_url), state=tmp_path
        )
        assert done.returncode == 2
        [line] = done.stderr.decode().splitlines()
        assert "the virtual host 'check-of-others' exists: give the URL with the name of a new one" in line
        assert not (tmp_path / "history").exists()
    finally:
        # The API answers 404 if the run has deleted it.
        broker.delete_vhost("check-of-others")


def test_a_history_is_not_overwritten(tmp_path: Path) -> None:
    folder = write_history(tmp_path / "history")
    done = bide_check("run", folder, state=tmp_path)
    assert done.returncode == 2
    assert b"has 1 run already: add another run with --continue, or give a new folder" in done.stderr
