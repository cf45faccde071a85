"""Audits of streams that have lost records, and how to continue."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import bide
from bide.cli import app as cli
from bide.delay.taps import Retention, taps_of
from bide.endpoint.events import EVENTS
from bide.topology import Queue, Topology
from tests.broker.conftest import SMALL_CLOCK
from tests.spark.test_audit import STREAM, put, with_client
from tests.support import Vhost, apply_retention, stream_port

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OTHER_EVENTS = "other-events"
LIMITS = {"x-max-length-bytes": 100_000, "x-stream-max-segment-size-bytes": 50_000}
ON_SMALL_CLOCK = ("--max-delay", "20s", "--resolution", "50ms")


class Audit:
    """Rounds of the command, one by one, and what they find."""

    def __init__(self, vhost: Vhost, place: Path, capsys: pytest.CaptureFixture[str], *options: str) -> None:
        self.url, self.place, self._capsys = vhost.url, place, capsys
        port = ("--stream-port", str(stream_port(vhost.broker)))
        self._given = ("--once", "--json", "--into", str(place), "--url", vhost.url, *port, *options)

    def run(self, *options: str, code: int = 0) -> str:
        assert cli.run(["pipeline", "audit", *self._given, *options]) == code
        captured = self._capsys.readouterr()
        assert "failOnDataLoss" not in captured.err
        return captured.err if code else captured.out

    def rows(self, table: str, *options: str) -> int:
        """How many facts a round adds to a table."""
        rows: dict[str, Any] = json.loads(self.run(*options))["rows"]
        return int(rows[table])

    def tell(self, events: str, *names: str, size: int = 0) -> None:
        """Events of an endpoint."""

        async def publish(client: bide.Client) -> None:
            for name in names:
                event = {"event": "processed", "message_id": name, "ended": 1_795_262_400_000, "text": "x" * size}
                await client.publish(json=event, to=events)

        with_client(self.url, SMALL_CLOCK, publish)

    def turn_taps_off(self, *options: str) -> None:
        """And delete their streams."""
        assert cli.run(["tap", "off", "--delete", "--yes", "--url", self.url, *options]) == 0
        self._capsys.readouterr()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_gaps_end_an_audit_until_they_are_allowed(
    vhost: Vhost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each time it names the options that it has, not those of the data source behind it."""
    celery = bide.Celery()
    events = Topology(queues=[Queue(OTHER_EVENTS, arguments={**STREAM, **LIMITS})])
    taps = [taps_of(one).topology(Retention()) for one in (SMALL_CLOCK, celery)]
    asyncio.run(put(vhost.url, SMALL_CLOCK.topology(), celery.topology(), *taps, events))

    audit = Audit(vhost, tmp_path / "audit", capsys, "--events", OTHER_EVENTS)
    audit.tell(OTHER_EVENTS, "first")
    assert audit.rows("processed") == 1

    # No message is missing, but the audit cannot know that.
    audit.turn_taps_off("--layout", "celery")
    error = audit.run(code=2)
    assert f"has positions of {taps_of(celery).names[0]}, which the audit does not read any more: name them" in error
    assert " layouts, prefix and events as before, continue without them with --allow-gaps, or audit into" in error
    assert audit.rows("processed", "--allow-gaps") == 0

    # Far more than the stream keeps.
    audit.tell(OTHER_EVENTS, *(f"many-{number}" for number in range(100)), size=5_000)
    apply_retention(vhost.broker)
    error = audit.run(code=1)
    assert "removed them before they were read. Continue with the remaining messages with --allow-gaps, or" in error
    assert 0 < audit.rows("processed", "--allow-gaps") < 100

    async def anew(client: bide.Client) -> None:
        await client.destroy(events, force=True)
        await client.declare(events)

    with_client(vhost.url, SMALL_CLOCK, anew)
    audit.tell(OTHER_EVENTS, "last")
    error = audit.run(code=1)
    assert "it was deleted and declared again. Continue with --allow-gaps, or audit into another folder" in error
    assert audit.rows("processed", "--allow-gaps") == 1
    assert audit.rows("processed") == 0


@pytest.mark.long
@pytest.mark.slow
def test_a_source_without_any_stream_left_fails_until_allowed(
    spark: SparkSession, vhost: Vhost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most audits read the taps of one layout and one events stream: each is all that there is of its kind."""
    audit = Audit(vhost, tmp_path / "audit", capsys, "--engine", "local")
    taps, events = taps_of(SMALL_CLOCK), Topology(queues=[Queue(EVENTS, arguments=STREAM)])

    def turn_taps_on() -> None:
        asyncio.run(put(vhost.url, taps.topology(Retention())))

    def schedule(name: str) -> None:
        async def publish(client: bide.Client) -> None:
            await client.publish(b"1", to="orders", delay="15s", message_id=name)

        with_client(vhost.url, SMALL_CLOCK, publish)

    def scheduled() -> list[str]:
        return sorted(row["message_id"] for row in spark.read.parquet(str(audit.place / "scheduled")).collect())

    asyncio.run(put(vhost.url, SMALL_CLOCK.topology(), events, Topology(queues=[Queue.quorum("orders")])))
    turn_taps_on()
    schedule("first")
    audit.tell(EVENTS, "first")
    assert audit.rows("scheduled") == 1

    audit.turn_taps_off(*ON_SMALL_CLOCK)
    error = audit.run(code=2)
    assert f"has positions of {taps.scheduled}, which the audit does not read any more" in error
    assert "any more: name them with the same layouts" in error
    assert audit.rows("scheduled", "--allow-gaps") == 0
    assert audit.rows("scheduled") == 0, "it is allowed once"

    # New batches do not take the place of old ones.
    turn_taps_on()
    schedule("second")
    assert audit.rows("scheduled") == 1
    assert scheduled() == ["first", "second"]

    # As a kill leaves it: a batch was begun of which nothing can be read again.
    positions = audit.place / "_state" / "positions" / "scheduled.json"
    last = json.loads(positions.read_bytes())["batch"]
    positions.write_text(json.dumps({"batch": last - 1, "offsets": {taps.scheduled: 0}, "is_begun": True}))
    audit.turn_taps_off(*ON_SMALL_CLOCK)
    assert f"has positions of {taps.scheduled}" in audit.run(code=2)
    assert audit.rows("scheduled", "--allow-gaps") == 0
    assert scheduled() == ["first"], "the batch that does not count is removed"

    turn_taps_on()
    assert audit.rows("processed") == 0

    async def forget(client: bide.Client) -> None:
        await client.destroy(events, force=True)

    with_client(vhost.url, SMALL_CLOCK, forget)
    assert f"has positions of {EVENTS}, which the audit does not read any more" in audit.run(code=2)
    assert audit.rows("processed", "--allow-gaps") == 0
    assert audit.rows("processed") == 0
