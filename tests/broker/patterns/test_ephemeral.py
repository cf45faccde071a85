"""Pattern 14: temporary delay queues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest

import bide
from bide.amqp.connection import Connection
from bide.delay.protocol import ExchangeTarget
from bide.errors import InvalidInputError, PublishRefusedError, ReservedHeaderError
from bide.messages.prepared import PreparedMessage
from bide.messaging.ephemeral import EphemeralDelays, retries_of
from bide.patterns.conventions import private_consumer_exchanges
from bide.patterns.delays import ephemeral_delay
from bide.topology import Queue, Topology
from tests.broker.patterns.queue_contents import bodies
from tests.broker.receiving import eventually, receive
from tests.support import Vhost
from tests.timeouts import TIMEOUT


def names(vhost: Vhost) -> set[str]:
    """All queues, and all exchanges that do not belong to the broker."""
    found = [
        one["name"] for kind in ("queues", "exchanges") for one in vhost.broker.management.call("GET", kind, vhost.name)
    ]
    return {name for name in found if name and not name.startswith("amq.")}


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
async def test_a_retry_arrives_after_its_delay_and_leaves_no_queue(
    client: bide.Client, vhost: Vhost, queue_type: str
) -> None:
    await client.declare(Topology(queues=[Queue.quorum("orders")]))
    delays = EphemeralDelays(client, queue_type=queue_type)
    await client.publish("order", to="orders", headers={"mine": 1}, message_id="one")
    started = time.monotonic()
    async with client.consume("orders") as messages:
        async for message in messages:
            retries = retries_of(message)
            if retries == 2:
                await delays.clear(message)
                await message.ack()
                break
            await delays.retry(message, delay="300ms", to="orders")
            assert len(names(vhost)) == 2  # its own queue, and the exchange and the queue where it waits, of one name
    assert time.monotonic() - started >= 0.6
    assert (message.message_id, message.headers["mine"], message.body) == ("one", 1, b"order")
    assert names(vhost) == {"orders"}


async def test_a_classic_queue_and_its_exchange_expire(
    client: bide.Client, connection: Connection, vhost: Vhost
) -> None:
    await client.declare(Topology(queues=[Queue.quorum("orders")]))
    await EphemeralDelays(client, queue_type="classic", grace="5s").send("order", delay="300ms", to="orders")
    (message,) = await receive(client, "orders", 1)
    assert message.body == b"order"

    async def gone() -> bool:
        return names(vhost) == {"orders"}

    await eventually(gone)


async def test_a_message_to_an_exchange_keeps_its_routing_key(client: bide.Client, connection: Connection) -> None:
    await client.declare(private_consumer_exchanges(messages=["m"], consumers={"q": ["m"]}, keys={"q": ["eu.#"]}))
    await EphemeralDelays(client).send("order", delay="100ms", exchange="q.private", routing_key="eu.new")
    (message,) = await receive(client, "q", 1)
    assert message.routing_key == "eu.new"


async def fill(client: bide.Client) -> None:
    """A queue that refuses: one message, and no place for another."""
    full = Queue.quorum("full", {"x-max-length": 1, "x-overflow": "reject-publish"})
    await client.declare(Topology(queues=[full]))
    refused = 0
    for number in range(5):  # a quorum queue notices a little later that it is full
        try:
            await client.publish(str(number), to="full")
        except PublishRefusedError:
            refused += 1
    assert refused


@pytest.mark.slow
async def test_a_quorum_queue_without_expiry_keeps_refused_messages(
    client: bide.Client, vhost: Vhost, quick_redelivery: None
) -> None:
    await fill(client)
    await EphemeralDelays(client).send("patient", delay="100ms", to="full")
    # The same with an expiry, as the pattern is usually described. One holds refused messages, one waiting ones.
    expiring = Topology()
    for name, delay in (("refused", "100ms"), ("waiting", "10m")):
        made = ephemeral_delay(name, delay=delay, to="full")
        (queue,) = made.queues
        mortal = Queue(name, arguments={**queue.arguments, "x-expires": 1000})
        expiring |= Topology(made.exchanges, [mortal], made.bindings)
    await client.declare(expiring, external={"full"})
    for name in ("refused", "waiting"):
        await client.publish(name, exchange=name)
    started = time.monotonic()
    while {"refused", "waiting"} & names(vhost):
        assert time.monotonic() - started < TIMEOUT, "they did not expire"
        await asyncio.sleep(0.3)  # between two declarations
        if time.monotonic() - started < 2:
            # A new declaration is use for a classic queue, and none for a quorum queue.
            await client.declare(expiring, external={"full"})
    assert any(name.startswith("bide.ephemeral.") for name in names(vhost))
    arrived = []
    async with client.consume("full") as messages, asyncio.timeout(TIMEOUT):
        async for message in messages:
            await message.ack()
            arrived.append(message.body)
            if message.body == b"patient":
                break
    assert b"refused" not in arrived


async def test_an_invalid_message_leaves_no_queue_behind(client: bide.Client, vhost: Vhost) -> None:
    delays = EphemeralDelays(client)
    with pytest.raises(InvalidInputError, match=r"with to=.*exchange="):
        await delays.send("x", delay="1s")
    with pytest.raises(ReservedHeaderError):
        await delays.send("x", delay="1s", to="orders", headers={"bide-due": 1})
    assert names(vhost) == set()


async def test_a_queue_that_cannot_be_removed_is_named(vhost: Vhost, caplog: pytest.LogCaptureFixture) -> None:
    def fill_and_fail(message: PreparedMessage) -> AbstractContextManager[Mapping[str, Any]]:
        assert isinstance(message.target, ExchangeTarget)
        with bide.connect_sync(vhost.url) as other:
            other.publish("of another client", exchange=message.target.exchange)
        raise InvalidInputError("no stamp")

    async with bide.connect(vhost.url, stamp=fill_and_fail) as client:
        await client.declare(Topology(queues=[Queue.quorum("orders")]))
        with pytest.raises(InvalidInputError, match="no stamp"):
            await EphemeralDelays(client).send("x", delay="1h", to="orders")
    (left,) = names(vhost) - {"orders"}
    assert any(one.getMessage().startswith(f"the queue {left} could not be deleted: ") for one in caplog.records)


async def test_clear_ignores_a_message_that_was_not_delayed(client: bide.Client, connection: Connection) -> None:
    await client.declare(Topology(queues=[Queue.quorum("orders")]))
    await client.publish("plain", to="orders")
    async with client.consume("orders") as messages:
        message = await anext(messages)
        assert not await EphemeralDelays(client).clear(message)
        await message.ack()
    assert await bodies(connection, "orders") == {"orders": []}
