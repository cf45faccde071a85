"""What ``bide pipeline schedule`` refuses before it sends anything, so that no row is lost or sent in vain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bide.errors import InvalidInputError
from bide.pipelines.ledger import Ledger, Part
from bide.pipelines.schedule import head_for, send, survey
from tests.spark.test_schedule import NOW, plan_for, reminders

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

NOBODY = "amqp://localhost:1"


def test_a_ledger_that_another_run_has_begun_meanwhile(spark: SparkSession, tmp_path: Path) -> None:
    """Both looked at it while it was new: what the one has sent is not what the other has."""
    plan, ledger = plan_for(NOBODY, "orders"), Ledger(str(tmp_path / "ledger"))
    rows = reminders(spark, 10, due="timestamp'2026-11-21 07:00:00'")
    others = rows.selectExpr("order_id", "shop + 1 as shop", "due")
    ours, theirs = (head_for(ledger, plan, survey(one, plan, now=NOW)) for one in (rows, others))
    ledger.begin(theirs)
    ledger.add(Part(part=0, sent=10, rejected=0))
    with pytest.raises(InvalidInputError, match="another run has begun the ledger .* meanwhile: the same command"):
        send(rows, plan, ledger, ours)
    assert send(others, plan, ledger, theirs).collect() == [], "all of it is done"
