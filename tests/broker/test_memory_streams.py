"""Streams of the broker in memory do what those of RabbitMQ do: each case is played on both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest

import bide.testing
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.amqp.url import BrokerUrl
from bide.client.client import Client
from bide.errors import BideError, BrokerError
from bide.topology import Queue, Topology
from tests.timeouts import TIMEOUT

LOG = Topology(queues=[Queue("log", arguments={"x-queue-type": "stream"})])
SMALL = Topology(
    queues=[
        Queue(
            "log",
            arguments={
                "x-queue-type": "stream",
                "x-max-length-bytes": 20_000,
                "x-stream-max-segment-size-bytes": 5000,
            },
        )
    ]
)

Case = Callable[["Reader"], Awaitable[Any]]


class Reader:
    """A connection to one of the two brokers."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def publish(self, *bodies: bytes, **values: Any) -> None:
        channel = await self.connection.channel(confirms=True)
        for body in bodies:
            await channel.publish(exchange="", routing_key="log", values=values, body=body)

    async def consume(
        self,
        offset: object = None,
        *,
        prefetch: int = 10,
        no_ack: bool = False,
        on_end: Callable[[BideError], None] = lambda _: None,
    ) -> tuple[Channel, asyncio.Queue[Delivery]]:
        channel, found = await self.connection.channel(), asyncio.Queue[Delivery]()
        if prefetch:
            await channel.qos(prefetch)
        arguments = {} if offset is None else {"x-stream-offset": offset}
        await channel.consume("log", on_message=found.put_nowait, on_end=on_end, arguments=arguments, no_ack=no_ack)
        return channel, found

    async def read(self, count: int, offset: object = None) -> list[tuple[int, bytes]]:
        _, found = await self.consume(offset)
        return [seen(await soon(found)) for _ in range(count)]


def seen(delivery: Delivery) -> tuple[int, bytes]:
    return delivery.values["headers"]["x-stream-offset"], delivery.body


async def soon(found: asyncio.Queue[Delivery]) -> Delivery:
    async with asyncio.timeout(TIMEOUT):
        return await found.get()


async def offsets(reader: Reader) -> Any:
    await reader.publish(b"0", b"1", b"2")
    results = [await reader.read(count, offset) for offset, count in (("first", 3), (1, 2), ("last", 1), (0, 3))]
    late, beyond = await reader.consume(), await reader.consume(4)
    await reader.publish(b"3", b"4")
    return *results, seen(await soon(late[1])), seen(await soon(beyond[1]))


async def ages(reader: Reader) -> Any:
    await reader.publish(b"0")
    return await reader.read(1, "1h")


async def two_readers(reader: Reader) -> Any:
    one, other = await reader.consume("first", prefetch=1), await reader.consume("first", prefetch=2)
    await reader.publish(b"0", b"1", b"2")
    first = await soon(one[1])
    results = [seen(first), seen(await soon(other[1])), seen(await soon(other[1]))]
    assert one[1].empty()
    one[0].ack(first.delivery_tag)
    return [*results, seen(await soon(one[1]))]


async def settling(reader: Reader) -> Any:
    """However a message is settled, the next one follows, and none comes again. Below 4.0 only acks are possible."""
    ended = asyncio.Queue[BideError]()
    channel, found = await reader.consume("first", prefetch=1, on_end=ended.put_nowait)
    await reader.publish(b"0", b"1", b"2", b"3")
    results: list[Any] = []
    for settle in (channel.ack, channel.nack, lambda tag: channel.reject(tag, requeue=False), channel.ack):
        following, end = asyncio.create_task(found.get()), asyncio.create_task(ended.get())
        async with asyncio.timeout(TIMEOUT):
            await asyncio.wait([following, end], return_when=asyncio.FIRST_COMPLETED)
        if not following.done():
            following.cancel()
            results.append("refused")
            break
        end.cancel()
        delivery = following.result()
        results.append((seen(delivery), delivery.redelivered))
        settle(delivery.delivery_tag)
    return results


async def properties(reader: Reader) -> Any:
    headers = {"list": [1], "table": {"a": 1}, "text": "x", "bytes": b"\xff", "none": None, "float": 1.5, "flag": True}
    await reader.publish(b"x", headers=headers, priority=3, expiration="5", message_id="m", reply_to="r")
    await reader.publish(b"y")
    _, found = await reader.consume("first")
    deliveries = [await soon(found) for _ in range(2)]
    return [(one.exchange, one.routing_key, dict(one.values)) for one in deliveries]


async def code(trying: Awaitable[Any]) -> int | None:
    with pytest.raises(BrokerError) as caught:
        await trying
    return caught.value.reply_code


async def no_prefetch(reader: Reader) -> Any:
    return await code(reader.consume("first", prefetch=0))


async def no_acks(reader: Reader) -> Any:
    return await code(reader.consume("first", no_ack=True))


async def unknown_offset(reader: Reader) -> Any:
    return await code(reader.consume("nowhere"))


CASES: list[Case] = [offsets, ages, two_readers, settling, properties, no_prefetch, no_acks, unknown_offset]


async def play_on(client: Client, url: BrokerUrl, topology: Topology, case: Case) -> Any:
    await client.declare(topology)
    connection = await Connection.open(url)
    try:
        return await case(Reader(connection))
    finally:
        await connection.close()


@pytest.mark.parametrize("case", CASES, ids=lambda one: one.__name__)
async def test_both_brokers_show_the_same(vhost_url: str, release: tuple[int, ...], case: Case) -> None:
    async with bide.connect(vhost_url) as client:
        expected = await play_on(client, BrokerUrl.parse(vhost_url), LOG, case)
    async with bide.testing.broker(release=release) as b, b.connect() as client:
        assert await play_on(client, client.url, LOG, case) == expected


async def overtaken(reader: Reader) -> Any:
    """A consumer that stands still is overtaken by retention, and goes on at the first message that is left."""
    channel, found = await reader.consume("first", prefetch=1)
    for number in range(200):
        await reader.publish(b"%3d" % number + bytes(400))
    first = await soon(found)
    (start, _) = (await reader.read(1, "first"))[0]
    read, delivery = [seen(first)[0]], first
    while read[-1] < start:
        channel.ack(delivery.delivery_tag)
        delivery = await soon(found)
        read.append(seen(delivery)[0])
    jumps = [(one, other) for one, other in pairwise(read) if other - one > 20]
    begun = jumps[0][0] < 40 if jumps else None
    return start > 100, read[1] == 1, len(jumps), begun, seen(await soon((await reader.consume(3))[1]))[0] == start


async def test_retention_overtakes_consumers_on_both_brokers(vhost_url: str, release: tuple[int, ...]) -> None:
    async with bide.connect(vhost_url) as client:
        expected = await play_on(client, BrokerUrl.parse(vhost_url), SMALL, overtaken)
    async with bide.testing.broker(release=release) as b, b.connect() as client:
        assert await play_on(client, client.url, SMALL, overtaken) == expected
    assert expected == (True, True, 1, True, True)
