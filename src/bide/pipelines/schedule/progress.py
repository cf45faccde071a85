"""Progress of a schedule: its counts, its ledger, and its parts.

The module does not import PySpark: runs on Spark and runs in this process share it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, cast

from bide.client.sync import connect_sync
from bide.errors import InvalidInputError, InvalidRowError
from bide.pipelines.ledger import Ledger, LedgerHead, LedgerPart
from bide.pipelines.schedule.plan import SchedulePlan
from bide.spark.overdue import OverdueAction, overdue_error_text
from bide.spark.rows import RowConverter
from bide.spark.sending import TaskResult, WriteTask, send

if TYPE_CHECKING:
    import pyarrow as pa

PART_ROWS: Final = 10_000
"""The approximate number of rows in a part. After a task is killed, at most one part is sent again."""

MAX_PARTS: Final = 10_000
"""The largest number of parts; a table with more rows has larger parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Counts of a table of messages.

    Attributes:
        rows: the number of rows.
        checksum: a checksum of all rows, which does not depend on their order.
        without_time: rows without a due time or delay, or with an invalid one.
        without_body: rows whose body is null.
        too_late: rows with a longer delay than the infrastructure supports, or, with keys, due after the year 9999.
        bad_headers: rows with headers that are not UTF-8, or that are not a JSON object of text.
        already_due: rows that are already due.
        overdue: rows that were due more than :data:`bide.spark.overdue.OVERDUE_GRACE` before the first run began.
        first: the earliest due time; None if no row has one. Delays are added to the time of the survey.
        last: the latest due time, at most the end of the year 9999; None if no row has one.
    """

    rows: int
    checksum: int
    without_time: int
    without_body: int
    too_late: int
    bad_headers: int
    already_due: int
    overdue: int
    first: datetime | None
    last: datetime | None

    @property
    def invalid(self) -> int:
        """The number of rows that cannot be sent."""
        return self.without_time + self.without_body + self.too_late + self.bad_headers


def matching_head(ledger: Ledger, plan: SchedulePlan) -> LedgerHead | None:
    """Read the head of a ledger and compare it with the plan; None for a new ledger.

    Raises:
        InvalidInputError: the ledger was begun with another plan, or cannot be read.
    """
    head = ledger.head()
    if head is None:
        return None
    if head.plan != plan.ledger_digest():
        raise InvalidInputError(
            f"the ledger {ledger.folder} was begun with other settings of target, columns, name or delay "
            "infrastructure: repeat those to continue, or name another ledger to start a new run"
        )
    if head.past != (plan.settings.past or "send"):
        raise InvalidInputError(
            f"the ledger {ledger.folder} was begun with {head.past!r} for past=...: repeat that to continue, or name "
            "another ledger"
        )
    if head.broker != plan.broker:
        raise InvalidInputError(
            f"the ledger {ledger.folder} was begun for the broker {head.broker}, but this run is for {plan.broker}: "
            "name another ledger"
        )
    return head


def head_for(ledger: Ledger, plan: SchedulePlan, found: Survey, *, part_rows: int = PART_ROWS) -> LedgerHead:
    """The head of the ledger for these rows: a new one, or that of an earlier run with the same plan and rows.

    The head is not written to the ledger.

    Raises:
        InvalidRowError: the ledger is new, rows are overdue, and the plan does not say what to do with them.
        InvalidInputError: the ledger was begun with another plan, or for other rows.
    """
    head = matching_head(ledger, plan)
    if head is None:
        refuse_overdue(found, plan)
        parts = min(max(-(-found.rows // part_rows), 1), MAX_PARTS)
        return LedgerHead(
            plan=plan.ledger_digest(),
            broker=plan.broker,
            rows=found.rows,
            checksum=found.checksum,
            parts=parts,
            past=plan.settings.past or "send",
        )
    if (head.rows, head.checksum) != (found.rows, found.checksum):
        raise InvalidInputError(
            f"the input has changed since the ledger {ledger.folder} was begun ({head.rows:,} rows then, "
            f"{found.rows:,} now, or other values): continue with the original input, or name another ledger to send "
            "all rows of this input"
        )
    return head


def refuse_overdue(found: Survey, plan: SchedulePlan) -> None:
    """Refuse overdue rows, unless the plan says what to do with them.

    Raises:
        InvalidRowError: rows are overdue.
    """
    if found.overdue and plan.settings.past is None and found.first is not None:
        raise InvalidRowError(
            overdue_error_text(
                f"{found.overdue:,} of {found.rows:,} rows",
                found.first,
                "Correct the times, or choose what to do with such rows by past=...: send (immediately), drop, or "
                "reject (with rejects=...)",
            )
        )


def finished_parts(ledger: Ledger, head: LedgerHead) -> tuple[set[int], bool]:
    """The parts in a locked ledger, and whether these are all parts of the table.

    Raises:
        InvalidInputError: another run has begun the ledger since *head* was made.
    """
    # The head was read before the lock was taken: parts of another run must not count as parts of this one.
    if ledger.head() not in (None, head):
        raise InvalidInputError(
            f"another run has begun the ledger {ledger.folder} in the meantime: start the same run again to continue "
            "with it, or to see why that is not possible"
        )
    found = ledger.parts()
    return {one.part for one in found}, sum(one.rows for one in found) >= head.rows


def begin(
    plan: SchedulePlan, ledger: Ledger, head: LedgerHead, begun: datetime, *, targets: Collection[str] = ()
) -> tuple[SchedulePlan, datetime]:
    """Bind the targets, and begin a locked ledger if it is new.

    Args:
        targets: the queues that the rows name.

    Returns:
        The plan with the first run's choice for overdue rows, and when the first run began.

    Raises:
        TargetNotFoundError: the queue does not exist; the ledger is not written.
        BrokerError: the broker cannot be reached, or refuses.
    """
    settings = replace(plan.settings, past=cast("OverdueAction", head.past))
    queues = [one for one in (settings.constants.get("to"), *targets) if one is not None]
    if plan.key_column is None and queues:
        # Here, and not in the parts: they would all bind at the same time, and report an error only after they started.
        with connect_sync(settings.url, infrastructure=settings.infrastructure, declare=settings.declare) as client:
            for queue in queues:
                client.wait_for(client.client.bind(queue))
    if ledger.head() is None:
        ledger.begin(head, begun)
    return replace(plan, settings=settings), ledger.begun_at() or begun


def send_part(
    batches: Iterator[pa.RecordBatch],
    number: int,
    plan: SchedulePlan,
    ledger: Ledger,
    *,
    columns: tuple[str, ...],
    head: LedgerHead,
    begun: datetime,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> TaskResult:
    """Send one part, and add it to the ledger.

    Args:
        columns: the columns of the messages; the first two must not be null.
        begun: when the first run began.
        refused: the queues of rows to which no message can be sent, each with the reason.

    Raises:
        InvalidRowError: rows are invalid or overdue; nothing of the part was published.
        BulkPublishError: some messages were not confirmed; the broker has the others.
        BrokerError: the broker cannot be reached, or refuses.
    """
    settings = plan.settings
    sent = send(
        batches,
        RowConverter(columns, settings.constants, settings.infrastructure, required=columns[:2], refused=refused),
        settings,
        # Each ledger has request ids of its own, so a run with a new ledger replaces the schedules of earlier runs.
        WriteTask(run=f"{plan.digest()}-{begun.isoformat()}", partition=number),
        file=f"part-{number:05}-{plan.ledger_digest()}-{head.checksum % (1 << 64):016x}",
        begun=begun,
    )
    ledger.add(LedgerPart(part=number, sent=sent.confirmed, rejected=sent.rejected, dropped=sent.dropped))
    return sent
