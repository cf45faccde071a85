"""The plan, folders and requirements of ``bide demo``."""

from __future__ import annotations

import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from rich.console import Console

from bide.demo.figures import DemoFigures, Histogram, ShopFigures
from bide.demo.plan import make_plan
from bide.demo.report import DemoReport, ReportFolder
from bide.demo.view import result
from bide.demo.workload import RETRY, make_shop
from bide.errors import InvalidInputError
from bide.pipelines.requirements import java_release, missing

LONGEST = timedelta(seconds=20)


def figures(shop: ShopFigures | None = None) -> DemoFigures:
    return DemoFigures(
        release="3.10.8",
        published=1,
        expected=1,
        delivered=1,
        lost=0,
        early=0,
        duplicates=0,
        misrouted=0,
        altered=0,
        undeliverable=0,
        lateness=None,
        hops={1: 1},
        seconds={},
        shop=shop,
    )


def shown(width: int, *, report: DemoReport | None = None, no_report: str = "") -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(result(figures(), Histogram(), live=True, report=report, no_report=no_report), crop=False)
    return captured.get()


def test_names_and_reasons_cannot_control_the_terminal(tmp_path: Path) -> None:
    odd = "\x1b[2J\n\u202e\x7f[red]"
    report = DemoReport(page=tmp_path / odd, picture=tmp_path, tables=tmp_path, summary=odd, failed=odd, headline={})
    for one in (shown(500, report=report), shown(500, no_report=odd)):
        assert all(sign.isprintable() or sign == "\n" for sign in one)
        assert "[red]" in one


# -- The plan


@pytest.mark.parametrize("messages", [1, 50, 4000])
def test_orders_fail_in_every_way_if_there_are_enough_orders(messages: int) -> None:
    shop = make_shop("d", messages=messages, longest=LONGEST, seed=1)
    assert shop == make_shop("d", messages=messages, longest=LONGEST, seed=1)
    assert shop != make_shop("d", messages=messages, longest=LONGEST, seed=2)
    orders = shop.orders
    kinds = Counter(one.trouble.exception for one in orders if one.trouble is not None)
    assert set(kinds) == set([ConnectionError, TimeoutError, LookupError][: len(orders)])
    for one in orders:
        assert timedelta(milliseconds=10) <= one.delay <= LONGEST / 5
        assert timedelta(0) <= one.after <= shop.longest - one.delay - timedelta(seconds=1)
        parked = one.trouble is not None and one.trouble.exception is LookupError
        assert one.end == ("parked" if parked else "processed")
        if one.trouble is not None and one.trouble.failures is not None:
            assert 1 <= one.trouble.failures < RETRY.attempts
    if messages == 4000:
        assert len(orders) == 200
        assert 0.1 < kinds.total() / 200 < 0.3


def test_pending_messages_go_to_queues_of_the_first_part_hours_later() -> None:
    shop = make_shop("d", messages=4000, longest=LONGEST, seed=1)
    plan = make_plan("d", messages=4000, longest=LONGEST, seed=1)
    assert len(shop.pending) == 500
    assert {one.queue for one in shop.pending} == {"d.reminders", "d.invoices"}
    assert {one.queue for one in shop.pending} <= {one.name for one in plan.topology.queues}
    assert {one.delay.days for one in shop.pending} == {0, 1, 2}
    assert min(one.delay for one in shop.pending) >= timedelta(hours=1)


def test_both_parts_have_disjoint_topologies() -> None:
    shop, plan = (make(prefix="d", messages=10, longest=LONGEST, seed=1) for make in (make_shop, make_plan))
    both = shop.topology | plan.topology
    assert len(both.queues) == len(shop.topology.queues) + len(plan.topology.queues)


def test_an_unfinished_order_is_a_problem() -> None:
    shop = ShopFigures(orders=3, handled=2, parked=0, failed=1, wrong=1, pending=0)
    assert figures(shop).problems == ["1 order did not end as planned"]
    assert figures().problems == []


# -- The folder


def test_an_earlier_report_is_replaced(tmp_path: Path) -> None:
    place = ReportFolder(tmp_path / "a" / "b")
    place.create()
    for path in (place.page, place.picture, place.tables / "messages" / "part.parquet"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    again = ReportFolder(place.folder)
    again.create()
    assert place.page.exists()
    again.clear()
    assert [path.name for path in place.folder.iterdir()] == [".bide-demo"]
    again.clear()


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    with pytest.raises(InvalidInputError, match="contains files that 'bide demo' did not write: name another"):
        ReportFolder(tmp_path).create()
    assert [path.name for path in tmp_path.iterdir()] == ["tables"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInputError, match="cannot be created: Not a directory"):
        ReportFolder(tmp_path / "file" / "demo").create()


# -- What is shown


def test_the_path_of_the_report_is_not_wrapped() -> None:
    page = Path("/", *(["deep"] * 30), "report.html")
    picture = page.with_suffix(".svg")
    report = DemoReport(
        page=page, picture=picture, tables=page.parent, summary="All well. " * 9, failed="Little.", headline={}
    )
    lines = shown(60, report=report).splitlines()
    assert f"  report     {page} and {picture}" in lines
    assert max(len(line) for line in lines if "deep" not in line) <= 60
    assert "report" not in shown(60)
    reason = "for a long reason" * 9
    assert f"  no report: {reason}" in shown(60, no_report=reason).splitlines()


# -- What Spark needs


def java(folder: Path, text: str, code: int = 0) -> Path:
    (folder / "bin").mkdir()
    program = folder / "bin" / "java"
    program.write_text(f"#!/bin/sh\necho '{text}' >&2\nexit {code}\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("text", "code", "release"),
    [
        ("    java.specification.version = 21", 0, 21),
        ("    java.specification.version = 1.8", 0, 8),
        ("No Java runtime present, requesting install.", 1, None),
    ],
)
def test_java_release_reads_the_specification_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int, release: int | None
) -> None:
    program = java(tmp_path, text, code)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert java_release() == release
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(program.parent))
    assert java_release() == release


def test_missing_java_or_spark_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert missing() is None
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert missing() == ("Spark needs Java 17 or later, but found none: install it, or set JAVA_HOME to its folder")
    java(tmp_path, "java.specification.version = 11")
    assert missing() is not None
    assert "but found 11:" in str(missing())
    monkeypatch.setitem(sys.modules, "pyspark", None)
    assert missing() == "Spark is missing: install bide[spark], and Java 17 or later"
