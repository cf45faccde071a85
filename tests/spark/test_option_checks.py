"""Invalid options, reported before Spark starts or reads a large table."""

from __future__ import annotations

from pathlib import Path

import pytest

import bide
from bide.cli.app import run
from bide.errors import TargetNotFoundError
from bide.pipelines.ledger import Ledger, LedgerHead
from bide.pipelines.schedule.plan import SchedulePlan
from bide.spark.sink_settings import SinkSettings
from tests.broker.conftest import SMALL_CLOCK, clock_url
from tests.broker.receiving import fresh

__all__ = ["clock_url"]

# Reported as soon as Spark has started.
NO_ZONE = ("--time-zone", "Mars/Olympus")
NO_BROKER = ("--url", "amqp://127.0.0.1:1")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "reminders.csv"
    path.write_text("order_id,due\no-1,2026-01-01\n")
    return path


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--to", "orders", "--dry-run"), "Spark does not know the time zone"),
        (("--to", "orders", "--dry-run", "--header-columns", "order_id,order_id"), "names a column twice"),
        (("--to", "orders", "--dry-run", "--header-columns", "bide-due"), "'bide-due' starts with 'bide-'"),
        (("--to", "orders", "--dry-run", "--body-columns", " , "), "--body-columns ' , ' does not name a column"),
        (("--to", "orders", "--dry-run", "--read-option", "sep"), "--read-option 'sep' is not of the form"),
        (("--to", "orders", "--ledger", "reminders.csv"), "--ledger reminders.csv cannot be used: "),
        (
            ("--to", "orders", "--ledger", "new", "--rejects", "reminders.csv/x"),
            "csv is not a writable folder",
        ),
        (("--to", "orders", "--ledger", "begun"), "begun was begun with other settings of target, columns, name or"),
        (("--to", "orders", "--ledger", "odd"), "ledger.json in "),
    ],
)
def test_errors_of_a_schedule_are_found_before_spark_starts(
    table: Path,
    arguments: tuple[str, ...],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(table.parent)
    Ledger("begun").begin(LedgerHead(plan="another", broker="another", rows=1, checksum=0, parts=1))
    Path("odd").mkdir()
    Path("odd", "ledger.json").write_text("{")
    assert run(["pipeline", "schedule", str(table), "--at-column", "due", *NO_BROKER, *NO_ZONE, *arguments]) == 2
    stderr = capsys.readouterr().err
    assert expected in stderr
    assert stderr.count("\n") == 1
    assert not Path("new").exists()


@pytest.mark.usefixtures("spark")
def test_errors_of_a_replay_are_found_before_spark_starts(clock_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = fresh("error")
    with bide.connect_sync(clock_url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum(error)]))
    for arguments, code, expected in (
        (("--to", "nowhere"), 1, "bide: there is no queue 'nowhere' to send messages to: name another with --to\n"),
        (("--queue", "nowhere"), 1, "bide: there is no queue 'nowhere': name another with --queue\n"),
        (("--management-url", "localhost:15672"), 2, "bide: the management URL does not start with http:// or"),
        # Which shows what would be missing.
        (("--to", "nowhere", "--dry-run"), 2, "bide: Spark does not know the time zone"),
    ):
        given = ("--url", clock_url, "--queue", error, *NO_ZONE, *arguments)
        assert run(["pipeline", "replay", *given]) == code
        stderr = capsys.readouterr().err
        assert stderr.startswith(expected)
        assert stderr.count("\n") == 1


async def test_a_schedule_can_be_checked_inside_an_event_loop(clock_url: str) -> None:
    """There a loop runs already where it is checked."""
    settings = SinkSettings.make(clock_url, infrastructure=SMALL_CLOCK, constants={"to": "nowhere"})
    with pytest.raises(TargetNotFoundError, match="the queue 'nowhere' does not exist"):
        SchedulePlan(at_column="due", settings=settings).check()


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(("folder", "expected"), [("none", "has no audit"), ("x" * 300, "cannot be read: ")])
def test_errors_of_a_replay_of_an_audit_are_found_before_spark_starts(
    folder: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["pipeline", "replay", "--audit", folder, *NO_BROKER, *NO_ZONE]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"bide: the folder {tmp_path / folder} {expected}")
    assert stderr.count("\n") == 1
