"""Patterns 6 and 7: partitions."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable

import pytest

import bide
from bide.errors import DeclarationMismatchError, UnsupportedBrokerError
from bide.local_broker.configuration import MANAGEMENT_PLUGIN
from bide.messaging.partitions import consume_partitions
from bide.patterns.partitions import data_locality, ordered_partitions, partition_queues
from tests.broker.receiving import eventually
from tests.support import Rabbitmq
from tests.timeouts import TIMEOUT

PARTITIONS = 4
USERS = 60


async def shares(client: bide.Client, partitions: int, number: int) -> dict[str, list[str]]:
    """The messages of each partition. They are consumed, since a single active consumer excludes basic.get."""
    held: dict[str, list[str]] = {queue: [] for queue in partition_queues("q", partitions)}

    def keep(queue: str) -> Callable[[bide.Message], Awaitable[None]]:
        async def handle(message: bide.Message) -> None:
            held[queue].append(message.body.decode())

        return handle

    async def all_there() -> bool:
        return sum(map(len, held.values())) == number

    consuming = [asyncio.create_task(consume_partitions(client, [queue], keep(queue))) for queue in held]
    await eventually(all_there)
    for task in consuming:
        task.cancel()
    await asyncio.wait(consuming)
    return held


async def test_messages_of_one_key_stay_in_one_partition_in_order(client: bide.Client) -> None:
    await client.declare(ordered_partitions("x", queue="q", partitions=PARTITIONS))
    for step in range(5):
        for booking in range(USERS):
            await client.publish(f"{booking} {step}", exchange="x", routing_key=f"booking-{booking}")
    held = await shares(client, PARTITIONS, 5 * USERS)
    where: dict[str, set[str]] = defaultdict(set)
    steps: dict[str, list[str]] = defaultdict(list)
    for queue, messages in held.items():
        assert messages, f"{queue} got nothing of {USERS} different keys"
        for message in messages:
            key, count = message.split()
            where[key].add(queue)
            steps[key].append(count)
    assert all(len(queues) == 1 for queues in where.values())
    assert all(seen == ["0", "1", "2", "3", "4"] for seen in steps.values())


async def test_a_few_different_values_make_uneven_shares(client: bide.Client) -> None:
    await client.declare(ordered_partitions("x", queue="q", partitions=PARTITIONS, header="country"))
    for _ in range(10):
        for country in ("de", "fr"):
            await client.publish(country, exchange="x", headers={"country": country})
        # Without the header, all go where the first of them went.
        await client.publish("none", exchange="x")
    held = await shares(client, PARTITIONS, 30)
    assert any(not messages for messages in held.values())
    assert sum("none" in messages for messages in held.values()) == 1


async def test_a_partition_has_one_consumer_and_another_takes_over(client: bide.Client) -> None:
    await client.declare(ordered_partitions("x", queue="q", partitions=2))
    handled: list[tuple[str, str]] = []
    first_failed = asyncio.Event()

    async def first(message: bide.Message) -> None:
        handled.append(("first", message.body.decode()))
        if message.body == b"3":
            first_failed.set()
            raise RuntimeError("the process dies")

    async def second(message: bide.Message) -> None:
        handled.append(("second", message.body.decode()))

    queues = partition_queues("q", 2)
    failing = asyncio.create_task(consume_partitions(client, queues, first))
    for number in range(3):
        await client.publish(str(number), exchange="x", routing_key="the same")

    async def three() -> bool:
        return len(handled) == 3

    await eventually(three)
    standby = asyncio.create_task(consume_partitions(client, queues, second))
    for number in range(3, 6):
        await client.publish(str(number), exchange="x", routing_key="the same")
    await asyncio.wait_for(first_failed.wait(), TIMEOUT)

    async def seven() -> bool:
        return len(handled) == 7

    await eventually(seven)
    standby.cancel()
    results = await asyncio.gather(failing, standby, return_exceptions=True)
    assert isinstance(results[0], ExceptionGroup)
    # The message that could not be handled went back to its place.
    assert handled == [
        *(("first", one) for one in ("0", "1", "2", "3")),
        *(("second", one) for one in ("3", "4", "5")),
    ]


async def test_a_new_partition_moves_only_the_keys_that_it_takes(client: bide.Client) -> None:
    async def homes(partitions: int) -> dict[str, str]:
        await client.declare(data_locality("x", queue="q", partitions=partitions, header="user-id"))
        for user in range(USERS):
            await client.publish(str(user), exchange="x", headers={"user-id": f"user-{user}"})
        held = await shares(client, partitions, USERS)
        return {user: queue for queue, users in held.items() for user in users}

    before = await homes(PARTITIONS)
    assert await homes(PARTITIONS) == before
    after = await homes(PARTITIONS + 1)
    moved = {user for user in before if before[user] != after[user]}
    assert 0 < len(moved) < USERS / 2
    # No user moves between two old partitions: all moved users are in the new one.
    assert {after[user] for user in moved} == {f"q.{PARTITIONS + 1}"}


async def test_without_the_plugin_the_error_names_the_command_to_enable_it(rabbitmq: Rabbitmq) -> None:
    with rabbitmq.start(ephemeral=True, plugins=(MANAGEMENT_PLUGIN,)) as broker:
        async with bide.connect(broker.url) as client:
            with pytest.raises(
                UnsupportedBrokerError, match="rabbitmq-plugins enable rabbitmq_consistent_hash_exchange"
            ):
                await client.declare(ordered_partitions("x", queue="q", partitions=2))
            # The client's own connection is as good as before.
            await client.declare(bide.Topology(queues=[bide.Queue("q")]))
            await client.publish("still here", to="q")


async def test_an_exchange_of_another_type_is_a_mismatch(client: bide.Client) -> None:
    await client.declare(bide.Topology([bide.Exchange("x", "fanout")]))
    with pytest.raises(DeclarationMismatchError, match="the exchange 'x' exists with type = fanout") as caught:
        await client.declare(ordered_partitions("x", queue="q", partitions=2))
    assert caught.value.applied == "nothing"


async def test_an_unknown_exchange_type_names_plugin_or_release(client: bide.Client, release: tuple[int, ...]) -> None:
    with pytest.raises(
        UnsupportedBrokerError, match=r"'x-random', the type of the exchange 'x': run 'rabbitmq-plugins"
    ):
        await client.declare(bide.Topology([bide.Exchange("x", "x-random")]))
    if release < (4, 0):
        with pytest.raises(UnsupportedBrokerError, match=r"upgrade the broker to RabbitMQ 4\.0"):
            await client.declare(bide.Topology([bide.Exchange("x", "x-local-random")]))
    else:
        await client.declare(bide.Topology([bide.Exchange("x", "x-local-random")]))
