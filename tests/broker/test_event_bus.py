"""The event bus on the real broker: rejected, counted, delayed, and parked for good."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

import bide
from bide.event_bus import EventBus, retries_of
from bide.patterns.event_bus import EventBusQueue
from bide.recoverability.failed import FailedMessage
from bide.topology import Queue
from tests.broker.receiving import eventually, fresh, receive


@asynccontextmanager
async def running(work: asyncio.Task[None]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work


async def made(client: bide.Client, *, queue_type: str, limit: int = 3, keys: tuple[str, ...] = ()) -> EventBus:
    names = EventBusQueue(exchange=fresh("bus"), queue=fresh("events"), delay="100ms", queue_type=queue_type, keys=keys)
    bus = EventBus(client, names, limit=limit)
    await bus.declare()
    return bus


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_what_always_fails_is_retried_and_then_parked(client: bide.Client, queue_type: str) -> None:
    bus = await made(client, queue_type=queue_type, keys=("order.*",))
    seen: list[bide.Message] = []

    async def fail(message: bide.Message) -> None:
        seen.append(message)
        raise ValueError("never")

    async with running(asyncio.create_task(bus.run(fail))):
        await bus.publish(b"body", key="order.created", message_id="one", headers={"a": 1}, priority=2)
        (parked,) = await receive(client, bus.names.parking_queue, 1)
    assert [one.history.retries for one in seen] == [0, 1, 2, 3]
    for message in [*seen, parked]:
        assert (message.exchange, message.routing_key) == (bus.names.exchange, "order.created")
        assert (message.body, message.message_id, message.priority) == (b"body", "one", 2)
        assert message.headers.get("a") == 1
    waits = [(after.received_at - before.received_at).total_seconds() for before, after in zip(seen, seen[1:])]  # noqa: B905, RUF007
    assert all(one >= 0.1 for one in waits)
    failed = FailedMessage.read(parked.raw.exchange, parked.raw.routing_key, parked.raw.values, parked.body)
    assert (failed.queue, failed.history.retries, failed.reason) == (bus.names.queue, 3, "failed")


async def test_what_succeeds_in_time_is_gone(client: bide.Client) -> None:
    bus = await made(client, queue_type="quorum")
    tries = 0
    done = asyncio.Event()

    async def fail_twice(message: bide.Message) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise ValueError("not yet")
        done.set()

    async with running(asyncio.create_task(bus.run(fail_twice))):
        await bus.publish(b"x")
        await asyncio.wait_for(done.wait(), 20)
    assert tries == 3


async def test_the_broker_counts_in_x_death_and_copies_go_on_counting(client: bide.Client) -> None:
    """Rejected by the work queue twice: once as it came, once as a copy."""
    bus = await made(client, queue_type="quorum")
    names = bus.names
    await bus.publish(b"x", message_id="one")
    async with client.consume(names.queue) as work:
        await (await asyncio.wait_for(anext(work), 10)).reject()
        async with client.consume(names.retry_queue) as retries:
            # A worker of somebody else's sends it straight back, by rejecting it: the count goes on in x-death.
            first = await asyncio.wait_for(anext(retries), 10)
            assert retries_of(first, names.queue) == 1
            await first.reject()
            await (await asyncio.wait_for(anext(work), 10)).reject()
            second = await asyncio.wait_for(anext(retries), 10)
            assert retries_of(second, names.queue) == 2
            await bus._pass_on(second)
            copy = await asyncio.wait_for(anext(work), 10)
            assert copy.history.retries == 2
            await copy.reject()
            third = await asyncio.wait_for(anext(retries), 10)
            assert retries_of(third, names.queue) == 3
            (death, *_) = third.headers["x-death"]
            assert (death["queue"], death["reason"], death["count"]) == (names.queue, "rejected", 1)
            await third.ack()


async def test_a_worker_that_dies_between_confirm_and_ack_repeats_and_loses_nothing(client: bide.Client) -> None:
    bus = await made(client, queue_type="quorum")
    await bus.publish(b"x", message_id="one")
    async with client.consume(bus.names.queue) as work:
        await (await asyncio.wait_for(anext(work), 10)).reject()
    async with client.consume(bus.names.retry_queue) as retries:
        message = await asyncio.wait_for(anext(retries), 10)
        # All that a worker does but the acknowledgement.
        message._subscription = None
        await bus._pass_on(message)
    received: list[bide.Message] = []

    async def take(message: bide.Message) -> None:
        received.append(message)

    async def both() -> bool:
        return len(received) == 2

    async with running(asyncio.create_task(bus.run(take))):
        await eventually(both)
    assert {one.message_id for one in received} == {"one"}


@pytest.mark.parametrize("dead_lettered", [True, False])
async def test_an_expired_message_is_dead_lettered_or_discarded(client: bide.Client, dead_lettered: bool) -> None:
    queue, dead = fresh("expiring"), fresh("dead")
    arguments: dict[str, str] = (
        {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead} if dead_lettered else {}
    )
    await client.declare(bide.Topology(queues=[Queue(dead), Queue(queue, arguments=arguments)]))
    await client.publish("some message", to=queue, message_id="one", expiration="200ms")
    if dead_lettered:
        (message,) = await receive(client, dead, 1)
        (death,) = message.headers["x-death"]
        assert (death["reason"], death["queue"], death["original-expiration"]) == ("expired", queue, "200")
        assert message.expiration is None
    else:
        with pytest.raises(TimeoutError):
            await receive(client, dead, 1, seconds=0.5)
    with pytest.raises(TimeoutError):
        await receive(client, queue, 1, seconds=0.2)
