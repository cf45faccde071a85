"""Written histories for tests of the judgement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from bide.check.history import DeliveredRow, HistoryWriter, InjectedFault, Row, RunRecord, SentRow, digest_of

SECOND: Final = 1_000_000

SENT: Final = SentRow(
    run="run-0001",
    id="m1",
    place="q",
    workload="queues",
    role="message",
    outcome="confirmed",
    expected="delivered",
    sent_at=10 * SECOND,
    due=15 * SECOND,
    due_error=20,
    attempts=1,
    routing_key="q",
    body=digest_of(b"body"),
    headers=digest_of(b"headers"),
)
"""A message of 10 s that is due at 15 s."""

DELIVERED: Final = DeliveredRow(
    run="run-0001",
    id="m1",
    place="q",
    received_at=15 * SECOND + 4_000,
    redelivered=False,
    routing_key="q",
    body=digest_of(b"body"),
    headers=digest_of(b"headers"),
)
"""Its delivery, 4 ms late."""

FAULT: Final = InjectedFault(
    run="run-0001",
    number=1,
    kind="kill",
    what="node 1",
    began=12 * SECOND,
    ended=20 * SECOND,
    settled=60 * SECOND,
    late=True,
    twice=True,
    clock_step=0,
)
"""A fault while it waits."""


def write_history(folder: Path, *rows: Row, finished: bool = True, run: str = "run-0001") -> Path:
    """Write a history with one run, and a kept promise beside the rows."""
    record = RunRecord(run=run, seed=7, release="4.3.6", nodes=3, seconds=60.0)
    with HistoryWriter(folder / run) as writer:
        record.save(folder / run)
        writer.add(replace(SENT, run=run, id="kept"))
        writer.add(replace(DELIVERED, run=run, id="kept"))
        for row in rows:
            writer.add(replace(row, run=run))
    replace(record, finished=finished).save(folder / run)
    return folder
