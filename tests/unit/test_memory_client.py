"""The real client on the in-memory broker."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import bide
import bide.testing
from bide.errors import (
    AccessRefusedError,
    DeclarationMismatchError,
    InvalidInputError,
    NotModelledError,
    PublishRefusedError,
    TargetNotFoundError,
    UnroutableError,
)
from bide.topology import Exchange, Queue, Topology
from tests.broker.receiving import connection_of, eventually
from tests.timeouts import TIMEOUT

REMINDERS = Topology(queues=[Queue.quorum("reminders")])
RELEASES = [(3, 10), (4, 0), (4, 3)]


async def received(client: bide.Client, queue: str = "reminders") -> bide.Message:
    async with client.consume(queue) as messages:
        message = await asyncio.wait_for(anext(messages), TIMEOUT)
        await message.ack()
        return message


async def is_empty(client: bide.Client, queue: str) -> bool:
    connection = await connection_of(client)
    async with await connection.channel() as channel:
        return await channel.get(queue) is None


@pytest.mark.parametrize("release", RELEASES)
async def test_advancing_the_clock_delivers_a_message_delayed_by_days(release: tuple[int, ...]) -> None:
    async with bide.testing.broker(release=release) as b, b.connect() as client:
        assert (await client.release())[:2] == release
        await client.declare(REMINDERS)
        receipt = await client.publish("pay, please", to="reminders", delay="3d4h", headers={"a": 1})
        assert receipt.due == b.clock.now() + timedelta(days=3, hours=4)
        b.clock.advance("3d3h59m59.99s")
        assert await is_empty(client, "reminders")
        b.clock.advance("10ms")
        message = await received(client)
    assert (message.body, message.headers, message.lateness) == (b"pay, please", {"a": 1}, timedelta(0))
    assert message.received_at == receipt.due


@pytest.mark.parametrize(
    "infrastructure", [bide.Clock(), bide.NServiceBus(routing="direct"), bide.Celery()], ids=lambda one: one.name
)
async def test_every_delay_infrastructure_delivers_at_the_due_time(infrastructure: bide.DelayInfrastructure) -> None:
    async with bide.testing.broker() as b, b.connect(infrastructure=infrastructure) as client:
        await client.declare(REMINDERS)
        await client.publish("x", to="reminders", delay="90s")
        b.clock.advance("89s")
        assert await is_empty(client, "reminders")
        b.clock.advance("1s")
        assert (await received(client)).lateness == timedelta(0)


async def test_the_clock_starts_at_the_given_time() -> None:
    start = datetime(2024, 2, 28, 12, tzinfo=UTC)
    async with bide.testing.broker(start=start) as b, b.connect() as client:
        await client.declare(REMINDERS)
        await client.publish("x", to="reminders", deliver_at="2024-02-29T12:00:00Z")
        assert client.now() == start
        b.clock.advance_to("2024-02-29T12:00:00Z")
        assert (await received(client)).sent_at == start


async def test_errors_are_those_of_a_real_broker() -> None:
    async with bide.testing.broker() as b, b.connect() as client:
        with pytest.raises(TargetNotFoundError, match="nowhere"):
            await client.publish("x", to="nowhere", delay="1s")
        with pytest.raises(UnroutableError):
            await client.publish("x", to="nowhere")
        with pytest.raises(TargetNotFoundError):
            await client.publish("x", exchange="nowhere")
        full = Queue("full", arguments={"x-max-length": 0, "x-overflow": "reject-publish"})
        await client.declare(Topology(queues=[full]))
        with pytest.raises(PublishRefusedError):
            await client.publish("x", to="full")
        with pytest.raises(DeclarationMismatchError, match="x-max-length = 0, not with 1"):
            await client.declare(Topology(queues=[Queue("full", arguments={**full.arguments, "x-max-length": 1})]))
        await client.declare(Topology([Exchange("inside", "fanout", internal=True)]))
        with pytest.raises(AccessRefusedError, match="internal"):
            await client.publish("x", exchange="inside")


@pytest.mark.parametrize(
    ("topology", "feature"),
    [
        (
            Topology([Exchange("late", "x-delayed-message", arguments={"x-delayed-type": "direct"})]),
            "x-delayed-message",
        ),
        (Topology([Exchange("hash", "x-consistent-hash", arguments={"hash-property": "message_id"})]), "hash-property"),
        (Topology(queues=[Queue.quorum("q", {"x-max-length-bytes": 9})]), "x-max-length-bytes"),
    ],
    ids=str,
)
async def test_declaring_an_unmodelled_feature_is_an_error_that_names_it(topology: Topology, feature: str) -> None:
    async with bide.testing.broker() as b, b.connect() as client:
        with pytest.raises(NotModelledError, match=feature):
            await client.declare(topology)


async def test_a_stream_keeps_its_messages_for_every_consumer() -> None:
    async with bide.testing.broker() as b, b.connect() as client:
        await client.declare(Topology(queues=[Queue("log", arguments={"x-queue-type": "stream"})]))
        for number in range(3):
            await client.publish(str(number), to="log")
        for _ in range(2):
            async with client.consume("log", arguments={"x-stream-offset": "first"}) as messages:
                for number in range(3):
                    message = await asyncio.wait_for(anext(messages), TIMEOUT)
                    assert (message.body, message.headers["x-stream-offset"]) == (str(number).encode(), number)
                    await message.ack()


@pytest.mark.parametrize(
    ("arguments", "offset", "expected"),
    [
        ({"x-max-age": "1h", "x-stream-max-segment-size-bytes": 100}, "first", [2, 3, 4]),
        ({"x-max-length-bytes": 220, "x-stream-max-segment-size-bytes": 100}, "first", [2, 3, 4]),
        ({}, "90m", [1, 2, 3, 4]),
        ({}, datetime(2030, 1, 1, 1, tzinfo=UTC), [1, 2, 3, 4]),
    ],
    ids=str,
)
async def test_a_stream_is_trimmed_and_read_by_the_virtual_clock(
    arguments: dict[str, Any], offset: Any, expected: list[int]
) -> None:
    async with bide.testing.broker() as b, b.connect() as client:
        await client.declare(Topology(queues=[Queue("log", arguments={"x-queue-type": "stream", **arguments})]))
        for number in range(5):
            await client.publish(b"%d" % number, to="log")
            b.clock.advance("60m" if number < 2 else "30m" if number < 3 else timedelta(0))
        async with client.consume("log", arguments={"x-stream-offset": offset}) as messages:
            found = [await asyncio.wait_for(anext(messages), TIMEOUT) for _ in expected]
        assert [int(one.body) for one in found] == expected


async def test_a_client_reconnects_and_gets_unsettled_messages_again() -> None:
    async with bide.testing.broker() as b, b.connect() as client:
        await client.declare(REMINDERS)
        async with client.consume("reminders") as messages:
            await client.publish("x", to="reminders")
            first = await anext(messages)
            b.drop_connections()
            again = await asyncio.wait_for(anext(messages), TIMEOUT)
            assert (first.message_id, first.redelivered) == (again.message_id, False)
            assert (again.redelivered, again.delivery_count) == (True, 1)
            await again.ack()
            await client.publish("y", to="reminders")
            assert (await asyncio.wait_for(anext(messages), TIMEOUT)).body == b"y"


async def test_closing_after_many_acks_keeps_the_order_of_a_single_active_consumer() -> None:
    queue = bide.Queue.quorum("ordered", arguments={"x-single-active-consumer": True})
    async with bide.testing.broker() as b, b.connect() as client, b.connect() as other:
        await client.declare(bide.Topology(queues=[queue]))
        for number in range(100):
            await client.publish(str(number), to="ordered")
        async with client.consume("ordered", prefetch=100) as messages, other.consume("ordered") as successor:
            received = [await asyncio.wait_for(anext(messages), TIMEOUT) for _ in range(100)]
            following = asyncio.ensure_future(anext(successor))
            for message in received[1::2]:
                await message.ack()
            await messages.close()
            left = [await asyncio.wait_for(following, TIMEOUT)]
            left += [await asyncio.wait_for(anext(successor), TIMEOUT) for _ in range(49)]
        assert [int(one.body) for one in left] == list(range(0, 100, 2))


def test_a_synchronous_client_receives_a_delayed_message() -> None:
    with bide.testing.broker() as b, b.connect_sync() as client:
        client.declare(REMINDERS)
        client.publish("x", to="reminders", delay="1w")
        b.clock.advance("7d")
        with client.consume("reminders", timeout=timedelta(seconds=TIMEOUT)) as messages:
            message = next(messages)
            message.ack()
    assert message.body == b"x"


async def test_virtual_hosts_are_separate() -> None:
    async with bide.testing.broker() as b, b.connect() as one, b.connect(vhost="other") as other:
        await one.declare(REMINDERS)
        assert not await other.exists("reminders")


async def test_bodies_larger_than_a_frame_arrive_whole() -> None:
    async with bide.testing.broker() as b, b.connect() as client:
        await client.declare(REMINDERS)
        body = bytes(range(256)) * 2000
        await client.publish(body, to="reminders")
        assert (await received(client)).body == body


async def test_a_thousand_delayed_messages_arrive_in_order_of_their_due_times() -> None:
    async with bide.testing.broker() as b, b.connect() as client:
        await client.declare(REMINDERS)
        await client.publish_many(
            [bide.OutgoingMessage(str(number), to="reminders", delay=f"{1000 - number}s") for number in range(1000)]
        )
        b.clock.advance("1000s")
        async with client.consume("reminders") as messages:
            bodies = [int((await anext(messages)).body) for _ in range(100)]
        assert bodies == list(range(999, 899, -1))


@pytest.mark.parametrize("release", [(3, 13), (4,), (), "4.3", 4.3, None])
def test_unmodelled_releases_are_refused(release: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"is not modelled: give one of 3\.10, 4\.0, 4\.3, as in \(4, 3\)"):
        bide.testing.broker(release=release)


@pytest.mark.parametrize("number", [0, -1, True, "32"])
def test_an_invalid_dead_letter_prefetch_is_refused(number: Any) -> None:
    with pytest.raises(InvalidInputError, match="the dead_letter_prefetch"):
        bide.testing.broker(dead_letter_prefetch=number)


async def test_an_iteration_with_a_timeout_ends_when_no_message_comes_and_can_continue() -> None:
    async with bide.testing.broker() as b, b.connect() as client:
        await client.declare(REMINDERS)
        await client.publish("x", to="reminders")
        async with client.consume("reminders", timeout="500ms") as messages:

            async def has_arrived() -> bool:
                return messages.ready > 0

            # It might take this process longer than the timeout.
            await eventually(has_arrived)
            found = [message async for message in messages]
            assert [one.body for one in found] == [b"x"]
            await found[0].ack()
            assert [message async for message in messages] == []
            await client.publish("y", to="reminders")
            await eventually(has_arrived)
            async for message in messages:
                await message.ack()
                found.append(message)
        assert [one.body for one in found] == [b"x", b"y"]


async def test_a_timeout_of_the_caller_is_not_the_end_of_an_iteration() -> None:
    async with bide.testing.broker() as b, b.connect() as client:
        await client.declare(REMINDERS)
        async with client.consume("reminders", timeout="20s") as messages:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(messages)


async def test_messages_are_got_counted_processed_and_purged() -> None:
    async with bide.testing.broker() as b, b.connect() as client:
        await client.declare(REMINDERS)
        for body in "abc":
            await client.publish(body, to="reminders")
        assert await client.message_count("reminders") == 3
        message = await client.get("reminders")
        assert message is not None
        async with message.process():
            assert message.body == b"a"
        assert await client.purge("reminders") == 2
        assert await client.get("reminders") is None


async def test_the_exchanges_of_an_event_type_are_declared_once_per_client(monkeypatch: pytest.MonkeyPatch) -> None:
    declared: list[Topology] = []
    declare = bide.Client.declare

    async def counting(client: bide.Client, topology: Topology, **options: Any) -> Any:
        declared.append(topology)
        return await declare(client, topology, **options)

    async with bide.testing.broker() as b, b.connect(infrastructure=bide.NServiceBus(levels=3)) as client:
        await client.declare(REMINDERS)
        monkeypatch.setattr(bide.Client, "declare", counting)
        for _ in range(3):
            await client.publish("x", to="reminders")
            message = await client.get("reminders")
            assert message is not None
            await message.publish("Shop.Billed", json=1)
            await message.ack()
    assert len(declared) == 1


async def test_a_private_queue_is_declared_and_bound_again_after_a_lost_connection() -> None:
    events: list[str] = []
    async with (
        bide.testing.broker() as b,
        b.connect(
            on_disconnected=lambda _: events.append("disconnected"), on_reconnected=lambda: events.append("reconnected")
        ) as client,
    ):
        await client.declare(bide.Topology(exchanges=[bide.Exchange("events", "topic")]))
        queue = await client.private_queue(bindings=[("events", "order.*")])
        for _ in range(2):
            assert await client.get(queue) is None
            await client.publish("x", exchange="events", routing_key="order.created")
            message = await client.get(queue)
            assert message is not None
            assert message.routing_key == "order.created"
            before = len(events)
            b.drop_connections()

            async def is_reconnected(before: int = before) -> bool:
                # The client may have had two connections.
                return len(events) > before and len(events) % 2 == 0

            await eventually(is_reconnected)
        assert set(events) == {"disconnected", "reconnected"}
        assert client.connected
