"""The queries of docs/audit-recipes.md."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from bide.pipelines.audit.columns import UNDECODABLE
from bide.pipelines.audit.small import SmallAudit
from bide.pipelines.audit.storage import open_storage
from bide.pipelines.audit.table_format import TABLE_FORMATS, TableFormat
from tests.component.test_delta_audit import NOON, append, facts, new_folder

PAGE: Final = (Path(__file__).parents[2] / "docs" / "audit-recipes.md").read_text()
DAY: Final = date(2020, 1, 2)
DUE: Final = datetime(2020, 1, 2, 9, tzinfo=UTC)
SECOND: Final = timedelta(seconds=1)


def blocks(language: str) -> dict[str, list[str]]:
    """The blocks of a language by the heading above them."""
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    found = {one.partition("\n")[0]: re.findall(rf"```{language}\n(.*?)```", one, re.DOTALL) for one in sections}
    return {heading: some for heading, some in found.items() if some}


def write_audit(place: Path, table_format: TableFormat) -> None:
    """An audit of four orders, two schedules and a message that is not AMQP 1.0."""
    folder = new_folder(place, table_format)
    days, storage = (DAY,), open_storage(folder)
    ids = [f"order-{number}" for number in range(1, 5)]
    endpoint = {"endpoint": "shop", "queue": "orders", "type": "Order"}
    error = {"exception": "ValueError", "group": "ValueError", "text": "no", "attempt": 1}
    first = append(
        folder,
        0,
        scheduled=facts("scheduled", *ids, "order-1", days=days, type="Order", scheduled=DUE - 60 * SECOND),
        delivered=facts("delivered", *ids[:3], days=days, type="Order", delivered=DUE + 2 * SECOND, lateness_ms=2000.0),
    )
    second = append(
        folder,
        1,
        failed=facts("failed", "order-2", days=days, kind="failed", ended=DUE + 3 * SECOND, **endpoint, **error),
        processed=facts(
            "processed", *ids[1:3], days=days, attempt=2, started=DUE + 4 * SECOND, ended=DUE + 5 * SECOND, **endpoint
        ),
        occurrences=facts(
            "occurrences", "reminder", days=days, key="order:9", version="v", outcome="cancelled", ended=DUE - SECOND
        ),
    )
    storage.append(facts(UNDECODABLE, "not AMQP 1.0", days=days, offset=7), f"{UNDECODABLE}/source=events", 1)
    SmallAudit(folder).refresh([first, second], now=NOON)


@pytest.mark.parametrize("table_format", TABLE_FORMATS)
def test_each_query_finds_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table_format: TableFormat
) -> None:
    write_audit(tmp_path / "audit", table_format)
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    programs = blocks("python")["Open the tables"]
    exec(compile(programs[TABLE_FORMATS.index(table_format)], "audit-recipes.md", "exec"), found)
    answers = {heading: found["audit"].sql(query).fetchall() for heading, (query,) in blocks("sql").items()}
    assert answers == {
        "Outcomes": [
            ("q:orders", "overdue", 2, DUE, DUE),
            ("q:orders", "processed", 2, DUE, DUE),
            ("q:orders", "cancelled", 1, DUE, DUE),
        ],
        "Lost messages": [("order-1", "q:orders", "Order", DUE), ("order-4", "q:orders", "Order", DUE)],
        "The history of a message": [
            (DUE - 60 * SECOND, "scheduled", "q:orders", None),
            (DUE + 2 * SECOND, "delivered", "q:orders", None),
            (DUE + 3 * SECOND, "failed by shop", "q:orders", "ValueError: no"),
            (DUE + 5 * SECOND, "processed by shop", "q:orders", None),
        ],
        "Late deliveries": [(DUE, "q:orders", 3, 1.0, 2000.0)],
        "Processing times": [("shop", "Order", 2, 1000.0, 1000.0, 5000.0)],
        "Several attempts": [("order-2", "Order", "shop", 2, "processed")],
        "Growing failures": [("ValueError", "ValueError", "shop", 1, 0)],
        "Messages that were published twice": [("order-1", 2, timedelta(0))],
        "Ended schedules": [("order:9", "v", "cancelled", DUE, SECOND)],
        "Undecodable messages": [("events", "tap", "not AMQP 1.0", 1, 7, 7)],
    }
