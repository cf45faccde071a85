"""The Python examples of the pipeline pages, run against a broker."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pytest
from pyarrow import parquet

import bide
from tests.audited_shop import AuditedShop, fill
from tests.broker.conftest import SMALL_CLOCK
from tests.polling import wait_until
from tests.readme import Shell, blocks, commands_of, shape
from tests.spark.receiving import drain, rest
from tests.spark.test_replay import parked, put
from tests.spark.test_schedule import reminders
from tests.support import Rabbitmq, Vhost, stream_port
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DOCS = Path(__file__).parents[2] / "docs"


class Page:
    """Runs the examples of a page where the broker and the folders of a test are."""

    def __init__(self, spark: SparkSession, vhost: Vhost, place: Path) -> None:
        self.spark, self.url, self.place = spark, vhost.url, place
        self._read = f'.options(url="{vhost.url}", streamPort="{stream_port(vhost.broker)}").option("stream"'

    def run(self, name: str, number: int, **known: Any) -> dict[str, Any]:
        """Run an example below "As functions", and return its variables.

        Args:
            number: of the example, from 0 on.
            known: what the page takes for granted beside a session.
        """
        _, heading, rest_of_page = (DOCS / name).read_text(encoding="utf-8").partition("\n## As functions\n")
        assert heading
        example = re.findall(r"```python\n(.*?)```", rest_of_page, re.DOTALL)[number]
        here = (
            example.replace("amqp://localhost", self.url)
            .replace("/data/", f"{self.place}/")
            .replace('.option("stream"', self._read)
            # The whole clock has ten times as many queues.
            .replace("bide.Clock()", "SMALL_CLOCK")
        )
        found = {"spark": self.spark, "SMALL_CLOCK": SMALL_CLOCK, **known}
        exec(compile(here, name, "exec"), found)
        return found


@pytest.fixture
def page(spark: SparkSession, vhost: Vhost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    monkeypatch.chdir(tmp_path)
    yield Page(spark, vhost, tmp_path)
    # A session is the tests' own: tables that were kept are no longer needed.
    spark.catalog.clearCache()


def test_the_schedule_example_sends_its_rows(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    with bide.connect_sync(page.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
    due = datetime.now(UTC) + timedelta(seconds=2)
    rows = reminders(page.spark, 3, due=f"timestamp'{due.isoformat()}'").selectExpr("*", "'ana@shop' as email")
    found = page.run("pipeline-schedule.md", 0, rows=rows)
    assert found["table"].columns == ["value", "deliver_at", "message_id"]
    assert found["found"].rows == 3
    shown = capsys.readouterr().out
    assert re.search(r"\| +due\|count\|\n.*\n\|.*\| +3\|", shown), shown
    assert re.search(r"\|part\|sent\|rejected\|dropped\|\n.*\n\| +0\| +3\| +0\| +0\|", shown), shown
    assert sorted(tuple(json.loads(one.body).items()) for one in drain(page.url, "orders", 3)) == [
        (("order_id", f"o-{number}"), ("email", "ana@shop")) for number in range(3)
    ]
    assert len(list((page.place / "ledgers" / "november").glob("part-*.json"))) == 1


def test_the_table_to_try_is_scheduled_and_audited_without_spark(
    rabbitmq: Rabbitmq, vhost: Vhost, tmp_path: Path
) -> None:
    (_, install), (_, table), (_, session) = blocks("docs/pipeline-schedule.md", "Try it")
    pip, *declaring = install.splitlines()
    scheduling, (receive, received), *auditing = commands_of(session)
    assert pip == "pip install 'bide[pipeline]'"
    wait = "timedelta(seconds=30)"
    assert wait in table
    shell = Shell(tmp_path, rabbitmq, vhost)
    shell.environment["BIDE_STREAM_PORT"] = str(stream_port(vhost.broker))
    for command in declaring:
        shell.paste(command)
    # On a busy machine, the first message may be due before it is sent. It passes no tap then, so start over.
    attempt, printed = 0, ""
    for attempt, seconds in enumerate((15, 60, 200)):
        begun = time.monotonic()
        shell.paste(table.replace(wait, f"timedelta(seconds={seconds})"))
        shell.environment["XDG_STATE_HOME"] = str(tmp_path / f"state-{attempt}")
        printed = shell.paste(scheduling[0]).replace(f"/{vhost.name}", "/")
        # Due times in the table are cut to whole seconds.
        if time.monotonic() - begun < seconds - 1:
            break
    assert shape(printed) == shape(scheduling[1])
    lines = shell.paste(receive.replace("--count 1", f"--count {attempt + 1}")).splitlines(keepends=True)
    assert len(lines) == attempt + 1
    assert shape(lines[-1]) == shape(received)
    shell.check(auditing)
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.slow
@pytest.mark.long
def test_the_commands_for_other_tables_print_what_the_page_shows(
    rabbitmq: Rabbitmq, vhost: Vhost, tmp_path: Path
) -> None:
    shell = Shell(tmp_path, rabbitmq, vhost)

    def check(title: str, fails: str = "") -> None:
        ((_, text),) = (one for one in blocks("docs/pipeline-schedule.md", title) if one[0] == "console")
        for command, shown in commands_of(text):
            printed = shell.paste(command + fails).replace(f"/{vhost.name}", "/")
            # A terminal folds long lines.
            assert not shown or shape(" ".join(printed.split())) == shape(" ".join(shown.split())), printed

    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum(name) for name in ("mails", "reminders", "Sales")]))
    seconds_as_milliseconds = datetime(1970, 1, 21, 18, 43, 17, tzinfo=UTC)
    rows: dict[str, Any] = {
        "due": [seconds_as_milliseconds + timedelta(milliseconds=60 * number) for number in range(500)]
    }
    parquet.write_table(pyarrow.table(rows), tmp_path / "reminders.parquet")
    check("Due times in the past", " || test $? = 2")

    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    timeout = {"Id": "1", "Destination": "Sales", "Time": soon, "State": "e30=", "Headers": "{}"}
    (tmp_path / "timeouts.json").write_text(json.dumps(timeout), encoding="utf-8")
    check("Rows with their own queues")

    rows = {"invoice": [f"invoice:{number}" for number in range(50)], "due": [datetime(2040, 1, 2, tzinfo=UTC)] * 50}
    parquet.write_table(pyarrow.table(rows), tmp_path / "invoices.parquet")
    with subprocess.Popen(
        [sys.executable, "-m", "bide", "gate", "--state", "gate", "--allow", "*"],
        cwd=tmp_path, env=shell.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as gate:  # fmt: skip
        try:
            with bide.connect_sync(vhost.url, timeout=timedelta(seconds=TIMEOUT)) as client:
                wait_until(lambda: client.exists("bide.v1.schedule.undeliverable"), "the gate has declared its log")
                assert client.count_scheduled() == 0
            check("Messages that can be cancelled")
        finally:
            gate.kill()


def test_the_replay_example_of_a_queue_sends_the_chosen_messages(
    page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    put(page.url, "error", 1, "orders", error=TimeoutError("too slow"), prefix="late")
    put(page.url, "error", 1, "orders")
    found = page.run("pipeline-replay.md", 0)
    shown = capsys.readouterr().out
    assert re.search(r"\| *queue\|messages\| *first\| *last\|\n.*\n\|orders\| +1\|", shown), shown
    assert re.search(r"\|outcome\| *queue\|reason\|messages\|\n.*\n\| +sent\|orders\| +NULL\| +1\|", shown), shown
    assert [one.message_id for one in drain(page.url, "orders", 1)] == ["late0"]
    assert [one.message_id for one in parked(page.url, "error")] == ["m0"]
    assert found["messages"].count() == 1, "a look at what is there now"
    assert rest(page.url, "orders") == []


def test_the_replay_example_of_an_audit_sends_the_chosen_messages(
    page: Page, vhost: Vhost, capsys: pytest.CaptureFixture[str]
) -> None:
    shop = AuditedShop(vhost, page.place)
    fill(shop, 1)
    page.run("pipeline-replay.md", 1)
    shown = capsys.readouterr().out
    assert re.search(r"\|part\|sent\|rejected\|\n.*\n\| +0\| +1\| +0\|", shown), shown
    assert [(one.message_id, one.body) for one in drain(page.url, "orders", 1)] == [("m0", b"0")]


def test_the_audit_page_lists_lost_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (_, program), (_, shown) = [one for one in blocks("docs/pipeline-audit.md") if one[0] in {"python", ""}][:2]
    ids = [f"{number:032x}" for number in range(4)]
    messages = {
        "message_id": ids,
        "target": ["q:orders"] * 4,
        "due": [datetime(2026, 11, 29, 7, 36, number, 166_000, tzinfo=UTC) for number in (4, 3, 2, 1)],
        "outcome": ["overdue", "overdue", "overdue", "delivered"],
    }
    folder = tmp_path / "audit" / "messages" / "day=2026-11-29" / "batch=0"
    folder.mkdir(parents=True)
    parquet.write_table(pyarrow.table(messages), folder / "part-0.parquet")
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "pipeline-audit.md", "exec"), {})
    printed = capfd.readouterr().out
    assert shape(printed) == shape(shown)
    assert [one for one in ids if one in printed] == ids[1:3]


@pytest.mark.slow
@pytest.mark.long
def test_the_audit_example_fills_its_tables(
    page: Page, vhost: Vhost, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BIDE_STREAM_PORT", str(stream_port(vhost.broker)))
    shop = AuditedShop(vhost, page.place)

    async def publish(client: bide.Client) -> None:
        await client.publish(b"1", to="orders", delay="100ms", message_id="m")

    shop.work(publish)
    assert len(drain(page.url, "orders", 1)) == 1
    done = page.run("pipeline-audit.md", 0)["done"]
    assert (done.rows["scheduled"], done.rows["delivered"], done.pending, done.overdue) == (1, 1, 0, 0)
    shown = capsys.readouterr().out
    assert shown.startswith(f"{done.rows} 0 0\n")
    assert re.search(r"\|q:orders\| +1\|", shown), "the table of lateness"
    assert page.spark.read.parquet(str(page.place / "audit" / "messages")).count() == 1
