"""``bide check`` with a Spark sink that loses, hastens, doubles and changes rows.

Run it as ``python -m tests.spark_meddler FOLDER BROKER``. It writes a history to FOLDER, and prints what it did (JSON).
It is a process of its own, because its session would otherwise be that of other tests.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from unittest.mock import patch

from pyspark import TaskContext
from pyspark.sql.functions import udf

from bide.check.plan import CheckPlan
from bide.check.run import run_check
from bide.check.site import VHOST, OneNode
from bide.check.workloads.spark import Message, SparkWorkload
from bide.local_broker import LocalBroker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def id_in_the_second_attempt(message_id: str) -> str:
    """Fail in the first attempt at a task."""
    context = TaskContext.get()
    assert context is not None
    if context.attemptNumber() == 0:
        raise ConnectionError("a planned failure of a task")
    return message_id


class Meddler(SparkWorkload):
    """Does to some rows what the sink should not do. In every second write, the first attempt at each task fails.

    Attributes:
        done: how many rows were lost, hastened, doubled, or changed, and doubled in a write whose tasks were repeated.
    """

    done: ClassVar[Counter[str]] = Counter()

    def table(self, messages: Sequence[Message]) -> DataFrame:
        """Meddle with four rows of ten."""
        if len(messages) == 1:  # the first write, which the run waits for
            return super().table(messages)
        is_repeated = self._writes % 2 == 0
        what = ("lost", "early", "repeated" if is_repeated else "twice", "changed")
        rows: list[Message] = []
        for draft, queue, due in messages:
            number = int(draft.id.rpartition("-")[2]) % 10
            row = (draft, queue, due)
            match what[number] if number < len(what) else "":
                case "lost":
                    copies: list[Message] = []
                case "early":
                    copies = [(draft, queue, self.stage.client.now())]
                case "changed":
                    copies = [(replace(draft, body=draft.body + b"!"), queue, due)]
                case "":
                    copies = [row]
                case _:
                    copies = [row, row]
            if number < len(what):
                self.done[what[number]] += 1
            rows += copies
        table = super().table(rows)
        return table.withColumn("message_id", udf(id_in_the_second_attempt)("message_id")) if is_repeated else table


def main(folder: Path, broker: LocalBroker) -> None:
    """Run the plan."""
    plan = CheckPlan(
        seed=3,
        workloads=("spark",),
        duration=timedelta(seconds=10),
        rate=20,
        longest=timedelta(seconds=20),  # longer than a write takes on a busy machine
        patience=timedelta(seconds=20),  # for rows that were lost
    )
    try:
        with patch.dict("bide.check.plan.WORKLOADS", {"spark": Meddler}):
            asyncio.run(run_check(plan, OneNode(broker), folder, folder.with_name("working")))
    finally:
        broker.delete_vhost(VHOST)
    sys.stdout.write(json.dumps(Meddler.done))


if __name__ == "__main__":
    main(Path(sys.argv[1]), LocalBroker(Path(sys.argv[2])))
