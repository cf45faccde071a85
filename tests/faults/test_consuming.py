"""Lost connections of a consumer, and redelivery of unsettled messages."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Literal

import pytest

import bide
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.errors import (
    AccessRefusedError,
    BrokerUnreachableError,
    ClosedError,
    ConnectionLostError,
    ConsumerCancelledError,
    DeliveryLostError,
    ManagementApiError,
    TargetNotFoundError,
)
from tests.broker.receiving import (
    connection_of,
    consuming_connection_of,
    eventually,
    fresh,
    ready,
    receive,
    until_ready,
)
from tests.faults.proxy import CONSUME, Proxy
from tests.support import Vhost
from tests.timeouts import MAX_LATENESS, TIMEOUT


async def filled(url: str, number: int, *, kind: str = "quorum") -> str:
    """A queue with ``number`` messages: "0", "1", ..."""
    queue = fresh("q")
    async with bide.connect(url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue(queue, arguments={"x-queue-type": kind})]))
        await asyncio.gather(*(client.publish(str(one), to=queue, message_id=str(one)) for one in range(number)))
    return queue


async def test_a_message_held_at_a_cut_cannot_be_settled_and_is_redelivered(vhost: Vhost, proxy: Proxy) -> None:
    queue = await filled(vhost.url, 1)
    async with bide.connect(proxy.url) as client, asyncio.timeout(TIMEOUT), client.consume(queue) as messages:
        message = await anext(messages)
        proxy.cut()
        await eventually(partial(_is_off, messages))
        with pytest.raises(DeliveryLostError, match="'0' can no longer be settled: the broker delivers it again"):
            await message.ack()
        again = await anext(messages)
        assert (again.message_id, again.body, again.redelivered) == ("0", b"0", True)
        await again.ack()


async def test_prefetched_messages_are_not_delivered_twice_after_a_cut(vhost: Vhost, proxy: Proxy) -> None:
    queue = await filled(vhost.url, 20)
    async with (
        bide.connect(proxy.url) as client,
        asyncio.timeout(TIMEOUT),
        client.consume(queue, prefetch=10) as messages,
    ):
        received = []
        async for message in messages:
            received.append(message.message_id)
            await message.ack()
            if len(received) == 5:
                # 20 in all, 5 acknowledged, 10 prefetched: 5 are ready once the broker has the acknowledgements.
                await until_ready(vhost.url, queue, 5)
                proxy.cut()
                await eventually(partial(_is_off, messages))
            if len(received) == 20:
                break
        # Every message once, those that were prefetched at the cut too.
        assert sorted(received, key=lambda one: int(one or -1)) == [str(one) for one in range(20)]


async def _is_off(consumer: bide.Consumer) -> bool:
    return not consumer.subscribed


@pytest.mark.parametrize("where", ["before", "inside", "deaf"])
async def test_cuts_while_subscribing_are_retried(
    vhost: Vhost, proxy: Proxy, where: Literal["before", "inside", "deaf"]
) -> None:
    queue = await filled(vhost.url, 3)
    async with bide.connect(proxy.url) as client, asyncio.timeout(TIMEOUT), client.consume(queue) as messages:
        await (await anext(messages)).ack()
        proxy.on_method[CONSUME] = where
        proxy.cut()
        await eventually(partial(_is_off, messages))
        receiving = asyncio.create_task(anext(messages))

        async def was_delivered() -> bool:
            return CONSUME not in proxy.on_method

        await eventually(was_delivered)
        if where == "deaf":
            proxy.cut()
        message = await receiving
        await message.ack()
        await (await anext(messages)).ack()
    connection = await Connection.open(BrokerUrl.parse(vhost.url))
    assert await ready(connection, queue) <= 1
    await connection.close()


async def test_errors_of_the_first_subscription_are_raised(vhost: Vhost, proxy: Proxy) -> None:
    async with bide.connect(proxy.url) as client:
        with pytest.raises(TargetNotFoundError, match=r"'missing'.*declare it first"):
            await anext(client.consume("missing"))
    queue = await filled(vhost.url, 1)
    async with bide.connect(proxy.url) as client:
        proxy.refusing = True
        with pytest.raises(BrokerUnreachableError, match=r"refused|handshake"):
            await anext(client.consume(queue))
        proxy.refusing = False
        await (await anext(client.consume(queue))).ack()


async def test_a_queue_deleted_during_a_cut_is_an_error(vhost: Vhost, proxy: Proxy) -> None:
    queue = await filled(vhost.url, 1)
    async with bide.connect(proxy.url) as client, client.consume(queue) as messages:
        await anext(messages)
        proxy.refusing = True
        proxy.cut()
        waiting = asyncio.create_task(anext(messages))
        connection = await Connection.open(BrokerUrl.parse(vhost.url))
        async with await connection.channel() as channel:
            await channel.delete_queue(queue)
        await connection.close()
        proxy.refusing = False
        # Cancelled by the broker before the cut was seen, or not found after it.
        with pytest.raises((TargetNotFoundError, ConsumerCancelledError), match=queue):
            async with asyncio.timeout(TIMEOUT):
                await waiting


async def test_an_exclusive_consumer_waits_until_the_broker_closes_its_old_connection(
    vhost: Vhost, proxy: Proxy
) -> None:
    queue = await filled(vhost.url, 2, kind="classic")
    # Without heartbeats, so that only the test ends the old connection.
    url = f"{proxy.url}?heartbeat=0"
    async with bide.connect(url) as client, client.consume(queue, exclusive=True) as messages:
        await (await anext(messages)).ack()
        stranded = proxy.strand()
        await eventually(partial(_is_off, messages))
        async with bide.connect(vhost.url) as other:
            with pytest.raises(AccessRefusedError, match="another consumer uses it exclusively"):
                await anext(other.consume(queue, exclusive=True))
        refusals = 0

        def count(data: bytes) -> bytes:
            nonlocal refusals
            refusals += data.count(b"in exclusive use")
            return data

        async def is_refused() -> bool:
            return refusals >= 2

        proxy.rewrite = count
        receiving = asyncio.create_task(anext(messages))
        await eventually(is_refused)
        assert not receiving.done()
        # As the broker does when it misses the heartbeats.
        for pair in stranded:
            pair.abort()
        async with asyncio.timeout(TIMEOUT):
            await (await receiving).ack()


@pytest.mark.parametrize("sending", [False, True])
async def test_a_silent_broker_is_noticed_by_its_missing_heartbeats(vhost: Vhost, proxy: Proxy, sending: bool) -> None:
    queue = await filled(vhost.url, 1)
    async with bide.connect(f"{proxy.url}?heartbeat=1", timeout="60s") as client:
        await client.publish(b"", to=queue)
        consumer = client.consume(queue, prefetch=1)
        first = await anext(consumer)
        # On a slow machine this may be a second one: a broker gives up a silent client, too.
        connection = await connection_of(client)
        # What a client sent may wait in its socket, which then must not keep the connection open.
        stuck = asyncio.create_task(client.publish(b"x" * 4_000_000, to=queue)) if sending else None
        proxy.stall()
        started = asyncio.get_running_loop().time()
        async with asyncio.timeout(TIMEOUT):
            error = await connection.lost
        assert isinstance(error, ConnectionLostError)
        assert "silent for" in str(error)
        now = asyncio.get_running_loop().time()
        # A slow broker may have said nothing for a while before that.
        assert now - connection.heartbeat.received_at >= 1.5
        assert now - started < MAX_LATENESS.total_seconds()
        await eventually(partial(_is_off, consumer))
        proxy.moving.set()
        if stuck is not None:
            # More than twice if the machine pauses for the two seconds after which these heartbeats count as missing.
            assert (await stuck).attempts >= 2
        async with asyncio.timeout(TIMEOUT):
            # The broker gives the others out as long as it does not know that the old connection has ended.
            while (again := await anext(consumer)).message_id != first.message_id:
                await again.ack()
        await again.ack()


async def test_an_idle_connection_is_kept_by_heartbeats(vhost: Vhost, proxy: Proxy) -> None:
    queue = await filled(vhost.url, 1)
    async with bide.connect(f"{proxy.url}?heartbeat=3") as client, client.consume(queue) as messages:
        message = await anext(messages)
        await asyncio.sleep(9.5)  # longer than both sides wait for a sign of life
        await message.ack()
        await client.publish(b"", to=queue)
        await anext(messages)
    assert proxy.accepted == 2


async def test_a_half_closed_connection_is_reopened(vhost: Vhost, proxy: Proxy) -> None:
    queue = await filled(vhost.url, 1)
    async with bide.connect(proxy.url) as client, client.consume(queue) as messages:
        message = await anext(messages)
        proxy.half_close()
        async with asyncio.timeout(TIMEOUT):
            again = await anext(messages)
            assert again.message_id == message.message_id
            await again.ack()
            await client.publish(b"", to=queue)


async def test_a_connection_closed_by_the_broker_is_reopened(vhost: Vhost) -> None:
    """As an operator does it on the management page, or a node that shuts down."""
    queue = await filled(vhost.url, 2)
    name = fresh("connection")
    management = vhost.broker.management
    async with bide.connect(f"{vhost.url}?name={name}") as client, client.consume(queue, prefetch=1) as messages:
        first = await anext(messages)

        async def closed() -> bool:
            # The page knows of a connection some seconds after it was opened, and until some time after its end.
            if first.lost:
                return True
            for one in management.call("GET", "connections"):
                if one.get("client_properties", {}).get("connection_name", "").startswith(name):
                    # It may be one that was closed at the last look, and is still listed.
                    with suppress(ManagementApiError):
                        management.call("DELETE", "connections", one["name"])
            return first.lost

        await eventually(closed, step=0.5)
        with pytest.raises(DeliveryLostError, match="closed the connection"):
            await first.ack()
        async with asyncio.timeout(TIMEOUT):
            assert (await anext(messages)).message_id == first.message_id
            await client.publish(b"", to=queue)


async def test_a_consumer_whose_channel_is_closed_subscribes_again(vhost: Vhost) -> None:
    """RabbitMQ closes the channel of a consumer that keeps a message too long, as it does after a wrong settlement."""
    queue = await filled(vhost.url, 2)
    async with bide.connect(vhost.url) as client, client.consume(queue, prefetch=1) as messages:
        message = await anext(messages)
        assert message._subscription is not None
        message._subscription.channel.ack(77)
        async with asyncio.timeout(TIMEOUT):
            again = await anext(messages)
        assert (again.message_id, again.redelivered) == (message.message_id, True)
        with pytest.raises(DeliveryLostError, match="unknown delivery tag 77"):
            await message.ack()
        await again.ack()


@pytest.mark.parametrize("how", ["close", "stop", "client"])
async def test_closing_a_consumer_ends_waiting_for_an_absent_broker(vhost: Vhost, proxy: Proxy, how: str) -> None:
    queue = await filled(vhost.url, 1)
    client = await bide.connect(proxy.url)
    messages = client.consume(queue)
    await (await anext(messages)).ack()
    proxy.refusing = True
    proxy.cut()
    waiting = [asyncio.create_task(anext(messages, None)) for _ in range(2)]
    accepted = proxy.accepted

    async def was_delivered() -> bool:
        return proxy.accepted > accepted

    await eventually(was_delivered)
    assert not any(one.done() for one in waiting)
    if how == "stop":
        messages.stop()
        # And once more, before any of them had a chance to notice.
        messages.stop()
    else:
        await (messages if how == "close" else client).close()
    async with asyncio.timeout(TIMEOUT):
        assert await asyncio.gather(*waiting) == [None, None]
    await client.close()


async def test_a_message_delivered_while_the_consumer_closes_is_requeued(vhost: Vhost, proxy: Proxy) -> None:
    queue = await filled(vhost.url, 1)
    async with bide.connect(proxy.url) as client, bide.connect(vhost.url) as other, asyncio.timeout(TIMEOUT):
        messages = client.consume(queue)
        await (await anext(messages)).ack()
        waiting = asyncio.create_task(anext(messages, None))
        # While it waits for the broker to take the acknowledgement in, another message comes.
        proxy.stall()
        closing = asyncio.create_task(messages.close())
        await other.publish("late", to=queue)
        proxy.moving.set()
        assert await waiting is None
        await closing
        assert [one.body for one in await receive(other, queue, 1)] == [b"late"]


async def test_a_cancelled_close_leaves_no_connection_open(vhost: Vhost, proxy: Proxy) -> None:
    queue = await filled(vhost.url, 2)
    client = await bide.connect(proxy.url)
    messages = client.consume(queue)
    first, second = await anext(messages), await anext(messages)
    await first.ack()
    connections = [await consuming_connection_of(client), await connection_of(client)]
    proxy.stall()
    started = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.close(), 0.3)
    assert asyncio.get_running_loop().time() - started < MAX_LATENESS.total_seconds()
    assert [one.is_open for one in connections] == [False, False]
    with pytest.raises(DeliveryLostError):
        await second.ack()
    with pytest.raises(ClosedError):
        await client.release()


@pytest.mark.parametrize("ending", ["consumer", "stopped consumer", "client", "got messages"])
async def test_acks_just_before_the_close_are_processed(vhost: Vhost, ending: str) -> None:
    """A quorum queue takes in 32 at a time, and the broker forgets the others of a channel that closes meanwhile."""
    queue = await filled(vhost.url, 600)
    client = await bide.connect(vhost.url)
    consumer = client.consume(queue, prefetch=1_000)
    if ending == "got messages":
        received = [message for _ in range(600) if (message := await client.get(queue))]
    else:
        received = [await anext(consumer) for _ in range(600)]
    if ending == "stopped consumer":
        consumer.stop()
    # Where there is a gap between any two, each is acknowledged by a frame of its own.
    for message in received[1::2]:
        await message.ack()
    if ending.endswith("consumer"):
        await consumer.close()
    await client.close()
    # A queue takes back what was not acknowledged a moment after the channel has closed.
    await until_ready(vhost.url, queue, 300)


async def test_a_close_with_acks_keeps_the_order_and_touches_no_message_that_waits(vhost: Vhost) -> None:
    queue = await filled(vhost.url, 400)
    async with bide.connect(vhost.url) as client, client.consume(queue, prefetch=100) as messages:
        received = [await anext(messages) for _ in range(100)]
        for message in received[1::2]:
            await message.ack()
    left = [str(number) for number in range(400) if number > 100 or number % 2 == 0]
    await until_ready(vhost.url, queue, len(left))
    async with bide.connect(vhost.url) as client:
        rest = await receive(client, queue, len(left))
    assert [one.message_id for one in rest] == left
    # The prefetch of the first consumer, and not one more.
    assert [one.redelivered for one in rest] == [True] * 100 + [False] * (len(left) - 100)


async def test_a_consumer_that_stops_keeps_its_acks_and_touches_no_message_that_waits(vhost: Vhost) -> None:
    queue = await filled(vhost.url, 400)
    async with bide.connect(vhost.url) as client, client.consume(queue, prefetch=100) as messages:
        received = [await anext(messages) for _ in range(100)]
        messages.stop()
        assert received[0]._subscription is not None
        channel = received[0]._subscription.channel
        for message in reversed(received):
            await message.ack()
            channel.flush_acks()
    await until_ready(vhost.url, queue, 300)
    async with bide.connect(vhost.url) as client:
        rest = await receive(client, queue, 300)
    assert [one.message_id for one in rest] == [str(number) for number in range(100, 400)]
    assert not any(one.redelivered for one in rest)


async def test_a_close_asks_nothing_after_few_acks(vhost: Vhost) -> None:
    queue = await filled(vhost.url, 60)
    async with bide.connect(vhost.url) as client, client.consume(queue, prefetch=100) as messages:
        received = [await anext(messages) for _ in range(60)]
        for message in received[1::2]:
            await message.ack()
        assert received[0]._subscription is not None
        channel = received[0]._subscription.channel
        closing = asyncio.create_task(channel.settle_acks())
        await asyncio.sleep(0)  # one turn of the loop, in which no answer of the broker can arrive
        assert closing.done()


async def test_acks_just_before_the_close_of_an_exclusive_consumer_are_processed(vhost: Vhost) -> None:
    queue = await filled(vhost.url, 200, kind="classic")
    async with bide.connect(vhost.url) as client, client.consume(queue, prefetch=200, exclusive=True) as messages:
        received = [await anext(messages) for _ in range(200)]
        for message in received[1::2]:
            await message.ack()
    async with bide.connect(vhost.url) as client:
        assert [one.body for one in await receive(client, queue, 100)] == [one.body for one in received[::2]]
        assert await client.get(queue) is None


async def has_consumers(vhost: Vhost, number: int) -> bool:
    """Whether a virtual host has a number of consumers. In RabbitMQ 3.10, a queue counts only those that are active."""
    found = await asyncio.to_thread(
        vhost.broker.rabbitmqctl, "list_consumers", "--vhost", vhost.name, "--no-table-headers", "--quiet"
    )
    return len(found.splitlines()) == number


async def test_a_close_keeps_the_order_of_a_queue_with_a_single_active_consumer(vhost: Vhost) -> None:
    queue = fresh("q")
    ordered = bide.Queue.quorum(queue, arguments={"x-single-active-consumer": True})
    async with bide.connect(vhost.url) as first, bide.connect(vhost.url) as second:
        await first.declare(bide.Topology(queues=[ordered]))
        for number in range(300):
            await first.publish(str(number), to=queue)
        async with first.consume(queue, prefetch=200) as active:
            received = [await anext(active) for _ in range(200)]
            successor = asyncio.create_task(receive(second, queue, 200))
            await eventually(lambda: has_consumers(vhost, 2))
            for message in received[1::2]:
                await message.ack()
        left = [one.body for one in received[::2]] + [str(number).encode() for number in range(200, 300)]
        assert [one.body for one in await successor] == left
