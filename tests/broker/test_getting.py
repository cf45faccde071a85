"""Single messages, counts, purging, and settling by a block."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

import bide
from bide.errors import BrokerError, ConnectionLostError, DeliveryLostError, InvalidNameError, TargetNotFoundError
from tests.broker.receiving import connection_of, consuming_connection_of, eventually, fresh
from tests.support import Vhost
from tests.timeouts import TIMEOUT


@pytest.fixture
async def client(vhost: Vhost) -> AsyncIterator[bide.Client]:
    async with bide.connect(vhost.url) as client:
        yield client


@pytest.fixture
async def queue(client: bide.Client) -> str:
    name = fresh("q")
    await client.declare(bide.Topology(queues=[bide.Queue.quorum(name)]))
    return name


async def filled(client: bide.Client, queue: str, number: int) -> None:
    await client.publish_many(bide.OutgoingMessage(str(one), to=queue) for one in range(number))


async def test_get_returns_messages_in_order_and_then_none(client: bide.Client, queue: str) -> None:
    await filled(client, queue, 3)
    found = [await client.get(queue) for _ in range(4)]
    assert [one.body if one else None for one in found] == [b"0", b"1", b"2", None]
    for message in found[:3]:
        assert message is not None
        await message.ack()
    await client.close()


async def test_acknowledged_messages_are_gone_after_the_client_has_closed(vhost: Vhost) -> None:
    """A channel that closes right after an acknowledgement can lose it."""
    queue = fresh("q")
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        await filled(client, queue, 40)
    async with bide.connect(vhost.url) as client:
        while (message := await client.get(queue)) is not None:
            await message.ack()
            del message
            gc.collect()
    async with bide.connect(vhost.url) as client:
        assert await client.message_count(queue) == 0
        assert await client.get(queue) is None


async def test_unsettled_messages_return_when_the_client_closes(client: bide.Client, vhost: Vhost, queue: str) -> None:
    await filled(client, queue, 2)
    async with bide.connect(vhost.url) as other:
        assert await other.get(queue) is not None
        assert await client.message_count(queue) == 1

    async def is_back() -> bool:
        return await client.message_count(queue) == 2

    await eventually(is_back)


async def test_an_error_for_one_queue_leaves_the_messages_of_others(client: bide.Client, queue: str) -> None:
    await filled(client, queue, 1)
    message = await client.get(queue)
    assert message is not None
    with pytest.raises(TargetNotFoundError, match="nowhere"):
        await client.get("nowhere")
    await message.ack()
    assert await client.get(queue) is None


async def test_a_cancelled_get_keeps_no_message(client: bide.Client, queue: str) -> None:
    await client.get(queue)
    await filled(client, queue, 1)
    getting = asyncio.create_task(client.get(queue))
    # One turn of the loop sends the method, and its reply is read in a later one.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not getting.done()
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting

    async def is_back() -> bool:
        return await client.message_count(queue) == 1

    await eventually(is_back)


async def test_many_queues_share_the_channels_of_a_connection(vhost: Vhost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bide.client.getting._MAX_CHANNELS", 3)
    async with bide.connect(vhost.url) as client:
        names = [fresh("q") for _ in range(8)]
        await client.declare(bide.Topology(queues=[bide.Queue(name) for name in names]))
        for name in names:
            await client.publish(name, to=name)
        kept = [await client.get(names[0]), await client.get(names[1])]
        for name in names[2:]:
            message = await client.get(name)
            assert message is not None
            await message.ack()
        assert len((await consuming_connection_of(client))._channels) <= 3
        for message in kept:
            assert message is not None
            await message.ack()
        assert [await client.get(name) for name in names] == [None] * 8


async def test_a_lost_connection_returns_the_message_and_get_goes_on(client: bide.Client, queue: str) -> None:
    await filled(client, queue, 1)
    message = await client.get(queue)
    assert message is not None
    connection = await consuming_connection_of(client)
    connection.give_up(ConnectionLostError("the test cut it"))
    await connection.lost
    with pytest.raises(DeliveryLostError):
        await message.ack()
    again = None
    async with asyncio.timeout(TIMEOUT):
        while again is None:
            again = await client.get(queue)
    assert (again.body, again.redelivered) == (b"0", True)


async def test_purge_returns_the_number_of_ready_messages(client: bide.Client, queue: str) -> None:
    await filled(client, queue, 5)
    kept = await client.get(queue)
    assert kept is not None
    assert await client.message_count(queue) == 4
    assert await client.purge(queue) == 4
    assert await client.message_count(queue) == 0
    await kept.requeue()
    assert (await client.get(queue)) is not None


async def test_calls_for_a_missing_queue_say_so(client: bide.Client) -> None:
    for call in (client.get, client.purge, client.message_count):
        with pytest.raises(TargetNotFoundError, match="nowhere"):
            await call("nowhere")
        with pytest.raises(InvalidNameError):
            await call("x" * 256)


async def test_streams_are_refused_at_once(client: bide.Client) -> None:
    name = fresh("s")
    await client.declare(bide.Topology(queues=[bide.Queue(name, arguments={"x-queue-type": "stream"})]))
    for call in (client.get, client.purge):
        with pytest.raises(BrokerError, match="not supported by stream queues"):
            await asyncio.wait_for(call(name), TIMEOUT)
    assert await client.message_count(name) == 0


async def test_a_purge_is_repeated_when_its_connection_is_lost(client: bide.Client, queue: str) -> None:
    await filled(client, queue, 1)
    connection = await connection_of(client)
    purging = asyncio.create_task(client.purge(queue))
    await asyncio.sleep(0)  # sends the method
    connection.give_up(ConnectionLostError("the test cut it"))
    assert await purging in (0, 1)
    assert await client.message_count(queue) == 0


async def dead_lettering(client: bide.Client) -> tuple[str, str]:
    """A queue, and the queue of the messages that it dead-letters."""
    queue, dead = fresh("q"), fresh("dead")
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue, arguments), bide.Queue.quorum(dead)]))
    await client.publish("x", to=queue)
    return queue, dead


async def got(client: bide.Client, queue: str) -> bide.Message:
    """The next message, which may take a while to be there."""
    found: list[bide.Message] = []

    async def is_there() -> bool:
        message = await client.get(queue)
        found.extend([] if message is None else [message])
        return bool(found)

    await eventually(is_there)
    return found[0]


async def test_a_block_that_ends_acknowledges_the_message(client: bide.Client) -> None:
    queue, dead = await dead_lettering(client)
    message = await got(client, queue)
    async with message.process() as same:
        assert same is message
    assert message.settled
    assert [await client.get(queue), await client.get(dead)] == [None, None]


async def test_a_block_that_fails_rejects_the_message(client: bide.Client) -> None:
    queue, dead = await dead_lettering(client)
    with pytest.raises(KeyError):
        async with (await got(client, queue)).process():
            raise KeyError
    assert (await got(client, dead)).body == b"x"
    assert await client.message_count(queue) == 0


async def test_a_block_that_fails_requeues_the_message_on_request(client: bide.Client) -> None:
    queue, _ = await dead_lettering(client)
    with pytest.raises(KeyError):
        async with (await got(client, queue)).process(requeue=True):
            raise KeyError
    assert (await got(client, queue)).delivery_count == 1


async def test_a_cancelled_block_requeues_the_message(client: bide.Client) -> None:
    queue, _ = await dead_lettering(client)
    message = await got(client, queue)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1), message.process():
            await asyncio.sleep(60)  # until it is cancelled
    assert (await got(client, queue)).redelivered


async def test_a_message_that_the_block_settled_stays_as_it_is(client: bide.Client) -> None:
    queue, dead = await dead_lettering(client)
    async with (await got(client, queue)).process() as message:
        await message.reject()
    assert (await got(client, dead)).body == b"x"


async def test_the_error_of_a_block_is_kept_when_the_connection_is_lost(
    client: bide.Client, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    await filled(client, queue, 2)
    caplog.set_level(logging.INFO, logger="bide")
    connection = await consuming_connection_of(client)

    async def lose() -> None:
        connection.give_up(ConnectionLostError("the test cut it"))
        await connection.lost

    async def fail() -> None:
        async with (await got(client, queue)).process():
            await lose()
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    assert "can no longer be settled" in caplog.text
    connection = await consuming_connection_of(client)
    with pytest.raises(DeliveryLostError):
        async with (await got(client, queue)).process():
            await lose()


def test_the_synchronous_client_gets_counts_purges_and_processes(vhost: Vhost) -> None:
    queue, dead = fresh("q"), fresh("dead")
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum(queue, arguments), bide.Queue.quorum(dead)]))
        for number in range(4):
            client.publish(str(number), to=queue)
        assert client.message_count(queue) == 4
        message = client.get(queue)
        assert message is not None
        with message.process():
            assert message.body == b"0"
        message = client.get(queue)
        assert message is not None
        with pytest.raises(KeyError), message.process():
            raise KeyError
        assert client.purge(queue) == 2
        assert client.get(queue) is None
        with client.consume(dead, timeout=timedelta(seconds=TIMEOUT)) as messages, next(messages).process() as parked:
            assert parked.body == b"1"
