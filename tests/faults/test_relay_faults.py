"""Relays on a broker that blocks publishers, and on one that is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

import bide
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.local_broker import LocalBroker
from bide.relay import Relay
from bide.topology import Queue, Topology
from tests.broker.receiving import connected, eventually, ready
from tests.broker.workers import at_work
from tests.faults.conftest import DedicatedBroker
from tests.support import Rabbitmq, flush_declarations
from tests.timeouts import TIMEOUT

HALL = bide.WaitingHall(prefix="faults", levels=4, resolution=timedelta(milliseconds=100))


@asynccontextmanager
async def relaying(url: str) -> AsyncIterator[Relay]:
    """A relay at work, which ends in time whatever the broker does."""
    relay = Relay(url, hall=HALL, allow=["*"], grace="1s")
    async with at_work(relay):
        yield relay


@pytest.fixture
def own_broker(rabbitmq: Rabbitmq) -> Iterator[LocalBroker]:
    """A broker for one test, so that its many kills do not affect other tests."""
    with rabbitmq.start(ephemeral=True) as broker:
        yield broker


@pytest.mark.long
@pytest.mark.slow
async def test_a_hall_that_a_relay_declared_does_not_lose_messages_when_its_node_is_killed(
    own_broker: LocalBroker,
) -> None:
    """A quorum queue that was declared a moment before comes back empty, unless another one was declared after it."""
    broker = own_broker
    hall = bide.WaitingHall(prefix="killed", levels=4, resolution=timedelta(hours=1))
    names = {one.name for one in hall.topology().queues}.difference(hall.relay_queues)
    for number in range(3):
        url = broker.add_vhost(f"hall-{number}")
        async with bide.connect(url) as client:
            relay = Relay(url, hall=hall, allow=["*"])
            async with at_work(relay):
                await asyncio.gather(*(client.publish(b"", to=name) for name in names))
                await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.restart)
            async with connected(url) as connection:

                async def all_there(connection: Connection = connection) -> bool:
                    return [await ready(connection, name) for name in names] == [1] * len(names)

                await eventually(all_there)


async def test_a_relay_can_be_stopped_while_publishers_are_blocked(dedicated: DedicatedBroker) -> None:
    """Unsettled messages are not lost, whether they are due or have to wait."""
    broker = dedicated.broker
    async with bide.connect(broker.url, infrastructure=HALL) as client:
        await client.declare(Topology(queues=[Queue.quorum("relayed")]))
        await client.bind("relayed")
        delays = ("100ms", "5s")
        await client.publish_many(bide.OutgoingMessage(f"{n}", to="relayed", delay=delays[n % 2]) for n in range(50))
        connection = await Connection.open(BrokerUrl.parse(broker.url))
        try:
            await asyncio.to_thread(broker.rabbitmqctl, "set_vm_memory_high_watermark", "0.000001")
            async with relaying(broker.url) as relay:

                async def has_unsettled() -> bool:
                    return not sum([await ready(connection, name) for name in HALL.relay_queues])

                await eventually(has_unsettled)
            done = relay.done
            assert done.delivered + done.delayed + done.rounds < 50
        finally:
            await asyncio.to_thread(broker.rabbitmqctl, "set_vm_memory_high_watermark", "0.6")
        await connection.close()
        bodies: set[bytes] = set()
        async with relaying(broker.url), asyncio.timeout(TIMEOUT), client.consume("relayed") as messages:
            async for message in messages:
                await message.ack()
                bodies.add(message.body)
                if len(bodies) == 50:
                    break


async def test_a_broker_killed_while_relays_work_loses_nothing(dedicated: DedicatedBroker) -> None:
    """All of the messages arrive, none too early; the relays see to themselves."""
    count = 500
    broker = dedicated.broker
    async with bide.connect(broker.url, infrastructure=HALL) as client:
        await client.declare(Topology(queues=[Queue.quorum("through-a-crash")]))
        await client.bind("through-a-crash")
        await asyncio.to_thread(flush_declarations, broker)
        async with relaying(broker.url), relaying(broker.url):
            outgoing = (
                bide.OutgoingMessage(f"{n}", to="through-a-crash", delay=f"{100 + 5 * n}ms") for n in range(count)
            )
            await client.publish_many(outgoing)
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.restart)
            bodies: set[bytes] = set()
            async with asyncio.timeout(TIMEOUT), client.consume("through-a-crash") as messages:
                async for message in messages:
                    await message.ack()
                    assert message.lateness is not None
                    assert message.lateness >= timedelta(0)
                    bodies.add(message.body)
                    if len(bodies) == count:
                        break
