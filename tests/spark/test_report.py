"""``bide pipeline report``: figures compared with a plain count.

Both engines count the same, which test_report_engines.py checks. Most tests here count in this process: that is faster.
"""

from __future__ import annotations

import json
import math
import re
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree

import pyarrow as pa
import pytest
from pyarrow import compute as pc
from pyarrow import parquet

from bide.cli.app import BAD_USAGE, FAILED, run
from bide.errors import InvalidColumnError, InvalidInputError
from bide.pipelines.report import collecting, collecting_filters
from bide.pipelines.report.duckdb_tables import small_tables
from bide.pipelines.report.figures import Figures
from bide.pipelines.report.page import page
from bide.pipelines.report.queries import BINS_PER_DECADE
from bide.pipelines.report.spark_tables import spark_tables
from tests.spark import audit_tables
from tests.spark.audit_tables import FIRST, LAST, message, pending_of, write, write_all

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES: Final = 3000
HOUR: Final = timedelta(hours=1)
FAR: Final = datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
NO_ZONE: Final = ("--time-zone", "Mars/Olympus")
NASTY: Final = "</title><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("audit") / "[eu]"
    made.mkdir()
    write_all(made, messages=MESSAGES)
    return made


def collect(folder: Path, *, lost_after: timedelta = collecting.DEFAULT_LOST_AFTER) -> Figures:
    with small_tables(str(folder)) as tables:
        return collecting.collect(tables, lost_after=lost_after)


def collect_with_spark(spark: SparkSession, folder: Path) -> Figures:
    with spark_tables(spark, str(folder)) as tables:
        return collecting.collect(tables)


@pytest.fixture(scope="module")
def figures(folder: Path) -> Figures:
    return collect(folder)


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = parquet.read_table(folder / "messages").to_pylist()
    return found


def test_the_headline_counts_every_outcome(figures: Figures, rows: list[dict[str, Any]]) -> None:
    head = figures.headline
    assert head is not None
    late = sorted(row["lateness_ms"] for row in rows if row["delivered"])
    assert head.scheduled == MESSAGES
    assert head.delivered == len(late)
    assert head.pending == MESSAGES - len(late)
    assert head.overdue == sum(row["outcome"] == "overdue" for row in rows) > 0
    assert head.until is not None
    before = head.until - collecting.DEFAULT_LOST_AFTER
    assert head.lost == sum(row["outcome"] == "overdue" and row["due"] < before for row in rows)
    times = [row[name] for row in rows for name in ("scheduled", "delivered") if row[name]]
    assert (head.since, head.until) == (min(times), max(times))
    for share, found in ((0.5, head.p50), (0.95, head.p95), (0.99, head.p99)):
        assert found == late[math.ceil(share * len(late)) - 1]
    assert head.max == late[-1]


def test_arrivals_and_releases_are_counted_per_hour(figures: Figures, rows: list[dict[str, Any]]) -> None:
    flow = figures.flow
    assert flow is not None
    assert flow.width == HOUR
    assert flow.first == FIRST
    assert len(flow.scheduled) == 72
    for number in (0, 1, 37, 71):
        begin, end = flow.first + HOUR * number, flow.first + HOUR * (number + 1)
        assert flow.scheduled[number] == sum(begin <= row["scheduled"] < end for row in rows)
        late = [row["lateness_ms"] for row in rows if row["delivered"] and begin <= row["delivered"] < end]
        assert flow.delivered[number] == len(late)
        assert (flow.p50[number] is None) == (not late)
        if late:
            assert min(late) <= (flow.p50[number] or 0) <= (flow.p99[number] or 0) <= max(late)
    assert sum(flow.scheduled) == MESSAGES
    assert figures.headline is not None
    assert flow.waiting()[-1] == figures.headline.pending


def test_lateness_is_counted_in_logarithmic_steps(figures: Figures, rows: list[dict[str, Any]]) -> None:
    steps = figures.lateness
    assert steps
    assert all(one.high == other.low for one, other in pairwise(steps))
    assert steps[1].high / steps[1].low == pytest.approx(10 ** (1 / BINS_PER_DECADE))
    for one in steps:
        assert one.count == sum(
            row["delivered"] is not None and one.low <= row["lateness_ms"] < one.high for row in rows
        )


def test_each_target_has_its_counts(figures: Figures, rows: list[dict[str, Any]]) -> None:
    assert [one.name for one in figures.targets][:2] == ["q:orders", "q:reviews"]
    for one in figures.targets:
        own = [row for row in rows if row["target"] == one.name]
        assert one.scheduled == len(own)
        assert one.delivered == sum(row["delivered"] is not None for row in own)
        assert one.overdue == sum(row["outcome"] == "overdue" for row in own)


def test_the_skyline_counts_pending_messages_by_target_and_hour(figures: Figures, rows: list[dict[str, Any]]) -> None:
    pending, head = figures.pending, figures.headline
    assert pending is not None
    assert head is not None
    assert sum(one.pending for one in pending.targets) == head.pending
    assert sum(one.pending_overdue for one in pending.targets) == head.overdue
    assert (pending.others, pending.earlier, pending.later) == (0, 0, 0)
    for one in pending.targets:
        waiting = [row["due"] for row in rows if row["target"] == one.name and not row["delivered"]]
        for number, count in enumerate(one.counts):
            begin = pending.first + pending.width * number
            assert count == sum(begin <= due < begin + pending.width for due in waiting)


def test_failures_are_counted_by_group(figures: Figures, folder: Path) -> None:
    failures = figures.failures
    assert failures is not None
    failed = parquet.read_table(folder / "failed").to_pylist()
    assert failures.total == len(failed) == sum(one.count for one in failures.groups)
    assert [one.exception for one in failures.groups] == ["Timeout", "KeyError", "IntegrityError", "ValidationError"]
    for one in failures.groups:
        own = [row["ended"] for row in failed if row["group"] == one.name]
        assert (one.first_seen, one.last_seen) == (min(own), max(own))
        assert sum(one.counts) == one.count == len(own)
        for number, count in enumerate(one.counts):
            begin = failures.first + failures.width * number
            assert count == sum(begin <= when < begin + failures.width for when in own)
    assert failures.groups[1].text == "'customer_id'"


def test_each_choice_of_the_filters_has_its_own_counts(figures: Figures, rows: list[dict[str, Any]]) -> None:
    filters, flow, pending = figures.filters, figures.flow, figures.pending
    assert filters is not None
    assert flow is not None
    assert figures.lateness is not None
    assert pending is not None
    assert list(filters.targets) == [one.name for one in figures.targets]
    assert sorted(filters.types) == ["AskForReview", "ExpireCart", "SendReminder"]
    assert filters.short == timedelta(minutes=10)
    assert len(filters.choices) == (1 + len(filters.targets)) * (1 + len(filters.types))
    whole = filters.choices[0]
    assert (whole.target, whole.type, whole.p50, whole.bins) == (0, 0, flow.p50, [s.count for s in figures.lateness])
    for one in filters.choices:
        own = [
            row
            for row in rows
            if (not one.target or row["target"] == filters.targets[one.target - 1])
            and (not one.type or row["type"] == filters.types[one.type - 1])
        ]
        for name, counts in (("scheduled", one.scheduled), ("delivered", one.delivered)):
            spans = [(row[name] - flow.first) // filters.short for row in own if row[name]]
            assert counts == [spans.count(number) for number in range(72 * 6)]
        late = sorted(row["lateness_ms"] for row in own if row["delivered"])
        assert sum(one.bins) == len(late)
        assert one.late[3] == (late[-1] if late else None)
        if late:
            assert one.late[0] == late[math.ceil(0.5 * len(late)) - 1]
        for number, p50 in enumerate(one.p50):
            assert (p50 is None) == (sum(one.delivered[6 * number : 6 * number + 6]) == 0)
        dues = [(row["due"] - pending.first) // pending.width for row in own if not row["delivered"]]
        assert one.pending == [dues.count(number) for number in range(pending.spans)]
        overdue = sorted((row["due"], row["message_id"]) for row in own if row["outcome"] == "overdue")
        assert sum(one.overdue) == len(overdue)
        assert [(message.due, message.message_id) for message in one.oldest] == overdue[: collecting_filters.MAX_OLDEST]


def test_the_oldest_overdue_messages_are_listed_and_the_query_gives_all(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "[eu] `night`"
    rows = [
        {**message(number, target="q:a" if number % 2 else f"q:{NASTY}", scheduled=FIRST, due=FIRST, late=1.0),
         "type": f"T{number % 9}", "due": LAST - timedelta(minutes=number), "delivered": None, "lateness_ms": None,
         "outcome": "overdue"}
        for number in range(30)
    ]  # fmt: skip
    rows += [message(number, target="q:a", scheduled=LAST, due=LAST, late=0.0) for number in range(100, 110)]
    write(folder, "messages", rows)
    found = collect(folder)
    assert [one.message_id for one in found.oldest] == [f"m{number}" for number in range(29, 9, -1)]
    assert (found.oldest[0].target, found.oldest[0].type) == ("q:a", "T2")
    assert found.oldest[0].due == LAST - timedelta(minutes=29)
    assert found.overdue == 30
    assert "The first 20 of 30 overdue messages in the table" in page(found)
    (shown,) = re.findall("<pre.*?><code>(.*?)</code>", page(found), re.DOTALL)
    listed = spark.sql(unescape(shown)).collect()
    assert [row["message_id"] for row in listed] == [f"m{number}" for number in range(29, -1, -1)]
    assert found.headline is not None
    assert sum(row["lost"] for row in listed) == found.headline.lost == 19


def test_the_session_time_zone_does_not_change_the_figures(spark: SparkSession, folder: Path, figures: Figures) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kathmandu")
    try:
        assert collect_with_spark(spark, folder) == figures
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(before))


def test_empty_tables_give_an_empty_report(tmp_path: Path) -> None:
    for name in audit_tables.SCHEMAS:
        write(tmp_path, name, [])
    found = collect(tmp_path)
    assert found.headline is not None
    assert (found.headline.scheduled, found.headline.p99, found.headline.since) == (0, None, None)
    assert found.missing == []
    assert "<svg" not in page(found)
    assert "Nothing failed." in page(found)


def test_a_single_message_gives_a_report(tmp_path: Path) -> None:
    one = message(1, target="q:orders", scheduled=FIRST, due=FIRST + HOUR, late=0.0)
    write(tmp_path, "messages", [one])
    found = collect(tmp_path)
    assert found.headline is not None
    assert (found.headline.scheduled, found.headline.delivered, found.headline.p50) == (1, 1, 0.0)
    assert found.lateness is not None
    assert [step.count for step in found.lateness] == [1]
    assert found.missing == ["pending", "failures", "failed"]
    assert page(found).count("<svg") == 12


def test_duplicate_events_are_counted_once(tmp_path: Path) -> None:
    base = {"message_id": "m", "endpoint": "e", "exception": "E", "group": "g", "started": FIRST, "ended": FIRST}
    once = [base | {"kind": "retried", "text": "first"}, base | {"kind": "parked", "ended": LAST, "text": "last"}]
    expired = base | {"kind": "expired", "text": "not a failure of a handler"}
    write(tmp_path, "failed", [*once, *once, expired])
    write(tmp_path, "failures", audit_tables.failures_of(once))
    failures = collect(tmp_path).failures
    assert failures is not None
    (group,) = failures.groups
    assert (group.count, sum(group.counts), group.counts[0], group.counts[-1]) == (2, 2, 1, 1)
    assert group.text == "last"


def test_undelayed_messages_are_left_out(tmp_path: Path) -> None:
    others = [{"message_id": str(number), "outcome": "processed", "sent": FIRST} for number in range(5)]
    one = message(1, target="q:orders", scheduled=FIRST, due=FIRST + HOUR, late=2.0)
    write(tmp_path, "messages", [*others, one])
    found = collect(tmp_path)
    assert found.headline is not None
    assert (found.headline.scheduled, found.headline.delivered) == (1, 1)
    assert [one.name for one in found.targets] == ["q:orders"]


def test_equal_times_fall_into_one_span(tmp_path: Path) -> None:
    write(tmp_path, "messages", [message(n, target="q:a", scheduled=LAST, due=LAST, late=0.0) for n in range(3)])
    flow = collect(tmp_path).flow
    assert flow is not None
    assert (flow.scheduled, flow.delivered) == ([3], [3])


def test_undelivered_messages_are_lost_after_the_grace_period(tmp_path: Path) -> None:
    rows = [
        message(0, target="q:a", scheduled=FIRST, due=LAST - timedelta(seconds=10), late=0.0),
        message(1, target="q:a", scheduled=FIRST, due=LAST - timedelta(minutes=9), late=1e9),
        message(2, target="q:a", scheduled=FIRST, due=LAST - timedelta(minutes=11), late=1e9),
    ]
    write(tmp_path, "messages", rows)
    head = collect(tmp_path, lost_after=timedelta(minutes=5)).headline
    assert head is not None
    assert (head.overdue, head.lost) == (2, 2)
    assert head.until == LAST - timedelta(seconds=10)
    for lost_after, lost in ((timedelta(minutes=10), 1), (timedelta(minutes=5), 2), (timedelta(days=1), 0)):
        counted = collect(tmp_path, lost_after=lost_after).headline
        assert counted is not None
        assert counted.lost == lost


def test_a_message_due_in_years_does_not_widen_the_spans(tmp_path: Path) -> None:
    soon = [(f"q:{number % 9}", FIRST + HOUR * (number % 48)) for number in range(2000)]
    rows = [message(0, target=to, scheduled=FIRST, due=LAST + (due - FIRST), late=1e12) for to, due in soon]
    rows.append(message(1, target="q:0", scheduled=FIRST, due=LAST + timedelta(days=3000), late=1e12))
    write(tmp_path, "pending", pending_of(rows))
    pending = collect(tmp_path).pending
    assert pending is not None
    assert pending.width == HOUR
    assert (pending.earlier, pending.later) == (0, 1)
    assert pending.others == 3
    assert [one.pending for one in pending.targets] == [224, 223, 222, 222, 222, 222, 666]
    assert sum(sum(one.counts) for one in pending.targets) == 2000


def test_one_due_time_in_the_year_9999_does_not_stretch_a_small_report(tmp_path: Path) -> None:
    """Two messages, of which one is due at a wrong time: no percentile leaves out only the other one."""
    rows = [
        {**message(number, target="q:a", scheduled=FIRST, due=LAST + HOUR, late=1.0), "due": due}
        for number, due in enumerate((LAST + HOUR, FAR))
    ]
    write(tmp_path, "messages", rows)
    write(tmp_path, "pending", pending_of(rows))
    failed = [
        {"message_id": "m", "endpoint": "e", "kind": "parked", "started": ended, "ended": ended, "exception": "E",
         "text": "t", "group": f"g{ended.year}"}
        for ended in (FIRST, LAST, FAR)
    ]  # fmt: skip
    write(tmp_path, "failed", failed)
    write(tmp_path, "failures", audit_tables.failures_of(failed))
    found = collect(tmp_path)
    assert found.pending is not None
    assert found.failures is not None
    assert (found.pending.first, found.pending.spans, found.pending.width) == (LAST + HOUR, 1, HOUR)
    assert (found.pending.earlier, found.pending.later) == (0, 1)
    assert (found.failures.first, found.failures.last - found.failures.width) == (FIRST, LAST)
    assert "9999-12-31 23:59:59" in page(found), "the table of failures shows the time that was reported"


def test_partitions_and_other_columns_are_read(tmp_path: Path) -> None:
    rows = [message(number, target="q:a", scheduled=FIRST, due=FIRST + HOUR, late=5.0) for number in range(10)]
    for day in ("2026-11-18", "2026-11-19"):
        write(tmp_path / "messages", f"day={day}", rows, schema="messages")
    (tmp_path / "pending").mkdir()
    (tmp_path / "pending" / "_SUCCESS").touch()
    found = collect(tmp_path)
    assert found.headline is not None
    assert found.headline.delivered == 20
    assert found.missing == ["pending", "failures", "failed"]


def test_folders_without_tables_of_an_audit_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    for found in (collect, partial(collect_with_spark, spark)):
        with pytest.raises(InvalidInputError, match="there is no folder"):
            found(tmp_path / "none")
        with pytest.raises(InvalidInputError, match="has no table of an audit"):
            found(tmp_path)
    with pytest.raises(InvalidInputError, match="cannot be read"), spark_tables(spark, "ftpx://somewhere/else"):
        pass
    write(tmp_path, "messages", [], schema="failed")
    for found in (collect, partial(collect_with_spark, spark)):
        with pytest.raises(InvalidColumnError, match="has no column target, type, scheduled, due, delivered"):
            found(tmp_path)


@pytest.mark.long
@pytest.mark.slow
def test_a_report_of_a_million_messages_is_complete(spark: SparkSession, tmp_path: Path) -> None:
    million = 1_000_000
    number = pa.array(range(million))
    second = pc.add(pc.divide(number, 10), int(FIRST.timestamp()))
    late = pc.subtract(number, pc.multiply(pc.divide(number, 100), 100))
    scheduled = pc.multiply(second, 1_000_000)
    due = pc.add(scheduled, 60_000_000)
    delivered = pc.add(due, pc.multiply(late, 1000))
    names = pa.array([f"q:{name}" for name in range(40)])
    columns = {
        "message_id": pc.cast(number, pa.string()),
        "target": names.take(pc.divide(number, million // 40)),
        "type": pa.array(["Remind"]).take(pa.array([0] * million)),
        **{
            name: one.cast(pa.timestamp("us", "UTC"))
            for name, one in (("scheduled", scheduled), ("due", due), ("delivered", delivered))
        },
        "lateness_ms": late.cast(pa.float64()),
        "outcome": pa.array(["delivered"]).take(pa.array([0] * million)),
    }
    (tmp_path / "messages").mkdir()
    parquet.write_table(pa.table(columns), tmp_path / "messages" / "part-0.parquet", row_group_size=100_000)
    found = collect_with_spark(spark, tmp_path)
    assert collect(tmp_path) == found
    assert found.headline is not None
    assert found.flow is not None
    assert found.lateness is not None
    assert (found.headline.scheduled, found.headline.delivered, found.headline.pending) == (million, million, 0)
    assert (found.headline.p50, found.headline.p95, found.headline.p99) == (49.0, 94.0, 98.0)
    assert sum(found.flow.scheduled) == sum(found.flow.delivered) == million
    assert sum(one.count for one in found.lateness) == million
    assert (len(found.targets), found.more_targets) == (10, 30)
    assert found.filters is not None
    # All messages, those of ten targets, and of these with their one type.
    assert len(found.filters.choices) == 1 + 10 + 1 + 10
    assert len(page(found)) < 500_000


def test_the_command_writes_page_and_picture(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, svg = tmp_path / "report.html", tmp_path / "report.svg"
    arguments = ["--engine", "local", "--out", str(out), "--svg", str(svg), "--title", "Night & day"]
    assert run(["pipeline", "report", str(folder), *arguments], started=time.monotonic() - 7_000) == 0
    output = re.sub(r"in 7\d{3}\.\d s", "in 7000 s", capsys.readouterr().out)
    assert f" of {MESSAGES:,} messages were delivered" in output.splitlines()[0]
    assert output.splitlines()[1:] == [
        "599 attempts failed, in 4 groups",
        f"report: {out} and {svg}; written in 7000 s",
        "engine: this process, because --engine local was given",
    ]
    assert "<h1>Night &amp; day</h1>" in out.read_text(encoding="utf-8")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["report.html", "report.svg"]
    assert "Night & day" in [one.text for one in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_documented_example_writes_a_report(
    spark: SparkSession, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "pipeline-report.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "audit").symlink_to(folder)
    exec(compile(example, "pipeline-report.md", "exec"), {"spark": spark})
    assert (tmp_path / "report.html").read_text(encoding="utf-8").count("<section") == 7


def test_the_summary_can_be_printed_as_json(
    folder: Path, figures: Figures, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    assert run(["pipeline", "report", str(folder), "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    head = figures.headline
    assert head is not None
    assert (report["scheduled"], report["overdue"], report["p99_ms"]) == (head.scheduled, head.overdue, head.p99)
    assert datetime.fromisoformat(report["until"]) == head.until
    assert (report["failures"], report["failure_groups"], report["missing"], report["svg"]) == (599, 4, [], None)
    assert report["report"] == str(out)
    assert out.exists()


def test_texts_of_messages_are_escaped(tmp_path: Path) -> None:
    rows = [message(number, target=f"q:{NASTY}", scheduled=FIRST, due=LAST + HOUR, late=5.0) for number in range(3)]
    rows.append(message(3, target=f"q:{NASTY}", scheduled=FIRST, due=FIRST + HOUR, late=5.0))
    write(tmp_path, "messages", rows)
    write(tmp_path, "pending", pending_of(rows))
    failed: dict[str, object] = dict.fromkeys(("message_id", "endpoint", "exception", "text", "group"), NASTY)
    failed |= {"kind": "parked", "started": FIRST, "ended": FIRST}
    write(tmp_path, "failed", [failed])
    write(tmp_path, "failures", audit_tables.failures_of([failed]))
    html = page(collect(tmp_path))
    assert "&lt;script&gt;alert(1)" in html
    assert html.count("<script") == 2, "the page's own ones"
    assert "<img" not in html


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        # Reported before Spark starts, which would report an unknown time zone.
        (["none", *NO_ZONE], BAD_USAGE, "there is no folder none"),
        (["file:///none/of/these", *NO_ZONE], BAD_USAGE, "there is no folder file:///none/of/these"),
        ([".", *NO_ZONE], BAD_USAGE, "the folder . has no table of an audit"),
        (["x" * 300, *NO_ZONE], BAD_USAGE, "cannot be read: "),
        ([".", "--out", "nowhere/report.html"], BAD_USAGE, "nowhere/report.html cannot be written"),
        ([".", "--lost-after", "soon"], BAD_USAGE, "'soon'"),
        ([".", "--svg", "p.jpg"], BAD_USAGE, "the picture is an SVG, but its name p.jpg does not end in .svg"),
        (["broken"], FAILED, "Spark: "),
    ],
)
def test_errors_are_reported_in_one_line(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken" / "messages").mkdir(parents=True)
    (tmp_path / "broken" / "messages" / "part-0.parquet").write_bytes(b"no parquet at all")
    assert run(["pipeline", "report", *arguments]) == code
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_forged_times_do_not_break_the_report(tmp_path: Path) -> None:
    """Clients with write access to a tap or an events stream can write any time."""
    ends = (datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC))
    for name, moments in (("first", ends[:1]), ("last", ends[1:]), ("both", ends)):
        folder = tmp_path / name
        waits = {**message(1, target="q:a", scheduled=FIRST, due=LAST, late=1.0), "outcome": "overdue"}
        rows = [{**waits, "delivered": None, "lateness_ms": None, "due": due} for due in moments]
        write(folder, "messages", rows)
        write(folder, "pending", pending_of(rows))
        failed = [
            {"message_id": "m", "endpoint": "e", "kind": "parked", "started": ended, "ended": ended, "exception": "E",
             "text": "t", "group": "g"}
            for ended in moments
        ]  # fmt: skip
        write(folder, "failed", failed)
        write(folder, "failures", audit_tables.failures_of(failed))
        assert page(collect(folder)).count("<section") >= 4
