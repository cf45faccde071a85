"""Checked and confirmed sending of the rows of one task.

All rows are first checked and buffered (:class:`bide.spark.spool.Spool`). They are published only if all of them are
valid, or if there is a folder for the invalid ones. :func:`send` returns after the broker has confirmed all messages,
except those in that folder. The module does not need Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

import pyarrow as pa

from bide.client.bulk.publish import KEPT_FAILURES
from bide.client.bulk.sync import BulkPublisher
from bide.client.publish_result import PublishSummary
from bide.errors import BulkPublishError, InvalidRowError
from bide.spark.overdue import OVERDUE_REASON, OVERDUE_STATUS, OverdueAction, OverdueCounter
from bide.spark.rate_limiter import RateLimiter
from bide.spark.rejects import Rejects
from bide.spark.rows import REQUEST_COLUMN, RowConverter
from bide.spark.sink_settings import SinkSettings
from bide.spark.spool import Spool

MAX_UNCONFIRMED_ROWS: Final = 50_000
"""Rows after which a task waits for all confirms. This limits the rows in memory."""

MAX_UNCONFIRMED_BYTES: Final = 64 << 20
"""Bytes of rows after which a task waits for all confirms."""

_FAILURE_CHECK_INTERVAL: Final = 1_000
"""Rows after which a task looks for failures."""

MAX_NAMED_ROWS: Final = 5
"""How many invalid rows an error names."""

ROW_INDEX: Final = "index in the partition"
"""The column with the index of a row in its partition, in the buffer. A table cannot have a column of this name."""

_ALL_FAILURES: Final = 10_000_000
"""The number of failures to keep if there is a folder for rejects: more than a task sends between two waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTask:
    """The write and the partition of a task, the same for each attempt at the task.

    Attributes:
        run: the id of the write. In a streaming query, this is the id prefix or the query id, followed by the number of
            the micro-batch.
        partition: the number of the partition.
        batch: the query id, followed by the number of the micro-batch; None outside a streaming query.
    """

    run: str
    partition: int
    batch: str | None = None

    def __str__(self) -> str:
        return f"{self.run}-{self.partition}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """The result of one task.

    Attributes:
        confirmed: rows that the broker has confirmed.
        rejected: rows in the folder for rejects.
        dropped: overdue rows that were dropped.
        overdue: overdue rows, whether sent, dropped or rejected.
        first: the earliest due time of an overdue row; None without any.
        last: the latest due time of an overdue row; None without any.
    """

    confirmed: int
    rejected: int = 0
    dropped: int = 0
    overdue: int = 0
    first: datetime | None = None
    last: datetime | None = None


def send(
    batches: Iterator[pa.RecordBatch],
    converter: RowConverter,
    settings: SinkSettings,
    task: WriteTask,
    *,
    file: str,
    begun: datetime,
) -> TaskResult:
    """Send the rows of one task.

    Args:
        file: the name of the file of rejects, unique to the task and the same for each attempt.
        begun: when the write began, to decide which rows are overdue.

    Raises:
        InvalidRowError: rows are invalid or overdue; nothing was published.
        BulkPublishError: some messages were not confirmed. The broker has the others that were sent; rows after them
            were not sent.
        BrokerError: the broker cannot be reached, or refuses.
    """
    overdue = OverdueCounter(begun)
    held = nullcontext() if settings.rejects is None else Rejects(settings.rejects, file)
    with held as rejects, Spool() as spool:
        _check_and_buffer(batches, converter, spool, rejects, overdue, settings.past, str(task))
        confirmed = _publish(spool.batches(), converter, settings, task, rejects)
    return TaskResult(
        confirmed=confirmed,
        rejected=0 if rejects is None else rejects.count,
        dropped=overdue.count if settings.past == "drop" else 0,
        overdue=overdue.count,
        first=overdue.first,
        last=overdue.last,
    )


def _check_and_buffer(
    batches: Iterator[pa.RecordBatch],
    converter: RowConverter,
    spool: Spool,
    rejects: Rejects | None,
    overdue: OverdueCounter,
    overdue_action: OverdueAction | None,
    run: str,
) -> None:
    """Check all rows, and buffer the valid ones with their index in the partition and their request id."""
    first = 0
    for given in batches:
        batch = given.rename_columns([name.lower() for name in given.schema.names])
        problems = converter.problems(batch, datetime.now(UTC))
        placed = batch.append_column(ROW_INDEX, pa.array(range(first, first + len(batch)), pa.int64()))
        if converter.is_keyed:
            placed = converter.with_requests(placed, run=run, first=first)
        if problems and rejects is None:
            raise invalid_rows(
                problems,
                first,
                first + len(batch) - 1,
                "Fix or filter these rows, or set the option rejects to a folder for them",
            )
        late = overdue.add(batch, problems) if "deliver_at" in converter.columns else []
        refused = {index: ("invalid", reason, None) for index, reason in problems.items()}
        if overdue_action == "reject":
            refused |= dict.fromkeys(late, (OVERDUE_STATUS, OVERDUE_REASON, None))
        if refused and rejects is not None:
            rejects.add(batch, refused)
        if omitted := {*refused, *(late if overdue_action == "drop" else ())}:
            placed = placed.filter(pa.array([index not in omitted for index in range(len(batch))]))
        if len(placed):
            spool.put(placed)
        first += len(batch)
    if overdue_action is None:
        overdue.refuse("Set the option past to send, drop, or reject (into the folder of the option rejects)")


def _publish(
    batches: Iterator[pa.RecordBatch],
    converter: RowConverter,
    settings: SinkSettings,
    task: WriteTask,
    rejects: Rejects | None,
) -> int:
    """Publish the buffered rows; returns the number of confirmed messages."""
    limiter = RateLimiter(settings.rate)
    # With a limit on the rate, a task waits for the confirms of each step before it goes on.
    batches, most = (
        (batches, MAX_UNCONFIRMED_ROWS) if limiter.step is None else (_slices(batches, limiter.step), limiter.step)
    )
    batch = next(batches, None)
    if batch is None:
        return 0
    chunk: list[tuple[int, pa.RecordBatch]] = []
    put = settled = unconfirmed_bytes = confirmed = 0
    with BulkPublisher(
        settings.url,
        infrastructure=settings.infrastructure,
        declare=settings.declare,
        timeout=settings.timeout,
        window=settings.window,
        keep=KEPT_FAILURES if rejects is None else _ALL_FAILURES,
    ) as publisher:
        while batch is not None:
            chunk.append((put, batch))
            limiter.wait(len(batch))
            messages = converter.messages(batch, batch.column(ROW_INDEX).to_pylist(), run=str(task))
            for number, message in enumerate(messages):
                publisher.put(message)
                if rejects is None and number % _FAILURE_CHECK_INTERVAL == 0 and publisher.has_failures:
                    # A queue deleted in mid-write, for example: all other messages would fail too.
                    _settle(publisher, chunk, rejects)
            put += len(batch)
            unconfirmed_bytes += batch.nbytes
            batch = next(batches, None)
            if batch is None or put - settled >= most or unconfirmed_bytes >= MAX_UNCONFIRMED_BYTES:
                confirmed += _settle(publisher, chunk, rejects)
                chunk, settled, unconfirmed_bytes = [], put, 0
    return confirmed


def _slices(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for first in range(0, len(batch), rows):
            yield batch.slice(first, rows)


def _settle(publisher: BulkPublisher, chunk: list[tuple[int, pa.RecordBatch]], rejects: Rejects | None) -> int:
    """Wait for all confirms; returns the number of confirmed messages.

    Args:
        chunk: the record batches since the last call, each with the position of its first message.

    Raises:
        BulkPublishError: messages were not confirmed, and there is no folder for rejects.
    """
    try:
        return publisher.flush().confirmed
    except BulkPublishError as error:
        report: PublishSummary = error.report
        if rejects is None:
            raise _unconfirmed(report, chunk) from error
        for first, batch in chunk:
            found = {
                one.position - first: (one.status, str(one.error), one.message_id)
                for one in report.failures
                if first <= one.position < first + len(batch)
            }
            if found:
                rejects.add(
                    batch.drop_columns([name for name in (ROW_INDEX, REQUEST_COLUMN) if name in batch.schema.names]),
                    found,
                )
        return report.confirmed


def invalid_rows(problems: Mapping[int, str], first: int, last: int, advice: str) -> InvalidRowError:
    """The error for invalid rows.

    Args:
        problems: errors by the index of the row in its batch.
        first: the index of the first row of the batch in the partition.
        last: the index of the last row of the batch in the partition.
        advice: what to do.
    """
    named = [f"row {first + index}: {problems[index]}" for index in sorted(problems)[:MAX_NAMED_ROWS]]
    more = len(problems) - len(named)
    return InvalidRowError(
        f"{len(problems)} of the rows {first} to {last} of this partition cannot be sent, and nothing was sent: "
        f"{'; '.join(named)}"
        f"{f'; and {more} more' if more else ''}. {advice}"
    )


def _unconfirmed(report: PublishSummary, chunk: list[tuple[int, pa.RecordBatch]]) -> BulkPublishError:
    named = []
    for one in report.failures[:MAX_NAMED_ROWS]:
        first, batch = next((first, batch) for first, batch in reversed(chunk) if first <= one.position)
        row = batch.column(ROW_INDEX)[one.position - first].as_py()
        named.append(f"row {row}, message id {one.message_id}, {one.status}: {one.error}")
    failed = report.total - report.confirmed
    more = failed - len(named)
    return BulkPublishError(
        f"{failed} of the last {report.total} messages were not confirmed ({report}): {'; '.join(named)}"
        f"{f'; and {more} more' if more else ''}. All other messages that this task has sent are on the broker. To "
        "continue without such rows, set the option rejects to a folder for them",
        report=replace(report, failures=()),
    )
