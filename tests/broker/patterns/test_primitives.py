"""The features of RabbitMQ that the patterns use."""

from __future__ import annotations

import time

import pytest

import bide
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.errors import AccessRefusedError, TargetNotFoundError, UnroutableError
from bide.patterns import primitives
from bide.topology import Exchange, Queue, Topology
from tests.broker.patterns.queue_contents import bodies, take_all
from tests.broker.receiving import eventually, receive
from tests.support import Vhost

BOTH_TYPES = pytest.mark.parametrize("queue_type", ["classic", "quorum"])


async def is_there(connection: Connection, thing: Exchange | Queue) -> bool:
    channel = await connection.channel()
    try:
        if isinstance(thing, Queue):
            await channel.declare_queue(thing, passive=True)
        else:
            await channel.declare_exchange(thing, passive=True)
    except TargetNotFoundError:
        return False
    await channel.close()
    return True


async def test_carbon_copies_reach_cc_and_bcc_queues_once(client: bide.Client, connection: Connection) -> None:
    await client.declare(primitives.carbon_copies("desk", queues=["a", "b", "c", "d"]))
    headers = {"CC": ["b", "c"], "BCC": ["c", "d"]}
    await client.publish("letter", exchange="desk", routing_key="a", headers=headers)
    for queue in ("a", "b", "c", "d"):
        (copy,) = await take_all(connection, queue)
        assert copy.values["headers"]["CC"] == ["b", "c"]
        assert "BCC" not in copy.values["headers"]
        assert copy.routing_key == "a"


async def test_an_unused_queue_expires_with_its_messages(client: bide.Client, connection: Connection) -> None:
    await client.declare(primitives.ephemeral("visit", queue="visitor", expires="3s"))
    await client.publish("lost", exchange="visit")

    async def gone() -> bool:
        return not await is_there(connection, Queue("visitor"))

    await eventually(gone, step=4)  # a look at the queue is a use of it
    # The exchange went with its last binding.
    assert not await is_there(connection, Exchange("visit"))


async def test_a_queue_with_a_consumer_does_not_expire(client: bide.Client, connection: Connection) -> None:
    await client.declare(primitives.ephemeral("visit", queue="visitor", expires="4s"))
    async with client.consume("visitor") as messages:
        started = time.monotonic()
        while time.monotonic() - started < 5:
            await client.publish("kept", exchange="visit")
            await (await anext(messages)).ack()
    assert await is_there(connection, Exchange("visit"))


async def test_an_auto_delete_queue_is_deleted_with_its_last_consumer(
    client: bide.Client, connection: Connection
) -> None:
    await client.declare(primitives.auto_delete_queue("screen"))
    await client.publish("one", to="screen")
    assert await is_there(connection, Queue("screen"))  # without a consumer so far
    async with client.consume("screen") as messages:
        await (await anext(messages)).ack()

    async def gone() -> bool:
        return not await is_there(connection, Queue("screen"))

    await eventually(gone)


async def test_an_exclusive_queue_belongs_to_one_connection(vhost_url: str, connection: Connection) -> None:
    owner = await Connection.open(BrokerUrl.parse(vhost_url))
    (queue,) = primitives.exclusive_queue("mine").queues
    channel = await owner.channel()
    await channel.declare_queue(queue)
    with pytest.raises(AccessRefusedError, match="mine"):
        await (await connection.channel()).get("mine")
    await owner.close()

    async def gone() -> bool:
        return not await is_there(connection, Queue("mine"))

    await eventually(gone)


@BOTH_TYPES
async def test_a_full_queue_drops_the_oldest_message(
    client: bide.Client, connection: Connection, queue_type: str
) -> None:
    await client.declare(primitives.bounded_queue("q", dead_letter_queue="old", max_length=3, queue_type=queue_type))
    for number in range(5):
        await client.publish(str(number), to="q")
    dead = await receive(client, "old", 2)
    assert [one.body for one in dead] == [b"0", b"1"]
    assert dead[0].raw.values["headers"]["x-death"][0]["reason"] == "maxlen"
    assert await bodies(connection, "q") == {"q": ["2", "3", "4"]}


@BOTH_TYPES
async def test_a_limit_in_bytes_drops_the_oldest_message(
    client: bide.Client, connection: Connection, queue_type: str
) -> None:
    await client.declare(primitives.bounded_queue("q", dead_letter_queue="old", max_bytes=5_000, queue_type=queue_type))
    for number in range(4):
        await client.publish(str(number) * 2_000, to="q")
    dead = await receive(client, "old", 2)
    assert [one.body[:1] for one in dead] == [b"0", b"1"]
    assert [one.body[:1] for one in await take_all(connection, "q")] == [b"2", b"3"]


@BOTH_TYPES
async def test_dead_letters_of_several_queues_are_collected_in_one(client: bide.Client, queue_type: str) -> None:
    await client.declare(
        primitives.central_dead_letters(
            "dead", queues=["orders", "bills"], dead_letter_queue="morgue", queue_type=queue_type
        )
    )
    await client.publish("rejected", to="orders")
    await client.publish("expired", to="bills", expiration="50ms")
    async with client.consume("orders") as messages:
        await (await anext(messages)).reject()
    dead = {one.body.decode(): one for one in await receive(client, "morgue", 2)}
    deaths = {body: (one.routing_key, one.raw.values["headers"]["x-death"][0]["reason"]) for body, one in dead.items()}
    assert deaths == {"rejected": ("orders", "rejected"), "expired": ("bills", "expired")}


@BOTH_TYPES
async def test_messages_of_a_queue_with_a_ttl_expire_in_order(client: bide.Client, queue_type: str) -> None:
    await client.declare(primitives.waiting_queue("later", to="now", ttl="400ms", queue_type=queue_type))
    started = time.monotonic()
    for number in range(3):
        await client.publish(str(number), to="later")
    assert [one.body for one in await receive(client, "now", 3)] == [b"0", b"1", b"2"]
    assert time.monotonic() - started >= 0.4


@BOTH_TYPES
async def test_only_the_message_at_the_head_expires(client: bide.Client, queue_type: str) -> None:
    await client.declare(primitives.waiting_queue("later", to="now", queue_type=queue_type))
    started = time.monotonic()
    await client.publish("long", to="later", expiration="1s")
    await client.publish("short", to="later", expiration="100ms")
    messages = await receive(client, "now", 2)
    assert [one.body for one in messages] == [b"long", b"short"]
    # The short one waited ten times what it should have.
    assert time.monotonic() - started >= 1


@BOTH_TYPES
async def test_the_shorter_of_two_ttls_applies(client: bide.Client, queue_type: str) -> None:
    await client.declare(primitives.waiting_queue("later", to="now", ttl="60s", queue_type=queue_type))
    await client.publish("short", to="later", expiration="100ms")
    (message,) = await receive(client, "now", 1)
    # It would not expire a second time.
    assert message.expiration is None


async def test_an_alternate_exchange_takes_unmatched_messages(client: bide.Client, connection: Connection) -> None:
    await client.declare(primitives.catch_all("desk", queues=["front"], unmatched="lost-property"))
    await client.publish("a", exchange="desk", routing_key="front")
    await client.publish("b", exchange="desk", routing_key="frnt")
    assert await bodies(connection, "front", "lost-property") == {"front": ["a"], "lost-property": ["b"]}


async def test_virtual_hosts_are_separate(client: bide.Client, connection: Connection, vhost: Vhost) -> None:
    await client.declare(primitives.carbon_copies("desk", queues=["front"]))
    other = f"{vhost.name}-other"
    async with bide.connect(vhost.broker.add_vhost(other)) as elsewhere:
        with pytest.raises(TargetNotFoundError):
            await elsewhere.publish("a", exchange="desk", routing_key="front")
        with pytest.raises(UnroutableError):
            await elsewhere.publish("a", to="front")
        await elsewhere.declare(Topology(queues=[Queue("front")]))
        await elsewhere.publish("elsewhere", to="front")
    vhost.broker.delete_vhost(other)
    assert await bodies(connection, "front") == {"front": []}
