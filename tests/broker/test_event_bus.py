"""The event bus: rejected, counted, delayed and parked events."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

import bide
from bide.amqp.connection import Connection
from bide.client.message import Message
from bide.delay.protocol import QueueTarget
from bide.errors import ConsumerCancelledError, TargetNotFoundError
from bide.messages.prepared import PreparedMessage
from bide.messaging.event_bus import EventBus
from bide.patterns.event_bus import DELIVERY_LIMIT, EventBusQueue
from bide.recoverability.failed import FailedMessage
from bide.topology import Queue
from tests.broker.receiving import eventually, fresh, leaping_clock, ready, receive, stack_of
from tests.timeouts import TIMEOUT

Handler = Callable[[Message], Awaitable[None]]

KILLED_BEFORE_ITS_ACK = """
import asyncio, os, signal, sys
import bide
from bide.messaging.event_bus import EventBus
from bide.client.message import Message
from bide.patterns.event_bus import EventBusQueue

async def die(message):
    os.kill(os.getpid(), signal.SIGKILL)

async def main(url, exchange, queue):
    # The broker has confirmed the copy when a worker acknowledges: no signal from outside would hit that moment.
    Message.ack = die
    async with bide.connect(url) as client:
        await EventBus(client, EventBusQueue(exchange=exchange, queue=queue, delay="100ms")).retry()

asyncio.run(main(*sys.argv[1:]))
"""


@asynccontextmanager
async def running(*work: Any) -> AsyncIterator[None]:
    """Run coroutines until the end of the block; an error of one fails the test."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def made(
    client: bide.Client,
    *,
    exchange: str | None = None,
    keys: tuple[str, ...] = (),
    queue_type: str = "quorum",
    delay: str = "100ms",
    limit: int = 3,
) -> EventBus:
    names = EventBusQueue(
        exchange=exchange or fresh("bus"), queue=fresh("events"), delay=delay, queue_type=queue_type, keys=keys
    )
    bus = EventBus(client, names, limit=limit)
    await bus.declare()
    return bus


@pytest.fixture
def acked(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """The messages that were acknowledged so far."""
    found: list[Message] = []
    ack = Message.ack

    async def keep(message: Message) -> None:
        await ack(message)
        found.append(message)

    monkeypatch.setattr(Message, "ack", keep)
    return found


async def next_of(consumer: bide.Consumer) -> Message:
    return await asyncio.wait_for(anext(consumer), TIMEOUT)


async def fail(message: Message) -> None:
    raise ValueError("never")


def keeping(seen: list[Message], handler: Handler | None = None) -> Handler:
    """A handler that keeps every message, and then does what another does."""

    async def keep(message: Message) -> None:
        seen.append(message)
        if handler is not None:
            await handler(message)

    return keep


async def parked_on(client: bide.Client, bus: EventBus) -> tuple[Message, FailedMessage]:
    (message,) = await receive(client, bus.names.parking_queue, 1)
    return message, FailedMessage.read(message.raw.exchange, message.raw.routing_key, message.raw.values, message.body)


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_an_event_that_always_fails_is_retried_and_then_parked(client: bide.Client, queue_type: str) -> None:
    bus = await made(client, queue_type=queue_type, keys=("order.*",))
    seen: list[Message] = []
    async with running(bus.run(keeping(seen, fail))):
        await bus.publish(b"body", key="order.created", message_id="one", headers={"a": 1}, priority=2)
        parked, failed = await parked_on(client, bus)
    assert [one.history.retries for one in seen] == [0, 1, 2, 3]
    for message in [*seen, parked]:
        assert (message.exchange, message.routing_key) == (bus.names.exchange, "order.created")
        assert (message.body, message.message_id, message.priority) == (b"body", "one", 2)
        assert message.headers.get("a") == 1
    assert all(
        after.received_at - before.received_at >= timedelta(milliseconds=100) for before, after in pairwise(seen)
    )
    assert (failed.queue, failed.exchange, failed.routing_key) == (bus.names.queue, bus.names.exchange, "order.created")
    assert (failed.history.retries, failed.history.attempts, len(failed.history.times)) == (3, 4, 4)
    assert failed.text == "rejected 4 times (limit: 3 retries)"
    assert "x-death" not in parked.headers


async def test_headers_do_not_grow_with_retries(client: bide.Client) -> None:
    """Ten retries: the same headers, each of the same size, but for the counters' values."""
    bus = await made(client, limit=10, delay="10ms")
    seen: list[Message] = []
    async with running(bus.run(keeping(seen, fail))):
        await bus.publish(b"x", headers={"a": 1})
        await parked_on(client, bus)
    first, *others = [one.raw.values["headers"] for one in seen[1:]]
    assert len(others) == 9
    for headers in others:
        assert headers.keys() == first.keys()
        assert len(headers["x-death"]) == len(first["x-death"]) == 1
        assert len(headers["bide-attempt-times"]) == len(first["bide-attempt-times"]) == 11
        constant = headers.keys() - {"bide-retries", "bide-attempts", "bide-attempt-times", "x-death"}
        assert {name: headers[name] for name in constant} == {name: first[name] for name in constant}


async def test_an_event_that_succeeds_on_a_retry_leaves_every_queue(
    client: bide.Client, connection: Connection, acked: list[Message]
) -> None:
    bus = await made(client)
    seen: list[Message] = []

    async def fail_twice(message: Message) -> None:
        if message.history.retries < 2:
            raise ValueError("not yet")

    async def are_acked() -> bool:
        # A copy can be handled before the message that it replaces is acknowledged in the retry queue.
        return len(acked) == 3

    async with running(bus.run(keeping(seen, fail_twice))):
        await bus.publish(b"x")
        await eventually(are_acked, step=0.01)
    assert len(seen) == 3
    names = bus.names
    for queue in (names.queue, names.retry_queue, names.delay_queue, names.parking_queue):
        assert await ready(connection, queue) == 0


async def test_without_retries_an_event_is_parked_at_once(client: bide.Client) -> None:
    bus = await made(client, limit=0)
    seen: list[Message] = []
    async with running(bus.run(keeping(seen, fail))):
        await bus.publish(b"x")
        _, failed = await parked_on(client, bus)
    assert len(seen) == 1
    assert failed.history.retries == 0


@pytest.mark.parametrize(("cancelled", "logged"), [(False, "KeyError: "), (True, "was cancelled from within")])
async def test_failures_are_logged_with_their_place(
    client: bide.Client, caplog: pytest.LogCaptureFixture, cancelled: bool, logged: str
) -> None:
    bus = await made(client, limit=0)

    async def raise_it(message: Message) -> None:
        if not cancelled:
            raise KeyError
        other = asyncio.create_task(asyncio.sleep(60))  # cancelled below
        other.cancel()
        await other

    async with running(bus.run(raise_it)):
        await bus.publish(b"x", message_id="one")
        await parked_on(client, bus)
    (record,) = [one for one in caplog.records if "failed: " in one.getMessage()]
    assert record.getMessage().startswith(f"{bus.names.queue}: one failed: ")
    assert logged in record.getMessage()
    assert "in raise_it" in stack_of(record)


async def test_a_handler_that_cancels_its_own_task_fails_only_its_event(client: bide.Client) -> None:
    names = EventBusQueue(exchange=fresh("bus"), queue=fresh("events"), delay="100ms")
    bus = EventBus(client, names, limit=0, concurrency=1)
    await bus.declare()

    async def cancel(message: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(10 * TIMEOUT)  # raises CancelledError

    async with running(bus.run(cancel)):
        for name in ("one", "two"):
            await bus.publish(b"x", message_id=name)
            message, _ = await parked_on(client, bus)
            assert message.message_id == name


async def test_a_handler_that_ignores_cancellation_does_not_keep_the_bus_running(
    client: bide.Client,
) -> None:
    """Two events wait: no other begins when the first has come to its end."""
    names = EventBusQueue(exchange=fresh("bus"), queue=fresh("events"), delay="100ms")
    bus, begun = EventBus(client, names, concurrency=1), asyncio.Semaphore(0)
    await bus.declare()

    async def go_on(message: Message) -> None:
        begun.release()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(10 * TIMEOUT)  # until it is cancelled

    for _ in range(2):
        await bus.publish(b"x")
    work = asyncio.create_task(bus.run(go_on))
    await begun.acquire()
    work.cancel()
    async with asyncio.timeout(TIMEOUT):
        with pytest.raises(asyncio.CancelledError):
            await work
    assert begun.locked(), "another event was begun"
    assert len(await receive(client, names.queue, 2)) == 2


async def test_copies_continue_the_count_of_x_death(client: bide.Client) -> None:
    """Rejected three times: as published, as a copy of another system's worker, and as a copy of bide."""
    bus = await made(client, limit=3, keys=("order.*",))
    names = bus.names
    await bus.publish(b"x", key="order.created", message_id="one")
    async with client.consume(names.queue) as work, client.consume(names.retry_queue) as retries:
        await (await next_of(work)).reject()
        first = await next_of(retries)
        (death,) = first.headers["x-death"]
        assert (death["queue"], death["reason"], death["count"]) == (names.queue, "rejected", 1)
        # By rejecting it: then the broker goes on counting in x-death.
        await first.reject()
        await (await next_of(work)).reject()
        second = await next_of(retries)
        assert [(one["queue"], one["count"]) for one in second.headers["x-death"]] == [
            (names.queue, 2),
            (names.retry_queue, 1),
        ]
        await second.requeue()
        await retries.close()
        async with running(bus.retry()):
            copy = await next_of(work)
            assert copy.history.retries == 2
            assert (copy.exchange, copy.routing_key) == (names.exchange, "order.created")
            assert [one["queue"] for one in copy.headers["x-death"]] == [names.delay_queue]
            await copy.reject()
            last = await next_of(work)
            assert last.history.retries == 3
            await last.reject()
            _, failed = await parked_on(client, bus)
    assert (failed.history.retries, failed.text) == (3, "rejected 4 times (limit: 3 retries)")


@pytest.mark.parametrize("reason", ["rejected", "expired"])
async def test_a_published_x_death_is_continued_only_below_4_0_1(
    client: bide.Client, release: tuple[int, ...], reason: str, connection: Connection
) -> None:
    """The reason why copies carry their count in a header of bide.

    Below 4.0.1 the broker goes on with the header of a publisher, and drops what it takes for a cycle: a message that
    no consumer has rejected on its way. From 4.0.1 on it starts anew.
    """
    names = (await made(client, queue_type="classic", delay="10ms")).names
    expires = {"expiration": "10ms"} if reason == "expired" else {}
    await client.publish(b"x", exchange=names.exchange, routing_key=names.queue, **expires)  # type: ignore[arg-type]  # options by name
    if reason == "rejected":
        async with client.consume(names.queue) as work:
            await (await next_of(work)).reject()
    (dead,) = await receive(client, names.retry_queue, 1)
    copied = {"headers": {"x-death": dead.raw.values["headers"]["x-death"]}}
    await client.forward(
        PreparedMessage(target=QueueTarget(names.delay_queue), body=b"x", message_id="copy", values=copied)
    )

    async def released() -> bool:
        return await ready(connection, names.delay_queue) == 0

    await eventually(released, step=0.01)
    if release < (4, 0, 1) and reason == "expired":
        with pytest.raises(TimeoutError):
            await receive(client, names.queue, 1, seconds=0.5)
        return
    (back,) = await receive(client, names.queue, 1)
    deaths = [(one["queue"], one["reason"]) for one in back.headers["x-death"]]
    believed = [(names.queue, "rejected")] if release < (4, 0, 1) else []
    assert deaths == [(names.delay_queue, "expired"), *believed]


async def test_a_worker_killed_between_confirm_and_ack_duplicates_and_loses_nothing(
    client: bide.Client, clock_url: str, connection: Connection, acked: list[Message]
) -> None:
    bus = await made(client)
    names = bus.names
    await bus.publish(b"x", message_id="one")
    async with client.consume(names.queue) as work:
        await (await next_of(work)).reject()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED_BEFORE_ITS_ACK, clock_url, names.exchange, names.queue
    )
    assert await asyncio.wait_for(process.wait(), TIMEOUT) == -signal.SIGKILL
    received: list[Message] = []

    async def are_acked() -> bool:
        # Both copies, and the message in the retry queue that the second one replaces.
        return len(acked) == 3

    async with running(bus.run(keeping(received))):
        await eventually(are_acked)
    assert [(one.message_id, one.history.retries) for one in received] == [("one", 1)] * 2
    for queue in (names.queue, names.retry_queue, names.delay_queue, names.parking_queue):
        assert await ready(connection, queue) == 0


async def test_an_event_that_kills_its_consumers_is_parked(client: bide.Client) -> None:
    bus = await made(client, keys=("order.*",))
    await bus.publish(b"x", key="order.created", message_id="one")
    async with client.consume(bus.names.queue) as work:
        for _ in range(DELIVERY_LIMIT + 1):
            # To the queue a process that died is the same.
            await (await next_of(work)).requeue()
    seen: list[Message] = []
    async with running(bus.run(keeping(seen))):
        message, failed = await parked_on(client, bus)
    assert not seen
    assert failed.text is not None
    assert failed.text.startswith("delivered up to the queue's limit")
    assert (message.message_id, message.routing_key) == ("one", "order.created")


async def test_a_retry_reaches_only_the_queue_that_failed(client: bide.Client) -> None:
    """The delay queue releases into the bus, where another subscriber's wildcard matches too."""
    bus = await made(client, limit=2)
    audit = await made(client, exchange=bus.names.exchange, keys=("#",))
    failed: list[Message] = []
    audited: list[Message] = []
    async with running(bus.run(keeping(failed, fail)), audit.run(keeping(audited))):
        await bus.publish(b"x", message_id="one")
        await parked_on(client, bus)
        await bus.publish(b"x", message_id="two", key="something.else")

        async def both() -> bool:
            return len(audited) > 1

        # The copies stand before the second event in its queue.
        await eventually(both)
    assert [one.history.retries for one in failed] == [0, 1, 2]
    assert [one.message_id for one in audited] == ["one", "two"]


async def test_a_delayed_event_that_fails_keeps_its_address(client: bide.Client) -> None:
    bus = await made(client, limit=1, keys=("order.*",))
    seen: list[Message] = []
    async with running(bus.run(keeping(seen, fail))):
        await bus.publish(b"x", key="order.created", delay="100ms")
        parked, _ = await parked_on(client, bus)
    assert {(one.exchange, one.routing_key) for one in [*seen, parked]} == {(bus.names.exchange, "order.created")}
    assert [one.history.retries for one in seen] == [0, 1]
    assert parked.history.first_due == seen[0].due


async def test_an_event_that_expires_before_it_is_handled_is_parked(client: bide.Client) -> None:
    bus = await made(client, keys=("order.*",))
    await bus.publish(b"x", key="order.created", expiration="50ms")
    async with running(bus.retry()):
        message, failed = await parked_on(client, bus)
    assert (failed.text, failed.history.attempts) == ("its expiration of 0:00:00.05 is over", 0)
    assert (message.routing_key, message.expiration) == ("order.created", timedelta(milliseconds=50))


async def test_an_expiration_counts_across_retries(client: bide.Client) -> None:
    bus = await made(client, limit=100, delay="100ms")
    seen: list[Message] = []
    with leaping_clock() as leap:

        async def fail_later(message: Message) -> None:
            leap(timedelta(minutes=4))
            raise ValueError("never")

        async with running(bus.run(keeping(seen, fail_later))):
            await bus.publish(b"x", expiration="10m")
            _, failed = await parked_on(client, bus)
    assert [one.history.retries for one in seen] == [0, 1, 2]
    assert all(one.expiration == timedelta(minutes=10) for one in seen)
    assert failed.text == "its expiration of 0:10:00 is over"


async def test_a_missing_or_deleted_queue_is_an_error(client: bide.Client, connection: Connection) -> None:
    names = EventBusQueue(exchange=fresh("bus"), queue=fresh("events"), delay="1s")
    with pytest.raises(TargetNotFoundError, match=names.queue):
        await EventBus(client, names).run(fail)
    bus = await made(client)
    channel = await connection.channel()
    seen: list[Message] = []

    async def handled() -> bool:
        return bool(seen)

    work = asyncio.ensure_future(bus.run(keeping(seen)))
    await bus.publish(b"x")
    await eventually(handled, step=0.01)
    await channel.delete_queue(bus.names.queue)
    with pytest.raises(ConsumerCancelledError):
        await asyncio.wait_for(work, TIMEOUT)
    await channel.close()


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
@pytest.mark.parametrize("dead_lettered", [True, False])
async def test_an_expired_message_is_dead_lettered_or_discarded(
    client: bide.Client, connection: Connection, dead_lettered: bool, queue_type: str
) -> None:
    queue, dead = fresh("expiring"), fresh("dead")
    way: dict[str, str] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead} if dead_lettered else {}
    await client.declare(
        bide.Topology(queues=[Queue(dead), Queue(queue, arguments={"x-queue-type": queue_type, **way})])
    )
    await client.publish("some message", to=queue, message_id="one", expiration="200ms")

    async def expired() -> bool:
        return await ready(connection, queue) == 0

    await eventually(expired, step=0.02)
    if dead_lettered:
        (message,) = await receive(client, dead, 1)
        (death,) = message.headers["x-death"]
        assert (death["reason"], death["queue"], death["original-expiration"]) == ("expired", queue, "200")
        assert message.message_id == "one"
        # So that it does not expire a second time.
        assert message.expiration is None
    else:
        with pytest.raises(TimeoutError):
            await receive(client, dead, 1, seconds=0.3)
