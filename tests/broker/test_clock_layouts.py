"""Clients with different settings of ``Clock`` on one virtual host."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

import bide
from bide.admin.apply import apply
from bide.admin.destroy import destroy
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.errors import InvalidDelayError, NotAppliedError, NotEmptyError
from bide.topology import Queue
from tests.broker.conftest import LONG_CLOCK, SMALL_CLOCK
from tests.broker.receiving import eventually, fresh, ready, receive

if TYPE_CHECKING:
    from tests.support import Vhost


async def test_clients_of_different_resolutions_share_a_broker(vhost: Vhost) -> None:
    coarse = bide.Clock(max_delay=timedelta(seconds=5), resolution=timedelta(seconds=1))
    fine = bide.Clock(max_delay=timedelta(seconds=5), resolution=timedelta(milliseconds=100))
    async with (
        bide.connect(vhost.url, infrastructure=coarse) as rough,
        bide.connect(vhost.url, infrastructure=fine) as precise,
    ):
        await rough.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        await rough.publish(b"rough", to="q", delay="1.3s")
        await precise.publish(b"precise", to="q", delay="1.3s")
        messages = await receive(rough, "q", 2)
        with pytest.raises(InvalidDelayError, match=r"0:00:06 .*\(0:00:05\)"):
            await rough.publish(b"", to="q", delay="6s")
    lateness = {message.body: message.lateness or timedelta(-1) for message in messages}
    assert lateness[b"precise"] >= timedelta(0)
    # The rough client rounds 1.3 s up to 2 s; the due time stays what was asked for.
    assert lateness[b"rough"] >= timedelta(milliseconds=700)


async def test_messages_for_a_deleted_digit_queue_are_set_aside(vhost: Vhost) -> None:
    """A publisher whose queues were destroyed after its check, by a client with other settings."""
    small = bide.Clock(max_delay=timedelta(seconds=1), resolution=timedelta(milliseconds=500))
    big = bide.Clock(max_delay=timedelta(seconds=2), resolution=timedelta(milliseconds=500))
    async with bide.connect(vhost.url, infrastructure=big) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        await client.publish(b"known", to="q", delay="2s")
        (known,) = await receive(client, "q", 1)
        assert known.body == b"known"
        connection = await Connection.open(BrokerUrl.parse(vhost.url))
        missing = big.topology().diff(small.topology()).removed
        assert [queue.name for queue in missing.queues] == ["bide.v1.s2"]
        channel = await connection.channel()
        await channel.delete_queue("bide.v1.s2")
        await client.publish(b"set aside", to="q", delay="2s")
        (message,) = await receive(client, small.undeliverable, 1)
        assert message.body == b"set aside"
        await connection.close()


async def test_lanes_keep_order_and_share_a_prefix_with_one_lane(vhost: Vhost) -> None:
    laned = replace(SMALL_CLOCK, lanes=3)
    async with (
        bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as single,
        bide.connect(vhost.url, infrastructure=laned) as several,
    ):
        await single.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        await single.publish(b"single", to="q", delay="1s")
        for number in range(60):
            await several.publish(str(number), to="q", delay="1s", message_id=f"m{number}")
        messages = await receive(single, "q", 61)
        assert len({message.message_id for message in messages}) == 61
        by_lane: dict[str, list[int]] = {}
        for message in messages:
            if message.body != b"single":
                queue = message.raw.values["headers"]["x-first-death-queue"]
                by_lane.setdefault(queue, []).append(int(message.body))
    assert set(by_lane) == {"bide.v1.s1", "bide.v1.s1/1", "bide.v1.s1/2"}
    assert all(numbers == sorted(numbers) for numbers in by_lane.values())


async def test_two_prefixes_are_separate(vhost: Vhost) -> None:
    one, two = replace(SMALL_CLOCK, prefix="one"), replace(SMALL_CLOCK, prefix="two")
    async with bide.connect(vhost.url, infrastructure=one) as first:
        await first.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        await first.publish(b"first", to="q", delay="300ms")
        async with bide.connect(vhost.url, infrastructure=two, declare=False) as second:
            with pytest.raises(NotAppliedError, match=r"bide\.admin\.infrastructure\.install"):
                await second.publish(b"second", to="q", delay="300ms")
        (message,) = await receive(first, "q", 1)
        assert message.body == b"first"


async def test_destroy_removes_only_its_own_queues(vhost: Vhost) -> None:
    connection = await Connection.open(BrokerUrl.parse(vhost.url))
    other = replace(LONG_CLOCK, prefix="other")
    await apply(connection, LONG_CLOCK.topology())
    await apply(connection, other.topology())
    async with bide.connect(vhost.url, infrastructure=LONG_CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        await client.publish(b"waiting", to="q", delay="5m")
    with pytest.raises(NotEmptyError, match=r"1 message waits in bide\.v1\.m5 \(1\)"):
        await destroy(connection, LONG_CLOCK.topology())
    removed = await destroy(connection, LONG_CLOCK.topology(), force=True)
    assert (removed.queues, removed.messages) == (len(LONG_CLOCK.topology().queues), 1)
    assert await ready(connection, "q") == 0
    assert await ready(connection, other.undeliverable) == 0
    again = await destroy(connection, LONG_CLOCK.topology())
    assert again.queues == 0
    await connection.close()


async def test_a_received_message_can_be_delayed_again_with_all_its_headers(vhost: Vhost) -> None:
    """RabbitMQ below 4.0.1 takes a copied x-death for a cycle, and then holds the message for ever."""
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        headers: dict[str, object] = {"mine": 1}
        for _ in range(3):
            await client.publish(b"x", to="q", delay="1.05s", headers=headers, message_id="same")
            (message,) = await receive(client, "q", 1)
            assert message.headers == {"mine": 1}
            # All that came over the wire, as a careless program sends it on, less what is bide's own.
            raw = message.raw.values["headers"]
            assert "x-death" in raw
            headers = {name: value for name, value in raw.items() if not name.startswith("bide-") and name != "CC"}


async def test_a_clock_with_all_371_queues_uses_every_level(vhost: Vhost) -> None:
    """All 371 queues, and every level entered."""
    clock = bide.Clock()
    queue = fresh("q")
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        delays = [clock.max_delay, *(timedelta(days=days) for days in (100, 1)), timedelta(hours=1, seconds=1)]
        receipts = await asyncio.gather(*(client.publish(b"", to=queue, delay=delay) for delay in delays))
        assert [receipt.hops for receipt in receipts] == [6, 1, 1, 2]
        await client.publish(b"soon", to=queue, delay="1.23s")
        (message,) = await receive(client, queue, 1)
        assert message.body == b"soon"
        connection = await Connection.open(BrokerUrl.parse(vhost.url))

        async def waiting() -> bool:
            return [await ready(connection, f"bide.v1.{name}") for name in ("e31", "e1", "d1", "h1")] == [1, 1, 1, 1]

        await eventually(waiting)
        channel = await connection.channel()
        reply = await channel.declare_queue(Queue(clock.undeliverable), passive=True)
        assert reply.message_count == 0
        await connection.close()
