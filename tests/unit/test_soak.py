"""The soak's checks and its account, however a run ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bide.pipelines.session import NO_WORKER
from tests.soak import processes
from tests.soak.account import Account, summary
from tests.soak.check import (
    InCopy,
    InFiles,
    InQueue,
    committed_files,
    compare_copy,
    compare_files,
    compare_queue,
    found,
    read_files,
)
from tests.soak.ending import OWN, is_allowed

STREAM = [(0, b"a"), (1, b"b"), (3, b"c")]
FOUND = found(
    compare_files(STREAM, STREAM),
    compare_queue([b"a"], [("1", b"a")]),
    compare_copy([b"a"], [b"a"]),
    compare_queue([b"a", b"b"], [("1", b"a"), ("2", b"b"), ("2", b"b")]),
    orphans=2,
)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param(STREAM, InFiles(read=3, missing=0, twice=0, wrong=0), id="all of them"),
        pytest.param(STREAM[1:], InFiles(read=3, missing=1, twice=0, wrong=0), id="one is missing"),
        pytest.param([*STREAM, STREAM[1]], InFiles(read=3, missing=0, twice=1, wrong=0), id="one is there twice"),
        pytest.param([*STREAM, (4, b"d")], InFiles(read=3, missing=0, twice=0, wrong=1), id="one too many"),
        pytest.param([*STREAM[:2], (3, b"b")], InFiles(read=3, missing=1, twice=0, wrong=1), id="another body"),
    ],
)
def test_files_are_compared_with_the_stream(rows: list[tuple[int, bytes]], expected: InFiles) -> None:
    assert compare_files(STREAM, rows) == expected
    assert expected.sound == (rows == STREAM)


@pytest.mark.parametrize(
    ("messages", "sound", "counts"),
    [
        pytest.param([("1", b"a"), ("2", b"b")], True, {}, id="all of them"),
        pytest.param([("1", b"a"), ("2", b"b"), ("1", b"a")], True, {"copies": 1}, id="again with the same id"),
        pytest.param([("1", b"a")], False, {"lost": 1}, id="one is lost"),
        pytest.param([("1", b"a"), ("2", b"b"), ("3", b"c")], False, {"foreign": 1}, id="one too many"),
        pytest.param([("1", b"a"), ("2", b"b"), ("3", b"a")], False, {"other_ids": 1}, id="again with another id"),
        pytest.param([("1", b"a"), ("1", b"b")], False, {"shared_ids": 1}, id="an id of two messages"),
        pytest.param([("1", b"a"), (None, b"b")], False, {"shared_ids": 1}, id="no id"),
    ],
)
def test_the_queue_is_compared_with_the_rows(
    messages: list[tuple[str | None, bytes]], sound: bool, counts: dict[str, int]
) -> None:
    nothing = {"lost": 0, "foreign": 0, "copies": 0, "other_ids": 0, "shared_ids": 0}
    expected = InQueue(written=2, **{**nothing, **counts})
    assert compare_queue([b"a", b"b"], messages) == expected
    assert expected.sound == sound


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        pytest.param([b"b", b"a"], InCopy(stored=2, absent=0, repeated=0, alien=0), id="all of them"),
        pytest.param([b"a"], InCopy(stored=1, absent=1, repeated=0, alien=0), id="one is missing"),
        pytest.param([b"a", b"b", b"a"], InCopy(stored=3, absent=0, repeated=1, alien=0), id="one is there twice"),
        pytest.param([b"a", b"b", b"c"], InCopy(stored=3, absent=0, repeated=0, alien=1), id="one too many"),
    ],
)
def test_the_copy_is_compared_with_the_rows(messages: list[bytes], expected: InCopy) -> None:
    found = compare_copy([b"a", b"b"], messages)
    assert found == expected
    assert found.sound == (len(messages) == 2)


def test_files_of_a_table_are_those_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "_spark_metadata"
    log.mkdir()
    for number in range(4):
        pq.write_table(pa.table({"offset": [number], "value": [b"%d" % number]}), tmp_path / f"p {number}.parquet")
    entries = [
        json.dumps({"path": (tmp_path / f"p {number}.parquet").as_uri(), "action": "add"}) for number in range(4)
    ]
    # The compact log replaces those up to its number; a file that is in none is of a batch that broke.
    (log / "0").write_text(f"v1\n{entries[0]}")
    (log / "1.compact").write_text(f"v1\n{entries[0]}\n{entries[1]}")
    (log / "2").write_text(f"v1\n{entries[2]}")
    (log / ".3.tmp").write_text("v1")
    paths = committed_files(tmp_path)
    assert paths == [tmp_path / f"p {number}.parquet" for number in range(3)]
    assert list(read_files(paths)) == [(0, b"0"), (1, b"1"), (2, b"2")]
    (log / "3").write_text(f"v1\n{entries[1]}")
    assert list(read_files(committed_files(tmp_path)))[3:] == [(1, b"1")], "what is in the log twice is read twice"


SPARK = "/venv/lib/python/site-packages/pyspark/sql/worker/plan_data_source_read.py"


def ended(*files: str, error: str = "KeyError: 'x'") -> str:
    """Spark's error for a query whose worker raised."""
    frames = "".join(f'  File "{file}", line 5, in f\n    g()\n' for file in files)
    return (
        "[STREAM_FAILED] Query terminated with exception: org.apache.spark.api.python.PythonException: Traceback (most "
        f"recent call last):\n{frames}{error}\n\n\tat org.apache.spark.api.python.BasePythonRunner.java:595)\n"
    )


@pytest.mark.parametrize(
    ("text", "blamed"),
    [
        pytest.param(ended(SPARK, f"{OWN}spark/source.py"), True, id="raised in bide"),
        pytest.param(ended(SPARK, f"{OWN}spark/rows.py", "/usr/lib/json/decoder.py"), True, id="raised for bide"),
        pytest.param(ended(SPARK, f"{OWN}spark/rows.py") + ended(SPARK), True, id="raised in bide, and then in Spark"),
        pytest.param(ended(SPARK, error="bide.errors.ProtocolError: x"), True, id="an error of bide"),
        pytest.param(ended(SPARK, f"{OWN}spark/sink.py", SPARK, error="EOFError"), False, id="a pipe that bide reads"),
        pytest.param(ended(SPARK, "/usr/lib/socket.py", error="BrokenPipeError"), False, id="a pipe of Spark"),
        pytest.param("Python worker exited unexpectedly (crashed)", False, id="a worker that is gone"),
        pytest.param("Job 7 cancelled as part of cancellation of all jobs", False, id="a job that was cancelled"),
    ],
)
def test_an_error_raised_by_bide_is_never_blamed_on_a_kill(text: str, blamed: bool) -> None:
    assert is_allowed(text, since_hit=1.0, since_kill=1.0) is not blamed
    assert not is_allowed(text, since_hit=61.0, since_kill=61.0), "without a hit, no end is allowed"


def test_a_worker_that_a_busy_machine_did_not_start_is_allowed() -> None:
    assert is_allowed(f"SparkException: {NO_WORKER}", since_hit=61.0, since_kill=61.0)


def test_a_lost_worker_is_allowed_after_a_kill_for_the_other_query() -> None:
    assert is_allowed("SparkException: Python worker exited unexpectedly (crashed)", since_hit=61.0, since_kill=1.0)
    assert not is_allowed("Job 7 cancelled", since_hit=61.0, since_kill=1.0)
    assert not is_allowed(ended(SPARK, f"{OWN}spark/source.py"), since_hit=61.0, since_kill=1.0)


def kill(account: Account, number: int, kind: str, **more: Any) -> None:
    account.add("kill", round=number, kind=kind, queries=(), **{"amid": True, **more})


def test_accounts_add_up_over_runs(tmp_path: Path) -> None:
    path = tmp_path / "account"
    for release in ("3.10.8", "4.3.6"):
        account = Account(path)
        account.add("run", seed=None)
        number = len(account.totals().ended) + 1
        kill(account, number, "jvm")
        kill(account, number, "stop", amid=False)
        assert account.kills_of(number) == account.totals().unchecked.total() == 2
        account.add("checked", round=number, release=release, found=FOUND)
    kill(Account(path), 3, "worker")
    totals = Account(path).totals()
    assert (totals.runs, totals.rounds, totals.ended, totals.all, totals.amid) == (2, 2, {1, 2}, 5, 2)
    assert totals.kills == dict.fromkeys(
        [("3.10.8", "jvm"), ("3.10.8", "stop"), ("4.3.6", "jvm"), ("4.3.6", "stop")], 1
    )
    assert [totals.of_kind(kind) for kind in ("jvm", "stop", "worker", "daemon")] == [2, 2, 1, 0]
    assert totals.found == {name: 2 * number for name, number in FOUND.items()}
    assert "kills: 4 in 2 rounds that were checked, 2 of them in the middle of a micro-batch" in summary(totals)
    assert "files to schedules: 4 rows\n  lost 0, wrong 0, " in summary(totals)
    assert "  scheduled twice 0, delivered again by a gate 2\n" in summary(totals)


def test_a_run_killed_while_writing_loses_only_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "account"
    kill(Account(path), 1, "jvm")
    kill(Account(path), 1, "stop")
    path.write_bytes(path.read_bytes()[:-7])
    account = Account(path)
    kill(account, 1, "worker")
    assert account.totals().unchecked == {"jvm": 1, "worker": 1}


def test_kills_of_a_round_that_failed_do_not_count(tmp_path: Path) -> None:
    account = Account(tmp_path / "account")
    kill(account, 1, "jvm")
    account.add("failure", round=1, what="read ended by itself")
    totals = account.totals()
    assert (totals.all, totals.ended, totals.failures) == (0, {1}, ["round 1: read ended by itself"])
    assert "round 1: read ended by itself" in summary(totals)


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_a_process_that_has_just_ended_is_ignored() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert not processes.is_daemon(process.pid)
    assert processes.parent(process.pid) is None
    assert processes.children(process.pid) == []
    assert processes.kill([process.pid]) == 0
