"""Queues that belong to one client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta

import pytest

import bide
from bide.errors import AccessRefusedError, BrokerError, InvalidTopologyError, PublishRefusedError, TargetNotFoundError
from tests.broker.receiving import eventually, fresh
from tests.faults.proxy import Proxy
from tests.support import Vhost
from tests.timeouts import TIMEOUT

EVENTS = bide.Topology(exchanges=[bide.Exchange("events", "topic")])


@pytest.fixture
async def client(vhost: Vhost, quiet: None) -> AsyncIterator[bide.Client]:
    async with bide.connect(vhost.url) as client:
        await client.declare(EVENTS)
        yield client


async def test_each_client_gets_the_events_that_its_queue_is_bound_to(client: bide.Client, vhost: Vhost) -> None:
    async with bide.connect(vhost.url) as other:
        both = {one: await one.private_queue(bindings=[("events", "order.*")]) for one in (client, other)}
        assert len(set(both.values())) == 2
        await client.publish("x", exchange="events", routing_key="order.created")
        for one, queue in both.items():
            async with one.consume(queue, timeout=timedelta(seconds=TIMEOUT)) as messages:
                message = await anext(messages)
                assert (message.body, message.routing_key) == (b"x", "order.created")
                await message.ack()


async def test_a_private_queue_has_all_calls_of_a_queue(client: bide.Client) -> None:
    queue = await client.private_queue()
    for body in "abc":
        await client.publish(body, to=queue)
    assert await client.exists(queue)
    assert await client.message_count(queue) == 3
    message = await client.get(queue)
    assert message is not None
    await message.ack()
    assert await client.purge(queue) == 2


async def test_the_queue_is_gone_with_its_client(client: bide.Client, vhost: Vhost) -> None:
    async with bide.connect(vhost.url) as other:
        queue = await other.private_queue()
        with pytest.raises(AccessRefusedError, match="exclusive to another connection"):
            await client.message_count(queue)

    async def is_gone() -> bool:
        return not await client.exists(queue)

    await eventually(is_gone)


async def test_a_consumer_continues_with_its_bindings_after_a_lost_connection(vhost: Vhost, proxy: Proxy) -> None:
    async with bide.connect(proxy.url) as client, bide.connect(vhost.url) as other:
        await client.declare(EVENTS)
        queue = await client.private_queue(bindings=[("events", "#")])
        async with client.consume(queue) as messages:
            for number in range(3):

                async def receive(body: bytes = str(number).encode()) -> bide.Message:
                    """The first event of this round: several of an earlier one may have arrived before its end."""
                    while (message := await anext(messages)).body != body:
                        pass
                    return message

                receiving = asyncio.ensure_future(receive())

                # Events are lost while no queue is bound, and with the queue of the lost connection. The broker refuses
                # one while that queue ends.
                async def is_received(
                    body: str = str(number), receiving: asyncio.Future[bide.Message] = receiving
                ) -> bool:
                    with suppress(PublishRefusedError):
                        await other.publish(body, exchange="events", routing_key="k", mandatory=False)
                    return receiving.done()

                await eventually(is_received)
                await receiving.result().ack()
                proxy.cut()


async def test_get_works_after_a_lost_connection(proxy: Proxy) -> None:
    async with bide.connect(proxy.url) as client:
        queue = await client.private_queue()
        for body in (b"0", b"1"):
            assert await client.get(queue) is None
            await client.publish(body, to=queue)
            message = await client.get(queue)
            assert message is not None
            assert message.body == body
            proxy.cut()


async def test_a_missing_exchange_is_an_error_and_leaves_no_queue(client: bide.Client) -> None:
    with pytest.raises(TargetNotFoundError, match="nowhere"):
        await client.private_queue(bindings=[("nowhere", "k")])
    assert await client.private_queue(bindings=[("events", "k")])


async def test_messages_cannot_be_delayed_to_it(client: bide.Client) -> None:
    queue = await client.private_queue()
    with pytest.raises(BrokerError, match="exclusive to another connection"):
        await client.publish(b"", to=queue, delay="1s")


@pytest.mark.parametrize(
    ("queue", "problem"),
    [
        (bide.Queue("own", durable=False, exclusive=True), "'own' is exclusive"),
        (bide.Queue(""), "a queue has no name"),
    ],
)
async def test_queues_that_the_client_could_not_use_are_refused(
    client: bide.Client, queue: bide.Queue, problem: str
) -> None:
    with pytest.raises(InvalidTopologyError, match=rf"{problem}.*private_queue\(\)"):
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(fresh("q")), queue]))


async def test_the_synchronous_client_has_private_queues(vhost: Vhost) -> None:
    def exchange() -> bytes:
        with bide.connect_sync(vhost.url) as client:
            queue = client.private_queue()
            client.publish("x", to=queue)
            patience = timedelta(seconds=TIMEOUT)
            with client.consume(queue, timeout=patience) as messages, next(messages).process() as message:
                return message.body

    assert await asyncio.to_thread(exchange) == b"x"
