"""Checks shared by the tests of a Spark cluster and of Spark Connect."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

import bide
from bide.cli.app import run
from tests.audited_shop import EVENTS, events
from tests.spark import on_cluster
from tests.spark.cluster import ExternalSpark
from tests.spark.receiving import drain, rest
from tests.spark.test_replay import put
from tests.support import Vhost, stream_port

ROWS: Final = 200
DISCARDED: Final = 5
PARKED: Final = 3
# A few queues: it is applied in a moment.
ON_CLOCK: Final = ("--max-delay", "5s", "--resolution", "1s")


def prepare_queues(vhost: Vhost, folder: Path) -> dict[str, str]:
    """Declare the queues of the program on_cluster.py, and return its settings."""
    facts = bide.Queue("facts", arguments={"x-queue-type": "stream"})
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("orders"), bide.Queue.quorum("kept"), facts]))
    return {"url": vhost.url, "port": str(stream_port(vhost.broker)), "checkpoint": str(folder / "checkpoint")}


def check_source_and_sink(found: Mapping[str, Any], vhost: Vhost) -> None:
    """Check the output of that program, and the messages that it left on the broker."""
    sent = {f"m-{number}": f"row {number}" for number in range(on_cluster.ROWS)}
    assert set(found["batch"]) == set(sent)
    assert found["moved"] == len(found["kept"]) == on_cluster.ROWS
    assert dict(found["kept"]) == sent
    assert rest(vhost.url, "orders") == []
    assert {one.message_id: one.body.decode() for one in drain(vhost.url, "kept", on_cluster.ROWS)} == sent


def check_pipelines(spark: ExternalSpark, settings: Mapping[str, str], vhost: Vhost, folder: Path) -> None:
    """Run every command of ``bide pipeline`` that works on messages, on those of one campaign."""
    url, port, audit = vhost.url, str(stream_port(vhost.broker)), str(folder / "[eu]" / "audit")
    stream = bide.Queue(EVENTS, arguments={"x-queue-type": "stream"})
    with bide.connect_sync(url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("orders"), stream]))
    assert run(["delay", "apply", *ON_CLOCK, "--url", url]) == 0
    assert run(["tap", "on", *ON_CLOCK, "--url", url]) == 0
    ids, rows = [f"m{number}" for number in range(ROWS)], str(folder / "rows.parquet")
    pq.write_table(pa.table({"id": ids, "wait": ["1s"] * ROWS}), rows)
    sending, ledger = ("--url", url, *ON_CLOCK), str(folder / "ledger")

    with spark.commands(folder, settings) as call:
        schedule = ("schedule", rows, "--to", "orders", "--delay-column", "wait", "--id-column", "id", *sending)
        assert call(*schedule, "--part-rows", "100", "--ledger", ledger)["sent"] == ROWS
        assert {one.message_id for one in drain(url, "orders", ROWS)} == set(ids)
        asyncio.run(_publish_failures(url))
        put(url, "errors", PARKED, "orders", prefix="p")

        audited = call("audit", "--once", "--into", audit, "--url", url, "--stream-port", port)
        assert audited["rows"] == {"scheduled": ROWS, "delivered": ROWS, "processed": 0, "failed": DISCARDED}
        report = call("report", audit, "--out", str(folder / "report.html"))
        assert (report["scheduled"], report["delivered"], report["failures"]) == (ROWS, ROWS, DISCARDED)
        assert (folder / "report.html").read_text().startswith("<!doctype html>")
        planned = call("plan", "--rate", "100/s", "--delay", "5m", "--for", "1h", "--layout", "clock")
        assert round(planned["messages"]) == 360_000
        assert call("replay", "--queue", "errors", "--url", url)["sent"] == PARKED
        again = call("replay", "--audit", audit, "--url", url, "--part-rows", "2", "--ledger", str(folder / "replayed"))
        assert (again["sent"], again["gone"]) == (DISCARDED, 0)
    found = drain(url, "orders", PARKED + DISCARDED)
    back = {*(f"p{number}" for number in range(PARKED)), *(f"m{number}" for number in range(DISCARDED))}
    assert {one.message_id for one in found} == back
    assert all(one.history.returned == 1 for one in found)


async def _publish_failures(url: str) -> None:
    async with bide.connect(url) as client:
        await client.publish_many(events("discarded", range(DISCARDED)))
