"""Rows of ``bide pipeline schedule``, on Spark or in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from bide.cli.pipeline.engine_choice import EngineChoice
    from bide.pipelines.engine import Engine
    from bide.pipelines.ledger import Ledger, LedgerHead
    from bide.pipelines.schedule.plan import SchedulePlan
    from bide.pipelines.schedule.progress import Survey
    from bide.pipelines.schedule.small import Messages
    from bide.pipelines.schedule.targets import TargetCount


@dataclass(frozen=True, slots=True)
class SourceTable:
    """The input of a schedule, and the plan for its rows."""

    source: str
    format: str | None
    options: Mapping[str, str]
    plan: SchedulePlan


class ScheduleRows(Protocol):
    """The rows of a schedule, on one of the engines."""

    def survey(self, *, now: datetime, begun: datetime) -> Survey:
        """Count valid, invalid and overdue messages."""
        ...

    def targets(self) -> list[TargetCount]:
        """Count messages by the queue that the rows name; empty if rows do not name queues."""
        ...

    def due_times(self, every: timedelta) -> list[tuple[datetime, int]]:
        """Count messages by due time."""
        ...

    def send(
        self, ledger: Ledger, head: LedgerHead, targets: Mapping[str, str | None], *, begun: datetime
    ) -> list[Mapping[str, int]]:
        """Send the parts that are not in the ledger, and return the outcomes of each.

        Args:
            targets: the queues that the rows name. The value is None, or why no message can be sent to the queue.
        """
        ...


class RowsOnSpark:
    """The rows of a schedule on Spark."""

    def __init__(self, rows: DataFrame, plan: SchedulePlan) -> None:
        self._rows, self._plan = rows, plan

    def survey(self, *, now: datetime, begun: datetime) -> Survey:
        from bide.pipelines.schedule.run import survey
        from bide.pipelines.session import spark_errors

        with spark_errors():
            return survey(self._rows, self._plan, now=now, begun=begun)

    def targets(self) -> list[TargetCount]:
        from bide.pipelines.schedule.rows import count_targets
        from bide.pipelines.session import spark_errors

        with spark_errors():
            return count_targets(self._rows, self._plan)

    def due_times(self, every: timedelta) -> list[tuple[datetime, int]]:
        from bide.pipelines.schedule.rows import messages
        from bide.pipelines.schedule.run import due_times
        from bide.pipelines.session import spark_errors

        with spark_errors():
            found = due_times(messages(self._rows, self._plan), every)
            # As seconds, because PySpark converts timestamps to naive ones in the time zone of the driver.
            times = found.selectExpr("unix_seconds(due) as due", "count").collect()
        return [(datetime.fromtimestamp(row["due"], UTC), row["count"]) for row in times]

    def send(
        self, ledger: Ledger, head: LedgerHead, targets: Mapping[str, str | None], *, begun: datetime
    ) -> list[Mapping[str, int]]:
        from bide.pipelines.schedule.run import send
        from bide.pipelines.session import spark_errors

        with spark_errors(sending=True):
            sent = send(self._rows, self._plan, ledger, head, targets=targets, begun=begun).collect()
        return [row.asDict() for row in sent]


class RowsInProcess:
    """The rows of a schedule in this process."""

    def __init__(self, found: Messages) -> None:
        self._messages = found

    def survey(self, *, now: datetime, begun: datetime) -> Survey:
        from bide.pipelines.schedule.small import survey

        return survey(self._messages, now=now, begun=begun)

    def targets(self) -> list[TargetCount]:
        return []  # Only Spark handles rows that name queues.

    def due_times(self, every: timedelta) -> list[tuple[datetime, int]]:
        from bide.pipelines.schedule.small import due_times

        return due_times(self._messages, every, now=datetime.now(UTC))

    def send(
        self, ledger: Ledger, head: LedgerHead, targets: Mapping[str, str | None], *, begun: datetime
    ) -> list[Mapping[str, int]]:
        from bide.pipelines.schedule.small import send

        return [asdict(one) for one in send(self._messages, ledger, head, begun=begun)]


def engine_for(given: SourceTable, choice: EngineChoice) -> tuple[Engine, RowsInProcess | None]:
    """The engine for an input, and the rows if the engine is this process."""

    def convert(table: Any, zone: tzinfo) -> RowsInProcess:
        from bide.pipelines.schedule.small import messages

        return RowsInProcess(messages(table, given.plan, zone))

    return choice.of_table(given.source, convert, format=given.format, options=given.options)
