"""An audited endpoint that fails, and replays of its messages."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

import bide
from bide.admin.apply import apply
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.cli.app import run
from bide.delay.taps import Retention, taps_of
from bide.endpoint import Event
from bide.pipelines.audit.folder import Folder
from bide.pipelines.audit.run import run as run_audit
from bide.pipelines.audit.sources import find_sources
from bide.pipelines.audit.table_format import TableFormat
from bide.streams.log import Address
from bide.topology import Queue, Topology
from tests import stream_contents
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.endpoints import Recorder, running
from tests.polling import wait_until
from tests.spark.receiving import drain
from tests.support import Vhost, stream_port

EVENTS: Final = "bide.events"


class AuditedShop:
    """A virtual host with a tapped clock, an endpoint that fails, and the folder of an audit."""

    def __init__(self, vhost: Vhost, tmp_path: Path, *, table_format: TableFormat = "parquet") -> None:
        self.url, self.port = vhost.url, stream_port(vhost.broker)
        self.folder = Folder(str(tmp_path / "audit"), table_format=table_format)
        self.ledger = tmp_path / "ledger"
        asyncio.run(self._put())

    async def _put(self) -> None:
        events = Queue(EVENTS, arguments={"x-queue-type": "stream"})
        queues = Topology(queues=[Queue.quorum("orders"), Queue.quorum("errors"), events])
        connection = await Connection.open(BrokerUrl.parse(self.url))
        await apply(connection, SMALL_CLOCK.topology())
        taps = taps_of(SMALL_CLOCK)
        await apply(connection, taps.topology(Retention()), external=[*taps.sources, *taps.names])
        await apply(connection, queues)
        await connection.close()

    async def fail(self, client: bide.Client, number: int) -> None:
        """Handle messages with an endpoint that discards those with a discount and parks the others."""
        recorder = Recorder()
        retry = bide.Retry(immediate=0, delays=["50ms"], discard=(LookupError,))
        app = bide.Endpoint(
            "orders", name="shop", error_queue="errors", retry=retry, observers=[bide.EventStream(), recorder]
        )

        @app.handler
        async def handle(message: bide.Message) -> None:
            if message.headers.get("discount"):
                raise LookupError("no such discount")
            if message.headers.get("bad"):
                raise TimeoutError("too slow")

        async with running(app, client, recorder):
            await recorder.until("processed", "parked", "discarded", count=number)

    def work(self, *steps: Any) -> None:
        """Take steps with a client."""

        async def all_of_them() -> None:
            async with bide.connect(self.url, infrastructure=SMALL_CLOCK) as client:
                for step in steps:
                    await step(client)

        asyncio.run(all_of_them())

    def audit(self) -> None:
        """Run a round of the audit."""
        self.folder.begin()
        run_audit(None, find_sources(self.url, [SMALL_CLOCK], events=[EVENTS], port=self.port), self.folder)

    def replay(self, *arguments: object) -> int:
        return run([*self.command(), *(str(one) for one in arguments)])

    def command(self) -> list[str]:
        where = ("--url", self.url, "--audit", self.folder.place, "--ledger", str(self.ledger))
        return ["pipeline", "replay", *where]


def events(kind: Any, numbers: range) -> list[bide.OutgoingMessage]:
    """Publish the events of an endpoint for messages without a time of sending."""
    now = datetime.now(UTC)
    common = {"kind": kind, "endpoint": "shop", "queue": "orders", "host": "h", "process": 1, "message_type": None,
              "attempt": 1, "retries": 0, "sent_at": None, "due_at": None, "delivered_at": now, "started_at": now,
              "ended_at": now, "exception": "ValueError", "text": "no"}  # fmt: skip
    return [bide.OutgoingMessage(Event(**common, message_id=f"m{number}").to_json(), to=EVENTS) for number in numbers]


def fill(shop: AuditedShop, number: int) -> None:
    """Messages that were delivered, and discarded by an endpoint."""

    async def publish(client: bide.Client) -> None:
        letters = [
            bide.OutgoingMessage(b"%d" % n, to="orders", delay="100ms", message_id=f"m{n}") for n in range(number)
        ]
        await client.publish_many(letters)
        await client.publish_many(events("discarded", range(number)))

    address, delivered = Address.of(shop.url, shop.port), taps_of(SMALL_CLOCK).delivered
    before = stream_contents.count(address, delivered)
    shop.work(publish)
    assert len(drain(shop.url, "orders", number)) == number
    # The tap's stream may get a message after the queue.
    wait_until(lambda: stream_contents.count(address, delivered) >= before + number, "the tap has all messages")
    shop.audit()


def check_that_a_limit_counts_only_available_messages(shop: AuditedShop, capsys: pytest.CaptureFixture[str]) -> None:
    """The same with both engines, on an empty shop."""

    async def publish(client: bide.Client) -> None:
        await client.publish_many(events("discarded", range(9, 10)))

    # The oldest failure, of a message that no tap has seen.
    shop.work(publish)
    fill(shop, 3)
    for number in range(2):
        assert shop.replay("--limit", "1", "--skip-missing", "--json") == 0
        done = json.loads(capsys.readouterr().out)
        assert (done["sent"], done["unseen"]) == (1, 1)
        assert [one.message_id for one in drain(shop.url, "orders", 1)] == [f"m{number}"]
    assert shop.replay("--limit", "1") == 1
    assert "1 that no tap has seen" in capsys.readouterr().err
