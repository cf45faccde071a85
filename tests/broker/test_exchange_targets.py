"""Delayed publishes to an exchange: the same queues as a direct publish."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

import bide
from tests.broker.receiving import connection_of, eventually, fresh, ready
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from bide.amqp.connection import Connection

PATTERNS = sorted(
    {
        ".".join(words)
        for length in (1, 2, 3)
        for words in itertools.product(("order", "*", "#"), repeat=length)
        if words.count("#") < 3  # RabbitMQ 4.3.5 refuses more
    }
    | {"#.word", "*.*.#", "~#", "~", "~.~", "#.~", "order.created", "*.*.*.*.*", "#.created.#", "", "order.*.x"}
)
KEYS = ("order", "order.created", "order.created.x", "a.b.c.d", "a.b.c.d.e", "order..created", "word")


async def deliveries(connection: Connection, queues: list[str]) -> dict[str, Counter[str]]:
    """Message ids by queue, each with the times it is there. Takes the messages."""
    found = {}
    channel = await connection.channel()
    for queue in queues:
        found[queue] = Counter[str]()
        while (delivery := await channel.get(queue)) is not None:
            found[queue][delivery.values["message_id"]] += 1
            channel.ack(delivery.delivery_tag)
    await channel.close()
    return found


async def compare(
    client: bide.Client, connection: Connection, exchange: str, queues: list[str], messages: list[dict[str, Any]]
) -> None:
    """Publish each message directly and delayed, and compare where it goes."""
    last = fresh("last")
    await client.declare(bide.Topology(queues=[bide.Queue.quorum(last)]))
    for number, options in enumerate(messages):
        await client.publish(b"", exchange=exchange, message_id=str(number), mandatory=False, **options)
    direct = await deliveries(connection, queues)
    await asyncio.gather(
        *(
            client.publish(b"", exchange=exchange, message_id=str(number), delay="200ms", **options)
            for number, options in enumerate(messages)
        )
    )
    expected = sum(sum(counts.values()) for counts in direct.values())

    async def all_there() -> bool:
        return sum([await ready(connection, queue) for queue in queues]) >= expected

    await eventually(all_there)
    # What would come too much comes no later than a message that is due half a second after the last.
    await client.publish(b"", to=last, delay="500ms")

    async def last_there() -> bool:
        return await ready(connection, last) == 1

    await eventually(last_there)
    assert await deliveries(connection, queues) == direct
    assert expected > 0


async def test_topic_exchanges_route_delayed_messages_like_undelayed_ones(
    client: bide.Client, connection: Connection
) -> None:
    exchange = fresh("topic")
    queues = [fresh("q") for _ in PATTERNS]
    await client.declare(
        bide.Topology(
            [bide.Exchange(exchange, "topic")],
            [bide.Queue(name, arguments={"x-queue-type": "classic"}) for name in queues],
            [bide.Binding(exchange, name, pattern) for name, pattern in zip(queues, PATTERNS, strict=True)],
        )
    )
    await compare(client, connection, exchange, queues, [{"routing_key": key} for key in KEYS])


async def test_direct_and_fanout_exchanges_route_delayed_messages_like_undelayed_ones(
    client: bide.Client, connection: Connection
) -> None:
    for kind in ("direct", "fanout"):
        exchange = fresh(kind)
        queues = [fresh("q") for _ in range(3)]
        await client.declare(
            bide.Topology(
                [bide.Exchange(exchange, kind)],
                [bide.Queue(name, arguments={"x-queue-type": "classic"}) for name in queues],
                [bide.Binding(exchange, name, key) for name, key in zip(queues, ("a", "a", "b.c"), strict=True)],
            )
        )
        await compare(client, connection, exchange, queues, [{"routing_key": key} for key in ("a", "b.c", "a")])


async def test_headers_exchanges_route_delayed_messages_like_undelayed_ones(
    client: bide.Client, connection: Connection
) -> None:
    exchange = fresh("headers")
    queues = [fresh("q") for _ in range(3)]
    conditions: list[dict[str, str | int]] = [
        {"x-match": "all", "kind": "order", "size": 3},
        {"x-match": "any", "kind": "order", "size": 3},
        {"x-match": "all"},
    ]
    await client.declare(
        bide.Topology(
            [bide.Exchange(exchange, "headers")],
            [bide.Queue(name, arguments={"x-queue-type": "classic"}) for name in queues],
            [
                bide.Binding(exchange, name, arguments=condition)
                for name, condition in zip(queues, conditions, strict=True)
            ],
        )
    )
    messages: list[dict[str, Any]] = [
        {"headers": {"kind": "order", "size": 3}},
        {"headers": {"size": 3}},
        {"routing_key": "x"},
    ]
    await compare(client, connection, exchange, queues, messages)


async def test_a_consistent_hash_exchange_gives_each_key_the_same_queue(
    client: bide.Client, connection: Connection
) -> None:
    exchange = fresh("hash")
    queues = [fresh("q") for _ in range(4)]
    await client.declare(
        bide.Topology(
            [bide.Exchange(exchange, "x-consistent-hash")],
            [bide.Queue(name, arguments={"x-queue-type": "classic"}) for name in queues],
            [bide.Binding(exchange, name, "1") for name in queues],
        )
    )
    await compare(client, connection, exchange, queues, [{"routing_key": f"order.{number}"} for number in range(40)])


async def test_exchange_bindings_route_delayed_messages_like_undelayed_ones(
    client: bide.Client, connection: Connection
) -> None:
    first, second, queue = fresh("first"), fresh("second"), fresh("q")
    await client.declare(
        bide.Topology(
            [bide.Exchange(first, "topic"), bide.Exchange(second, "topic")],
            [bide.Queue(queue, arguments={"x-queue-type": "classic"})],
            [bide.Binding(first, second, "#", "exchange"), bide.Binding(second, queue, "*.created")],
        )
    )
    await compare(client, connection, first, [queue], [{"routing_key": "order.created"}, {"routing_key": "order"}])


@pytest.mark.parametrize("words", [1, 4, 5, 9, 100])
async def test_routing_keys_of_many_words_are_restored(client: bide.Client, connection: Connection, words: int) -> None:
    exchange, queue = fresh("topic"), fresh("q")
    await client.declare(
        bide.Topology(
            [bide.Exchange(exchange, "topic")], [bide.Queue.quorum(queue)], [bide.Binding(exchange, queue, "#")]
        )
    )
    key = ".".join("w" * words)
    receipt = await client.publish(b"x", exchange=exchange, routing_key=key, delay="1.05s", headers={"mine": 1})
    assert receipt.hops == 3  # a digit of seconds, one of hundredths, and the release queue of the exchange
    async with asyncio.timeout(TIMEOUT), client.consume(queue) as messages:
        message = await anext(messages)
        await message.ack()
    assert (message.exchange, message.routing_key, message.headers) == (exchange, key, {"mine": 1})
    assert message.lateness is not None
    assert message.lateness.total_seconds() >= 0


async def test_names_with_special_characters_are_delivered(client: bide.Client) -> None:
    for stem in ("with.dots", "with space", "with~tilde", "ümlaut", "per%2Ecent", "x" * 240):
        exchange, queue = fresh(stem), fresh(stem)
        await client.declare(
            bide.Topology(
                [bide.Exchange(exchange, "topic")], [bide.Queue.quorum(queue)], [bide.Binding(exchange, queue, "a.*")]
            )
        )
        await client.publish(b"to the exchange", exchange=exchange, routing_key="a.b", delay="100ms")
        await client.publish(b"to the queue", to=queue, delay="100ms")
        async with asyncio.timeout(TIMEOUT), client.consume(queue) as messages:
            bodies = set()
            for _ in range(2):
                message = await anext(messages)
                bodies.add((message.body, message.exchange, message.routing_key))
                await message.ack()
        assert bodies == {(b"to the exchange", exchange, "a.b"), (b"to the queue", "", queue)}


async def test_more_concurrent_messages_than_channels_are_published(client: bide.Client) -> None:
    """Each asks first whether its exchange is there."""
    exchange, queue = fresh("fanout"), fresh("q")
    await client.declare(
        bide.Topology([bide.Exchange(exchange, "fanout")], [bide.Queue.quorum(queue)], [bide.Binding(exchange, queue)])
    )
    number = (await connection_of(client)).channel_max + 1
    receipts = await asyncio.gather(*(client.publish(b"", exchange=exchange) for _ in range(number)))
    assert {one.attempts for one in receipts} == {1}
