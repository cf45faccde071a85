"""Properties of brokers that the design of the schedule log needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

import bide
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.errors import PublishRefusedError
from bide.schedules.names import ScheduleNames
from bide.streams.log import Address
from bide.topology import Topology
from tests import stream_publisher
from tests.support import Vhost, stream_port
from tests.timeouts import TIMEOUT

NAMES = ScheduleNames()
LOG = NAMES.log(0)


@pytest.fixture
async def channel(vhost: Vhost, vhost_connection: Connection) -> AsyncIterator[Channel]:
    """A channel to a virtual host with the schedule log."""
    async with bide.connect(vhost.url) as client:
        await client.declare(NAMES.topology(partitions=1))
        yield await vhost_connection.channel(confirms=True)


async def read(connection: Connection, count: int) -> list[Delivery]:
    """The first messages of the log."""
    channel, found = await connection.channel(), asyncio.Queue[Delivery]()
    await channel.qos(100)
    arguments = {"x-stream-offset": "first"}
    await channel.consume(LOG, on_message=found.put_nowait, on_end=lambda _: None, arguments=arguments)
    async with asyncio.timeout(TIMEOUT):
        return [await found.get() for _ in range(count)]


async def test_a_header_does_not_forge_the_exchange(channel: Channel, vhost_connection: Connection) -> None:
    forged = {"headers": {"x-exchange": NAMES.gates, "x-routing-key": "0"}}
    await channel.publish(exchange=NAMES.operations, routing_key="0", values=forged, body=b"1")
    await channel.publish(exchange="", routing_key=LOG, values=forged, body=b"2")
    await channel.publish(exchange=NAMES.gates, routing_key="0", values={}, body=b"3")
    found = await read(vhost_connection, 3)
    assert [one.exchange for one in found] == [NAMES.operations, "", NAMES.gates]


async def test_the_stream_protocol_does_forge_it(channel: Channel, vhost: Vhost, vhost_connection: Connection) -> None:
    """So applications must not have write permission for the streams themselves."""
    name, value = b"x-exchange", NAMES.gates.encode()
    pairs = b"\xa3" + bytes([len(name)]) + name + b"\xa1" + bytes([len(value)]) + value
    annotations = b"\x00\x53\x72\xc1" + bytes([len(pairs) + 1, 2]) + pairs
    entry = stream_publisher.message(annotations + b"\x00\x53\x75\xa0\x01x")
    address = Address.of(vhost.url, stream_port(vhost.broker))
    await asyncio.to_thread(stream_publisher.publish, address, LOG, [entry])
    (found,) = await read(vhost_connection, 1)
    assert found.exchange == NAMES.gates


async def test_headers_lose_lists_and_tables_and_the_body_nothing(
    channel: Channel, vhost_connection: Connection
) -> None:
    values = {"headers": {"list": [1], "table": {"a": 1}, "text": "x"}, "expiration": "1", "priority": 3}
    body = bytes(range(256)) * 8192
    await channel.publish(exchange=NAMES.operations, routing_key="0", values=values, body=body)
    (found,) = await read(vhost_connection, 1)
    assert found.body == body
    assert {"list", "table"}.isdisjoint(found.values["headers"])
    assert found.values["headers"]["text"] == "x"


async def test_a_full_room_refuses(vhost: Vhost, vhost_connection: Connection) -> None:
    room = next(one for one in NAMES.topology(partitions=1).queues if one.name == NAMES.room(0))
    small = replace(room, arguments={**room.arguments, "x-max-length": 2})
    async with bide.connect(vhost.url) as client:
        await client.declare(Topology(queues=[small]))
    channel = await vhost_connection.channel(confirms=True)

    async def fill() -> None:
        for _ in range(10):
            await channel.publish(exchange="", routing_key=small.name, values={}, body=b"")

    with pytest.raises(PublishRefusedError):
        await fill()


async def test_an_answer_comes_by_direct_reply_to(channel: Channel, vhost_connection: Connection) -> None:
    answers = asyncio.Queue[Delivery]()
    await channel.consume("amq.rabbitmq.reply-to", on_message=answers.put_nowait, on_end=lambda _: None, no_ack=True)
    values = {"reply_to": "amq.rabbitmq.reply-to", "correlation_id": "a-1"}
    await channel.publish(exchange=NAMES.operations, routing_key="0", values=values, body=b"")
    (request,) = await read(vhost_connection, 1)
    answering = await vhost_connection.channel(confirms=True)
    await answering.publish(
        exchange="",
        routing_key=request.values["reply_to"],
        values={"correlation_id": request.values["correlation_id"]},
        body=b"answer",
        mandatory=False,
    )
    async with asyncio.timeout(TIMEOUT):
        assert (await answers.get()).body == b"answer"


async def test_the_whole_topology_can_be_declared_twice(vhost: Vhost) -> None:
    async with bide.connect(vhost.url) as client:
        for _ in range(2):
            await client.declare(NAMES.topology())
        assert await client.exists(NAMES.log(7))
