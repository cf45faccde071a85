"""Written histories for tests of the judgement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bide.check.history import DeliveredRow, HistoryWriter, InjectedFault, Row, RunRecord, SentRow, digest_of
from bide.check.judgement import judge
from bide.durations import to_microseconds

if TYPE_CHECKING:
    import bide

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
    ended_at=10 * SECOND + 5_000,
)
"""A message of 10 s, confirmed after 5 ms, that is due at 15 s."""

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


def broken_promises(
    folder: Path, due: Mapping[bytes, datetime], arrived: Sequence[bide.Message], kills: Sequence[datetime] = ()
) -> dict[str, int]:
    """Judge messages of one queue by the rules of ``bide check``, and count the violations of each broken promise.

    They may be late: the broker may have more to deliver than it can.

    Args:
        due: the due time of each message by its body, which no other one has.
        arrived: what was received, by the system clock of this machine.
        kills: when a process was killed that may therefore have sent a message twice.
    """
    rows: list[Row] = []
    for body, moment in due.items():
        rows.append(replace(SENT, id=body.decode(), due=to_microseconds(moment), due_error=0, body=digest_of(body)))
    for one in arrived:
        received_at, digest = to_microseconds(one.received_at), digest_of(one.body)
        row = replace(DELIVERED, id=one.body.decode(), received_at=received_at, body=digest)
        rows.append(replace(row, redelivered=one.redelivered))
    end = to_microseconds(max(due.values()))
    for number, moment in enumerate(kills, 1):
        killed = to_microseconds(moment)
        rows.append(replace(FAULT, number=number, began=killed, ended=killed, settled=end, late=False))
    verdict = judge(write_history(folder, *rows), max_lateness=timedelta(days=1))
    return {one.rule: one.violations for one in verdict.findings if one.violations}
