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
from bide.spark.overdue import OVERDUE_REASON, STATUS, Overdue, Past
from bide.spark.pace import Pace
from bide.spark.rejects import Rejects
from bide.spark.rows import REQUEST, Rows
from bide.spark.sink_settings import SinkSettings
from bide.spark.spool import Spool

CHUNK: Final = 50_000
"""Messages after which a task waits for all confirms. This limits the rows in memory."""

CHUNK_BYTES: Final = 64 << 20
"""Bytes of rows after which a task waits for all confirms."""

_FAILURE_CHECK_INTERVAL: Final = 1_000
"""Messages after which a task looks for failures."""

NAMED: Final = 5
"""How many invalid rows an error names."""

PLACE: Final = "place in the partition"
"""The column with the index of a row in its partition, in the buffer. A table cannot have a column of this name."""

_KEEP_ALL: Final = 10_000_000
"""The number of failures to keep if there is a folder for rejects: more than a task sends between two waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkPlace:
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
class Sent:
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
    rows: Rows,
    settings: SinkSettings,
    place: SinkPlace,
    *,
    file: str,
    begun: datetime,
) -> Sent:
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
    overdue = Overdue(begun)
    held = nullcontext() if settings.rejects is None else Rejects(settings.rejects, file)
    with held as rejects, Spool() as spool:
        _check_and_buffer(batches, rows, spool, rejects, overdue, settings.past, str(place))
        confirmed = _publish(spool.batches(), rows, settings, place, rejects)
    return Sent(
        confirmed=confirmed,
        rejected=0 if rejects is None else rejects.count,
        dropped=overdue.count if settings.past == "drop" else 0,
        overdue=overdue.count,
        first=overdue.first,
        last=overdue.last,
    )


def _check_and_buffer(
    batches: Iterator[pa.RecordBatch],
    rows: Rows,
    spool: Spool,
    rejects: Rejects | None,
    overdue: Overdue,
    past: Past | None,
    run: str,
) -> None:
    """Check all rows, and buffer the valid ones with their index in the partition and their request id."""
    first = 0
    for given in batches:
        batch = given.rename_columns([name.lower() for name in given.schema.names])
        problems = rows.problems(batch, datetime.now(UTC))
        placed = batch.append_column(PLACE, pa.array(range(first, first + len(batch)), pa.int64()))
        if rows.is_keyed:
            placed = rows.with_requests(placed, run=run, first=first)
        if problems and rejects is None:
            raise invalid_rows(
                problems,
                first,
                first + len(batch) - 1,
                "Fix or filter these rows, or set the option rejects to a folder for them",
            )
        late = overdue.add(batch, problems) if "deliver_at" in rows.columns else []
        refused = {index: ("invalid", reason, None) for index, reason in problems.items()}
        if past == "reject":
            refused |= dict.fromkeys(late, (STATUS, OVERDUE_REASON, None))
        if refused and rejects is not None:
            rejects.add(batch, refused)
        if omitted := {*refused, *(late if past == "drop" else ())}:
            placed = placed.filter(pa.array([index not in omitted for index in range(len(batch))]))
        if len(placed):
            spool.put(placed)
        first += len(batch)
    if past is None:
        overdue.refuse("Set the option past to send, drop, or reject (into the folder of the option rejects)")


def _publish(
    batches: Iterator[pa.RecordBatch], rows: Rows, settings: SinkSettings, place: SinkPlace, rejects: Rejects | None
) -> int:
    """Publish the buffered rows; returns the number of confirmed messages."""
    pace = Pace(settings.rate)
    # With a limit on the rate, a task waits for the confirms of each step before it goes on.
    batches, most = (batches, CHUNK) if pace.step is None else (_slices(batches, pace.step), pace.step)
    batch = next(batches, None)
    if batch is None:
        return 0
    chunk: list[tuple[int, pa.RecordBatch]] = []
    put = settled = kept = confirmed = 0
    with BulkPublisher(
        settings.url,
        infrastructure=settings.infrastructure,
        declare=settings.declare,
        timeout=settings.timeout,
        window=settings.window,
        keep=KEPT_FAILURES if rejects is None else _KEEP_ALL,
    ) as publisher:
        while batch is not None:
            chunk.append((put, batch))
            pace.wait(len(batch))
            messages = rows.messages(batch, batch.column(PLACE).to_pylist(), run=str(place))
            for number, message in enumerate(messages):
                publisher.put(message)
                if rejects is None and number % _FAILURE_CHECK_INTERVAL == 0 and publisher.has_failures:
                    # A queue deleted in mid-write, for example: all other messages would fail too.
                    _settle(publisher, chunk, rejects)
            put += len(batch)
            kept += batch.nbytes
            batch = next(batches, None)
            if batch is None or put - settled >= most or kept >= CHUNK_BYTES:
                confirmed += _settle(publisher, chunk, rejects)
                chunk, settled, kept = [], put, 0
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
                    batch.drop_columns([name for name in (PLACE, REQUEST) if name in batch.schema.names]), found
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
    named = [f"row {first + index}: {problems[index]}" for index in sorted(problems)[:NAMED]]
    more = len(problems) - len(named)
    return InvalidRowError(
        f"{len(problems)} of the rows {first} to {last} of this partition cannot be sent, and nothing was sent: "
        f"{'; '.join(named)}"
        f"{f'; and {more} more' if more else ''}. {advice}"
    )


def _unconfirmed(report: PublishSummary, chunk: list[tuple[int, pa.RecordBatch]]) -> BulkPublishError:
    named = []
    for one in report.failures[:NAMED]:
        first, batch = next((first, batch) for first, batch in reversed(chunk) if first <= one.position)
        row = batch.column(PLACE)[one.position - first].as_py()
        named.append(f"row {row}, message id {one.message_id}, {one.status}: {one.error}")
    failed = report.total - report.confirmed
    more = failed - len(named)
    return BulkPublishError(
        f"{failed} of the last {report.total} messages were not confirmed ({report}): {'; '.join(named)}"
        f"{f'; and {more} more' if more else ''}. All other messages that this task has sent are on the broker. To "
        "continue without such rows, set the option rejects to a folder for them",
        report=replace(report, failures=()),
    )
