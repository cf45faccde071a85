"""Streams of the broker in memory do what those of RabbitMQ do: each case is played on both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
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
from bide.topology import Binding, Queue, Topology
from tests.broker.receiving import eventually
from tests.support import Vhost, apply_retention
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
    """A connection to one of the two brokers.

    Attributes:
        trim: waits until the stream has dropped what exceeds its limits.
    """

    def __init__(self, connection: Connection, trim: Callable[[], None] = lambda: None) -> None:
        self.connection = connection
        self.trim = trim

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


async def no_get(reader: Reader) -> Any:
    await reader.publish(b"0")
    return await code((await reader.connection.channel()).get("log"))


async def no_purge(reader: Reader) -> Any:
    return await code((await reader.connection.channel()).purge_queue("log"))


async def times(reader: Reader) -> Any:
    """A consumer begins at the chunk with its time."""
    await reader.publish(b"0")
    before, after = (datetime(year, 1, 1, tzinfo=UTC) for year in (2020, 2100))
    earlier = await reader.read(1, before)
    _, later = await reader.consume(after)
    await reader.publish(b"1")
    return earlier, seen(await soon(later))


async def counts(reader: Reader) -> Any:
    """A declaration counts messages, a little later than they are confirmed, and no consumers."""
    channel, results = await reader.connection.channel(), []

    async def count() -> int:
        return int((await channel.declare_queue(LOG.queues[0], passive=True)).message_count)

    for expected in range(3):

        async def is_counted(expected: int = expected) -> bool:
            return await count() >= expected

        await eventually(is_counted)
        results.append(await count())
        await reader.publish(b"0")
    await reader.consume("first")
    return results, (await channel.declare_queue(LOG.queues[0], passive=True)).consumer_count


async def copies(reader: Reader) -> Any:
    """A message reaches a stream once, by whatever exchange and key came first."""
    channel = await reader.connection.channel(confirms=True)
    for binding in (Binding("amq.direct", "log", "a"), Binding("amq.direct", "log", "b"), Binding("amq.fanout", "log")):
        await channel.bind(binding)
    values = {"headers": {"CC": ["b"], "BCC": ["a"]}, "correlation_id": "c", "content_type": "t", "delivery_mode": 2}
    await channel.publish(exchange="amq.direct", routing_key="a", values=values, body=b"0")
    await channel.publish(exchange="amq.fanout", routing_key="other", values={}, body=b"1")
    await channel.publish(exchange="", routing_key="log", values={}, body=b"2")
    _, found = await reader.consume("first")
    deliveries = [await soon(found) for _ in range(3)]
    return [(one.exchange, one.routing_key, dict(one.values), one.body) for one in deliveries]


async def dead_letters(reader: Reader) -> Any:
    """Below 4.0, a stream gets no dead letter that is published at most once, and keeps no list of deaths of others."""
    channel = await reader.connection.channel(confirms=True)
    dead_lettered = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "log"}
    safely = {"x-queue-type": "quorum", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
    for number, arguments in enumerate(({}, safely)):
        await channel.declare_queue(Queue(f"q{number}", arguments={**dead_lettered, **arguments}))
        await channel.publish(exchange="", routing_key=f"q{number}", values={"headers": {"h": number}}, body=b"")
        delivery = await channel.get(f"q{number}")
        assert delivery is not None
        channel.nack(delivery.delivery_tag, requeue=False)
    _, found = await reader.consume("first")
    results = list[dict[str, Any]]()
    while not results or results[-1]["headers"]["h"] == 0:
        results.append(dict((await soon(found)).values))
        for death in results[-1]["headers"].get("x-death", ()):
            del death["time"]
    return results


async def cancelled(reader: Reader) -> Any:
    """Its other consumers go on when one is cancelled, and all end with the stream."""
    ended = asyncio.Queue[BideError]()
    one = await reader.consume("first", on_end=ended.put_nowait)
    other = await reader.consume("first", on_end=ended.put_nowait)
    await reader.publish(b"0")
    results = [seen(await soon(one[1])), seen(await soon(other[1]))]
    await one[0].close()
    await reader.publish(b"1")
    results.append(seen(await soon(other[1])))
    await (await reader.connection.channel()).delete_queue("log")
    async with asyncio.timeout(TIMEOUT):
        return results, type(await ended.get()).__name__, one[1].empty()


CASES: list[Case] = [
    *(offsets, ages, times, counts, two_readers, settling, properties, copies, dead_letters, cancelled),
    *(no_prefetch, no_acks, no_get, no_purge, unknown_offset),
]


async def play_on(
    client: Client, url: BrokerUrl, topology: Topology, case: Case, trim: Callable[[], None] = lambda: None
) -> Any:
    await client.declare(topology)
    connection = await Connection.open(url)
    try:
        return await case(Reader(connection, trim))
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

    async def first_offset() -> int:
        ((offset, _),) = await reader.read(1, "first")
        return offset

    async def is_trimmed() -> bool:
        return await first_offset() > 100

    # RabbitMQ removes segments a moment after it has begun others. None should go while they are read.
    await asyncio.to_thread(reader.trim)
    await eventually(is_trimmed)
    start = await first_offset()
    read, delivery = [seen(first)[0]], first
    while read[-1] < start:
        channel.ack(delivery.delivery_tag)
        delivery = await soon(found)
        read.append(seen(delivery)[0])
    jumps = [(one, other) for one, other in pairwise(read) if other - one > 20]
    begun = jumps[0][0] < 40 if jumps else None
    offset, _ = seen(await soon((await reader.consume(3))[1]))
    return read[1] == 1, len(jumps), begun, start <= offset <= await first_offset()


async def gaps(reader: Reader) -> Any:
    """Each new segment takes an offset for itself."""
    await reader.publish(*[bytes(400)] * 30)
    offsets = [offset for offset, _ in await reader.read(10, "first")]
    channel, found = await reader.consume(offsets[-1])
    while offsets[-1] < 29:
        delivery = await soon(found)
        channel.ack(delivery.delivery_tag)
        offsets.append(seen(delivery)[0])
    return {other - one for one, other in pairwise(offsets) if other > one}


@pytest.mark.parametrize(("case", "expected"), [(overtaken, (True, 1, True, True)), (gaps, {1, 2})])
async def test_both_brokers_trim_alike(vhost: Vhost, release: tuple[int, ...], case: Case, expected: Any) -> None:
    async with bide.connect(vhost.url) as client:
        trim = partial(apply_retention, vhost.broker)
        assert await play_on(client, BrokerUrl.parse(vhost.url), SMALL, case, trim) == expected
    async with bide.testing.broker(release=release) as b, b.connect() as client:
        assert await play_on(client, client.url, SMALL, case) == expected
