"""Audits of the schedule log, without Spark: across kills, trimming and new logs."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyarrow import dataset

import bide
from bide.errors import AccessRefusedError, OffsetsLostError
from bide.pipelines.audit.folder import Folder
from bide.pipelines.audit.schedule_log import SCHEDULE_NAMES, PendingSchedules, read_schedule_log
from bide.pipelines.audit.sources import find_sources
from bide.schedules.names import PARTITIONS, partition_of
from bide.schedules.recurrence import Recurrence
from bide.streams.log import Address, StreamLogs
from bide.topology import Queue, Topology
from tests.broker.receiving import eventually
from tests.broker.schedule_log import LogClient, gating, log_client
from tests.support import Vhost, stream_port
from tests.timeouts import TIMEOUT

LOGS = tuple(map(SCHEDULE_NAMES.log, range(PARTITIONS)))
HOUR = 3_600_000
RETENTION = 4_000_000
SMALL = {"max-length-bytes": RETENTION, "stream-max-segment-size-bytes": 100_000}


class LogAudit:
    """Rounds over the log of a virtual host, and the tables that they write."""

    def __init__(self, vhost: Vhost, place: Path, *, url: str | None = None) -> None:
        self.address = Address.of(url or vhost.url, stream_port(vhost.broker))
        self.place = place
        self.folder = Folder(str(place))
        self.folder.begin()

    async def run(self, *, allow_gaps: bool = False, streams: tuple[str, ...] = LOGS) -> PendingSchedules | None:
        def read() -> PendingSchedules | None:
            return read_schedule_log(self.address, streams, self.folder, now=datetime.now(UTC), allow_gaps=allow_gaps)

        # In a thread, because the gate runs in this one.
        return await asyncio.to_thread(read)

    def rows(self, table: str = "occurrences") -> list[dict[str, Any]]:
        if not (self.place / table).exists():
            return []
        found: list[dict[str, Any]] = dataset.dataset(self.place / table, partitioning="hive").to_table().to_pylist()
        return found

    def outcomes(self) -> dict[str, int]:
        """How many occurrences have each outcome; each of them is in the table once."""
        rows = self.rows()
        assert len({row["occurrence"] for row in rows}) == len(rows)
        return dict(Counter(row["outcome"] for row in rows))

    def ends(self) -> list[int]:
        with StreamLogs(self.address) as logs:
            return [logs.end(one) for one in LOGS]


async def declared(url: str) -> None:
    async with bide.connect(url) as client:
        await client.declare(SCHEDULE_NAMES.topology() | Topology(queues=[Queue.quorum("mails")]))


async def one_of_each(vhost: Vhost, tmp_path: Path, audit: LogAudit) -> dict[str, str | None]:
    """Occurrences with every outcome, of which the audit has seen some. Returns the keys and their versions."""
    async with bide.connect(vhost.url) as client, gating(vhost.url, tmp_path / "gate", allow=["mails", "gone"]):
        first = await client.schedule(json={}, key="cancelled", to="mails", delay="1h", type="Remind", message_id="c")
        await client.cancel("cancelled")
        await client.schedule(json={}, key="moved", to="mails", delay="1h")
        moved = await client.reschedule("moved", delay="2h")
        await client.cancel("moved")
        await client.schedule(json={}, key="replaced", to="mails", delay="1h", message_id="old")
        await client.schedule(json={}, key="paused", to="mails", delay="1h")
        await client.pause("paused")
        assert await audit.run() == PendingSchedules(waiting=2, paused=1)
        assert audit.outcomes() == {"cancelled": 2}

        await client.schedule(json={}, key="replaced", to="mails", delay="100ms", message_id="new")
        await client.schedule(json={}, key="refused", to="orders", delay="100ms")
        await client.schedule(json={}, key="gone", to="gone", delay="100ms")
        # Long enough that it has not passed when the client reads its clock.
        soon = datetime.now(UTC) + timedelta(seconds=2)
        await client.schedule(json={}, key="digest", to="mails", every="1h", first_run=soon)
        await client.schedule(json={}, key="early", to="mails", delay="1h")
        await client.run_now("early")

        async def has_ended() -> bool:
            await audit.run()
            return len(audit.rows()) == 8

        await eventually(has_ended)
        await client.cancel("digest")
        assert await audit.run() == PendingSchedules(waiting=1, paused=1)
    return {"cancelled": first.version, "moved": moved.version}


async def test_each_occurrence_is_in_the_table_once_with_its_outcome(vhost: Vhost, tmp_path: Path) -> None:
    await declared(vhost.url)
    audit = LogAudit(vhost, tmp_path / "audit")
    versions = await one_of_each(vhost, tmp_path, audit)
    assert audit.outcomes() == {"cancelled": 3, "superseded": 1, "delivered": 3, "undeliverable": 2}
    rows = {(row["key"], row["outcome"]): row for row in audit.rows()}
    assert {name: rows[name, "cancelled"]["version"] for name in versions} == versions

    cancelled, moved = rows["cancelled", "cancelled"], rows["moved", "cancelled"]
    assert (cancelled["message_id"], cancelled["type"], cancelled["target"]) == ("c", "Remind", "q:mails")
    assert cancelled["due"] == cancelled["nominal"] > cancelled["ended"] >= cancelled["scheduled"]
    assert (cancelled["claimed"], cancelled["lateness_ms"]) == (None, None)
    assert moved["due"] - moved["nominal"] > timedelta(minutes=59)
    assert rows["replaced", "superseded"]["message_id"] == "old"
    assert rows["replaced", "delivered"]["message_id"] == "new"

    run = rows["digest", "delivered"]
    assert run["message_id"] == run["occurrence"] == f"{run['schedule_id']}@{int(run['nominal'].timestamp() * 1000)}"
    assert rows["digest", "cancelled"]["nominal"] - run["nominal"] == timedelta(hours=1)
    assert rows["early", "delivered"]["lateness_ms"] is None, "it was run before it was due"
    for name in ("replaced", "digest"):
        row = rows[name, "delivered"]
        assert row["lateness_ms"] == pytest.approx((row["ended"] - row["due"]) / timedelta(milliseconds=1))
        assert row["due"] - timedelta(milliseconds=50) <= row["claimed"] <= row["ended"] >= row["due"]
        assert row["version"] == row["schedule_id"]
    assert all(
        row["stream"] == SCHEDULE_NAMES.log(partition_of(row["key"])) and row["offset"] >= 0 for row in audit.rows()
    )
    (pending,) = audit.rows("schedules_pending")
    assert (pending["target"], pending["count"], pending["paused"], pending["overdue"]) == ("q:mails", 1, 1, 0)


async def test_an_audit_writes_nothing_and_needs_only_read_permission(
    vhost: Vhost, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a gate, what is due stays, and becomes overdue."""
    await declared(vhost.url)
    async with bide.connect(vhost.url) as client:
        await client.declare(Topology(queues=[Queue("news", arguments={"x-queue-type": "stream"})]))
    vhost.broker.add_user("auditor", "secret")
    try:
        vhost.broker.set_permissions(
            vhost.name, "auditor", configure="^$", write="^$", read=r"^news$|^bide\.v1\.schedule\.[0-7]$"
        )
        url = vhost.broker.vhost_url(vhost.name, user="auditor", password="secret")
        audit = LogAudit(vhost, tmp_path, url=url)
        async with log_client(vhost.url) as log:
            await log.add("late", "q:mails", -HOUR)
            await log.add("later", "x:shop", 2**62)
            await log.add("every", "q:mails", HOUR, every=Recurrence(interval=60_000, anchor=0))
        ends = audit.ends()
        assert await audit.run() == await audit.run() == PendingSchedules(waiting=3, overdue=1)
        assert audit.ends() == ends
        assert audit.rows() == []
        pending = {row["due_hour"].year: row for row in audit.rows("schedules_pending") if row["target"] == "x:shop"}
        assert list(pending) == [9999]

        port = stream_port(vhost.broker)
        assert find_sources(url, [], events=["news"], port=port).schedules == LOGS
        vhost.broker.set_permissions(vhost.name, "auditor", configure="^$", write="^$", read="^news$")
        with pytest.raises(AccessRefusedError, match=r"schedule\.0"):
            await audit.run()
        assert find_sources(url, [], events=["news"], port=port).schedules == ()
        assert "leaving out the schedule log" in caplog.text
    finally:
        # The broker serves other tests too.
        vhost.broker.delete_user("auditor")


KILLED_AT = """
import os, sys
from datetime import UTC, datetime
from bide.pipelines.audit import occurrence_files
from bide.pipelines.audit.folder import Folder
from bide.pipelines.audit.schedule_log import read_schedule_log
from bide.streams.log import Address

url, port, place, step, *streams = sys.argv[1:]
method = getattr(occurrence_files.OccurrenceFiles, step, None) or getattr(Folder, step)

def die(*args, **more):
    if step == "_delete_others":
        pass
    elif step != "commit":
        method(*args, **more)
    os.kill(os.getpid(), 9)

owner = occurrence_files.OccurrenceFiles if hasattr(occurrence_files.OccurrenceFiles, step) else Folder
setattr(owner, step, die)
read_schedule_log(Address.of(url, int(port)), tuple(streams), Folder(place), now=datetime.now(UTC))
"""


async def test_killed_rounds_count_each_occurrence_once(vhost: Vhost, tmp_path: Path) -> None:
    """By kill -9 after rows, state, counts or note were written, and right after the round counts."""
    await declared(vhost.url)
    audit = LogAudit(vhost, tmp_path / "audit")
    steps = ("accept_added", "store", "write_pending", "commit", "add_note", "_delete_others")
    async with log_client(vhost.url) as log, gating(vhost.url, tmp_path / "gate"):
        for number, step in enumerate(steps, 1):
            for key in range(20):
                await log.add(f"{key}", "q:mails", HOUR)
            assert (await log.change("cancel", f"{number}")).outcome == "cancelled"
            arguments = (vhost.url, f"{audit.address.port}", str(audit.place), step, *LOGS)
            killed = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED_AT, *arguments)
            async with asyncio.timeout(TIMEOUT):
                await killed.wait()
            assert killed.returncode == -signal.SIGKILL
            counted = {"cancelled": number, "superseded": 20 * (number - 1) - (number - 1)}
            if step == "_delete_others":
                assert audit.outcomes() == counted, "the round was finished"
            assert await audit.run() == PendingSchedules(waiting=19)
            assert audit.outcomes() == {name: count for name, count in counted.items() if count}
    notes = audit.folder.notes()
    assert sum(one.rows["occurrences"] for one in notes) == len(audit.rows()), "no new fact is left out by the tables"


async def trim(log: LogClient, vhost: Vhost, key: str) -> None:
    """Replace a schedule until retention has removed the beginning of its partition, with a gate at work."""
    port = stream_port(vhost.broker)
    with StreamLogs(Address.of(vhost.url, port)) as logs:
        stream = SCHEDULE_NAMES.log(partition_of(key))
        before = logs.end(stream)
        while logs.first(stream) <= before:
            records = [log.add_record(key, "q:mails", HOUR, body=bytes(20_000)) for _ in range(25)]
            await asyncio.gather(*(log.append(one) for one in records[:-1]))
            assert (await log.call(records[-1])).outcome == "scheduled"


async def test_a_trimmed_log_stops_an_audit_until_gaps_are_allowed(vhost: Vhost, tmp_path: Path) -> None:
    """It goes on from a snapshot. Occurrences that ended in the missing records have no known outcome."""
    policy = {"pattern": r"\.schedule\.[0-9]$", "definition": SMALL, "apply-to": "all"}
    vhost.broker.management.call("PUT", "policies", vhost.name, "small", body=policy)
    await declared(vhost.url)
    audit = LogAudit(vhost, tmp_path / "audit")
    partition = partition_of("busy")
    kept, lost, *more = (key for key in map(str, range(400)) if partition_of(key) == partition)
    async with log_client(vhost.url) as log, gating(vhost.url, tmp_path / "gate", retention=RETENTION):
        for key in (kept, lost, *more):
            await log.add(key, "q:mails", HOUR, body=key.encode())
        await log.change("cancel", more[0])
        await audit.run()
        assert audit.outcomes() == {"cancelled": 1}
        await log.change("cancel", lost)
        await trim(log, vhost, "busy")
        with pytest.raises(OffsetsLostError, match=rf"{SCHEDULE_NAMES.log(partition)}.*retention removed them before"):
            await audit.run()
        assert audit.outcomes() == {"cancelled": 1}

        found = await audit.run(allow_gaps=True)
        assert found is not None
        assert found.waiting == len(more) + 1, "the kept ones, and the busy one"
        (row,) = (row for row in audit.rows() if row["outcome"] == "unknown")
        assert (row["key"], row["ended"], row["offset"], row["target"]) == (lost, None, None, "q:mails")
        await log.change("cancel", kept)
        await audit.run()
        assert [row["outcome"] for row in audit.rows() if row["key"] == kept] == ["cancelled"]

        # A first round begins with a snapshot too.
        late = LogAudit(vhost, tmp_path / "late")
        assert await late.run() == await audit.run()
        assert audit.outcomes().keys() == {"cancelled", "superseded", "unknown"}


async def test_a_new_log_stops_an_audit_until_gaps_are_allowed(vhost: Vhost, tmp_path: Path) -> None:
    await declared(vhost.url)
    audit = LogAudit(vhost, tmp_path / "audit")

    async def replace_log(records: int) -> None:
        async with bide.connect(vhost.url) as client:
            await client.destroy(SCHEDULE_NAMES.topology(), force=True)
        await declared(vhost.url)
        async with log_client(vhost.url) as log:
            for number in range(records):
                await log.add("new", "q:mails", HOUR + number)

    async with log_client(vhost.url) as log:
        for _ in range(3):
            await log.add("new", "q:mails", HOUR)
    await audit.run()
    assert audit.outcomes() == {"superseded": 2}
    # Shorter than the old one, and longer.
    for number, records in enumerate((1, 5), 1):
        await replace_log(records)
        with pytest.raises(OffsetsLostError, match="was deleted and declared again"):
            await audit.run()
        assert await audit.run(allow_gaps=True) == PendingSchedules(waiting=1)
        assert audit.outcomes()["unknown"] == number
    with pytest.raises(OffsetsLostError, match="does not exist any more"):
        await audit.run(streams=())
    assert await audit.run(allow_gaps=True, streams=()) == PendingSchedules()
    assert audit.outcomes() == {"superseded": 6, "unknown": 3}


async def test_without_a_log_nothing_is_written(vhost: Vhost, tmp_path: Path) -> None:
    audit = LogAudit(vhost, tmp_path)
    assert await audit.run(streams=()) is None
    files = await asyncio.to_thread(lambda: [str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*.*")])
    assert not [one for one in files if "schedule" in one or "occurrence" in one]
