"""Waiting messages between all delay infrastructures on the in-memory broker."""

from __future__ import annotations

import asyncio
from datetime import datetime
from itertools import permutations
from typing import Any

import pytest

import bide
import bide.testing
from bide.delay.protocol import DelayInfrastructure
from bide.migration import Migration
from bide.migration.copies import TakenMessage
from bide.migration.migration import PREFETCH
from bide.schedules.names import ScheduleNames
from bide.topology import Binding, Exchange, Queue, Topology
from tests.broker.receiving import receive
from tests.timeouts import TIMEOUT

LAYOUTS: dict[str, DelayInfrastructure] = {
    "clock": bide.Clock(),
    "nservicebus": bide.NServiceBus(routing="direct"),
    "nservicebus-v1": bide.NServiceBus(version=1, routing="direct"),
    "celery": bide.Celery(),
    "other-prefix": bide.Clock(prefix="eu.shop", lanes=3),
}
RELEASES = [(3, 10), (4, 3)]
PLACES = Topology(
    [Exchange("shop", "topic")],
    [Queue.quorum("orders.eu"), Queue.quorum("events")],
    [Binding("shop", "events", "order.*")],
)
DELAYS = ("7s", "61s", "1h1m1s", "26h", "40d")


NAMES = list(LAYOUTS)
RING = set(zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True))
"""Pairs in which each layout is the source once and the target once. The others are long; the broker has all."""


@pytest.mark.parametrize(
    ("source", "target", "release"),
    [
        pytest.param(*pair, RELEASES[number % 2], marks=[] if pair in RING else pytest.mark.long)
        for number, pair in enumerate(permutations(LAYOUTS, 2))
    ],
)
async def test_messages_keep_their_due_times_from_any_level(source: str, target: str, release: tuple[int, ...]) -> None:
    """After half an hour, so that some are overdue and some have passed levels."""
    before, after = LAYOUTS[source], LAYOUTS[target]
    due: dict[str, datetime | None] = {}
    async with bide.testing.broker(release=release) as b, b.connect(infrastructure=before) as client:
        await client.declare(PLACES)
        for delay in DELAYS:
            for to in ({"to": "orders.eu"}, {"exchange": "shop", "routing_key": "order.created"}):
                options: dict[str, Any] = {**to, "headers": {"number": len(due)}, "priority": 3}
                receipt = await client.publish(f"{len(due)}", delay=delay, **options)
                due[receipt.message_id] = receipt.due
        b.clock.advance("30m")
        migration = Migration(client.url, before, after, allow=["orders.*", "x:shop"])
        done = await migration.run()
        assert (done.moved, done.uncertain, done.left, dict(done.set_aside)) == (6, 0, {}, {})
        found = []
        for queue, number in (("orders.eu", 2), ("events", 2)):
            found += await receive(client, queue, number)
        for step in ("45m", "25h", "38d", "2d"):
            b.clock.advance(step)
        for queue in ("orders.eu", "events"):
            found += await receive(client, queue, 3)
    assert {one.message_id for one in found} == set(due)
    for one in found:
        assert one.body == str(one.headers["number"]).encode()
        moment = due[one.message_id or ""]
        assert moment is not None
        assert one.due == moment
        assert one.received_at >= moment
        own = {name for name in one.headers if not name.startswith("NServiceBus.")}
        assert (own, one.priority) == ({"number"}, 3)
        assert (one.exchange, one.routing_key) in {("", "orders.eu"), ("shop", "order.created")}


@pytest.mark.parametrize("source", ["clock", "celery"])
async def test_a_forged_record_of_a_gate_is_set_aside(source: str) -> None:
    """The operator who migrates may write to the exchange of the gates, and the sender of the message may not."""
    names = ScheduleNames()
    before, after = LAYOUTS[source], LAYOUTS["other-prefix"]
    async with bide.testing.broker() as b, b.connect(infrastructure=before) as client:
        await client.declare(names.topology())
        await client.publish(b"a claim", exchange=names.gates, routing_key="0", delay="1h")
        done = await Migration(client.url, before, after, allow=["*"]).run()
        assert (done.moved, done.set_aside.total()) == (0, 1)
        assert "belongs to the schedule log" in next(iter(done.set_aside))


class _Held(Migration):
    """A migration that takes messages and finishes none of them until it is released."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.begun = 0
        self.full, self.released = asyncio.Event(), asyncio.Event()

    async def _move(self, queue: str, taken: TakenMessage) -> None:
        self.begun += 1
        if self.begun == PREFETCH:
            self.full.set()
        await self.released.wait()
        await super()._move(queue, taken)


async def test_set_aside_messages_are_taken_as_they_are_finished() -> None:
    """Their bodies need memory, and a basic.get has no prefetch."""
    number = PREFETCH + 50
    async with bide.testing.broker(release=(4, 3)) as b, b.connect() as client:
        await client.declare(Topology(queues=[Queue("refused")]))
        await asyncio.gather(*(client.publish(b"x", to="refused", delay="1h") for _ in range(number)))
        moved = await Migration(client.url, bide.Clock(), bide.Clock(prefix="eu"), allow=["other"]).run()
        assert moved.set_aside.total() == number
        migration = _Held(client.url, bide.Clock(), bide.Clock(prefix="eu"), allow=["refused"])
        running = asyncio.create_task(migration.run())
        await asyncio.wait_for(migration.full.wait(), TIMEOUT)
        await b.settled(timeout="10ms")
        assert migration.begun == PREFETCH
        migration.released.set()
        assert (await running).moved == number
