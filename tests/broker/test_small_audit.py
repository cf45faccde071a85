"""Audits in this process: their tables, kills at changes of the folder, and two at once."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bide.cli import app as cli
from bide.errors import FolderInUseError
from bide.pipelines.audit import merging, run
from bide.pipelines.audit.folder import Folder
from bide.pipelines.audit.size import check_small
from bide.pipelines.audit.table_format import TABLE_FORMATS, TableFormat
from bide.pipelines.engine import NeedsSparkError
from tests.audited_streams import EVENTS, AuditedStreams, tables_in
from tests.support import Vhost

WITHOUT_SPARK = """
import sys
sys.modules["pyspark"] = None
from bide.cli.app import run
sys.exit(run(sys.argv[1:]))
"""

KILLED = """
import json, os, signal, sys
from pyarrow import fs
from bide.pipelines.audit.folder import Folder
from bide.pipelines.audit.run import Sources, run
from tests.killed_files import KillingFiles

sources, place, table_format, left = json.loads(sys.argv[1])
folder = Folder(place, table_format=table_format)
files = KillingFiles(folder.files, left)
files.watch_transactions()
folder.files = fs.PyFileSystem(files)
run(None, Sources(**sources), folder)
print(left - files.left)
"""


@pytest.fixture
def streams(vhost: Vhost) -> AuditedStreams:
    found = AuditedStreams(vhost)
    found.declare()
    return found


def command(streams: AuditedStreams, place: Path, *options: str) -> list[str]:
    where = ("--url", streams.vhost.url, "--stream-port", str(streams.port), "--events", EVENTS)
    return ["pipeline", "audit", "--into", str(place), *where, *options]


def killed(
    streams: AuditedStreams, place: Path, *, left: int, table_format: TableFormat = "parquet"
) -> subprocess.CompletedProcess[str]:
    """Run a round that kills its process instead of changing a file for the last time."""
    found = streams.sources(batch_rows=20)
    sources = {name: getattr(found, name) for name in ("url", "scheduled", "delivered", "events", "schedules", "port")}
    given = json.dumps([sources | {"batch_rows": 20}, str(place), table_format, left])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", KILLED, given], env=environment, capture_output=True, text=True, check=False
    )


def test_an_audit_needs_no_spark(streams: AuditedStreams, tmp_path: Path) -> None:
    streams.fill(0)
    program = [sys.executable, "-c", WITHOUT_SPARK, *command(streams, tmp_path / "audit", "--once", "--json")]
    first, second = (json.loads(subprocess.run(program, capture_output=True, check=True).stdout) for _ in range(2))
    assert (first["engine"], second["engine"]) == ("local", "local")
    assert first["engine_reason"].startswith("the new messages have ")
    found = tables_in(tmp_path / "audit")
    kinds = ("scheduled", "delivered", "processed", "failed")
    assert first["rows"] == {name: len(found.get(name, ())) for name in kinds}
    assert first["undecodable"] == len(found["undecodable"]) == 6
    assert first["ended"] == {"superseded": 1, "cancelled": 1}
    assert first["schedules"]["waiting"] == 2
    assert (sum(second["rows"].values()), second["days"], second["undecodable"]) == (0, 0, 0)
    assert second["pending"] == first["pending"] > 0
    assert tables_in(tmp_path / "audit") == found


def test_several_rounds_have_the_tables_of_one(
    streams: AuditedStreams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with small batches, which are merged."""
    monkeypatch.setattr(merging, "MAX_BATCHES", 2)
    for part in range(3):
        streams.fill(part)
        run.run(None, streams.sources(batch_rows=25), Folder(str(tmp_path / "rounds")))
    folder = Folder(str(tmp_path / "whole"))
    run.run(None, streams.sources(), folder)
    assert tables_in(tmp_path / "rounds") == tables_in(tmp_path / "whole")
    days = list((tmp_path / "rounds" / "scheduled").glob("day=*"))
    assert days
    assert all(len(list(day.glob("batch=*"))) <= 2 for day in days)


@pytest.mark.parametrize(
    ("table_format", "kills"),
    # The import of pyiceberg takes a second in each process.
    [("parquet", 3), ("delta", 3), *(pytest.param(one, 40, marks=pytest.mark.long) for one in TABLE_FORMATS)],
)
def test_a_killed_round_is_continued(
    streams: AuditedStreams, tmp_path: Path, kills: int, table_format: TableFormat
) -> None:
    """``kill -9`` before a change of the folder, in a round that continues one that was killed too."""
    streams.fill(0)
    assert killed(streams, tmp_path / "audit", left=1_000_000, table_format=table_format).returncode == 0
    streams.fill(1)
    whole = killed(streams, tmp_path / "whole", left=1_000_000)
    changes = int(whole.stdout)
    assert changes > 50
    expected = tables_in(tmp_path / "whole")
    chance = random.Random(kills)
    for left in sorted(chance.sample(range(changes), kills)):
        again = killed(streams, tmp_path / "audit", left=left, table_format=table_format)
        assert again.returncode in (-signal.SIGKILL, 0), again.stderr
    assert killed(streams, tmp_path / "audit", left=1_000_000, table_format=table_format).returncode == 0
    assert tables_in(tmp_path / "audit") == expected
    folder = Folder(str(tmp_path / "audit"))
    assert (folder.notes(), bool(folder.unfinished_work())) == ([], False)


def test_two_audits_of_a_folder_at_once_are_refused(
    streams: AuditedStreams, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    streams.fill(0)
    sources, folder = streams.sources(), Folder(str(tmp_path / "audit"))
    folder.begin()
    with folder.lock():
        with pytest.raises(FolderInUseError):
            run.run(None, sources, Folder(folder.place))
        assert cli.run(command(streams, tmp_path / "audit", "--once")) == 1
        assert f"audit is in use by the process {os.getpid()} on " in capsys.readouterr().err
        assert run.run(None, sources, folder).rows["scheduled"] > 0


def test_large_audits_and_uris_are_left_to_spark(streams: AuditedStreams, tmp_path: Path) -> None:
    streams.fill(0)
    sources, place = streams.sources(), tmp_path / "audit"
    folder = Folder(str(place))
    with pytest.raises(NeedsSparkError, match=r"^the new messages have .* kB, more than 1\.0 kB$"):
        check_small(sources, folder, largest=1_000)
    run.run(None, sources, folder, largest=0)
    assert check_small(sources, folder, largest=1_000) == "the new messages have 0 B"
    before = tables_in(place)
    streams.fill(1)
    with pytest.raises(NeedsSparkError, match=r"^the files with earlier facts have .* kB, more than 1\.0 kB$"):
        run.run(None, sources, folder, largest=1_000)
    after = tables_in(place)
    assert after["messages"] == before["messages"]
    assert after["scheduled"] != before["scheduled"]
    run.run(None, sources, folder, largest=10_000_000)
    run.run(None, sources, Folder(str(tmp_path / "whole")))
    assert tables_in(place) == tables_in(tmp_path / "whole")
    names = [
        {one.name for one in (tmp_path / name).rglob("*.parquet") if one.parent.name.startswith(("day=", "batch="))}
        for name in ("audit", "whole")
    ]
    assert names[0].isdisjoint(names[1]), "the index needs names that are never used again"
    with pytest.raises(NeedsSparkError, match=r"is a URI$"):
        check_small(sources, Folder(f"file://{place}"), largest=None)


def test_the_report_of_a_delta_audit_counts_its_messages(
    streams: AuditedStreams, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    streams.fill(0)
    assert cli.run(command(streams, tmp_path / "audit", "--once", "--format", "delta", "--json")) == 0
    audited = json.loads(capsys.readouterr().out)
    assert (tmp_path / "audit" / "messages" / "_delta_log").is_dir()
    page = tmp_path / "report.html"
    assert cli.run(["pipeline", "report", str(tmp_path / "audit"), "--out", str(page), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engine"] == audited["engine"] == "local"
    waiting = audited["schedules"]["waiting"]
    assert (found["pending"], found["overdue"]) == (audited["pending"] + waiting, audited["overdue"])
    assert found["undecodable"] == audited["undecodable"] == 6
    assert "DeltaTable(" in page.read_text(encoding="utf-8")


def test_the_command_prints_the_time_since_its_start_and_the_engine(
    streams: AuditedStreams, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    streams.fill(0)
    program = command(streams, tmp_path / "audit", "--once", "--engine", "local")
    assert cli.run(program, started=time.monotonic() - 7_000) == 0
    counts, *_, tables, engine = capsys.readouterr().out.splitlines()
    assert re.search(
        r"^43 scheduled, [^;]* 6 undecodable; 3 days computed; .* pending .*; audited in 7\d{3}\.\d s$", counts
    )
    assert tables == f"tables: {tmp_path / 'audit'}"
    assert engine == "engine: this process, because --engine local was given"
    assert cli.run([*program, "--json"], started=time.monotonic() - 7_000) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["command_seconds"] > 7_000 > found["seconds"]
    assert cli.run([*program, "--master", "local[1]"]) == 2
    assert "--engine local does not start Spark" in capsys.readouterr().err
