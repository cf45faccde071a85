"""Error commands, refused on the queues of a delay infrastructure."""

from __future__ import annotations

import inspect
from contextlib import aclosing
from datetime import timedelta

import pytest

import bide
from bide.amqp.connection import Connection
from bide.error_queues import ErrorQueue, Selection
from bide.error_queues.undeliverable import resend
from bide.errors import DelayQueueError
from bide.local_broker import LocalBroker
from bide.patterns.event_bus import EventBusQueue
from bide.topology import Argument, Binding, Queue
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.receiving import delete_bound, eventually, fresh, receive
from tests.broker.test_error_queues import listed

DIGIT = "bide.v1.s10"
NOWHERE = "http://127.0.0.1:1"


async def messages(queue: ErrorQueue) -> None:
    async with aclosing(queue.messages()) as found:
        async for _ in found:
            pass


async def get(queue: ErrorQueue) -> None:
    await queue.get("m")


async def groups(queue: ErrorQueue) -> None:
    await queue.groups()


async def summary(queue: ErrorQueue) -> None:
    await queue.summary()


async def count(queue: ErrorQueue) -> None:
    await queue.count()


async def retry(queue: ErrorQueue) -> None:
    await queue.retry(Selection())


async def spread(queue: ErrorQueue) -> None:
    await queue.retry(Selection(), over="1s")


async def replay(queue: ErrorQueue) -> None:
    await queue.replay(lambda _: None)


async def edit(queue: ErrorQueue) -> None:
    await queue.edit("m", body=b"x")


async def archive(queue: ErrorQueue) -> None:
    await queue.archive(Selection())


async def unarchive(queue: ErrorQueue) -> None:
    await queue.unarchive(Selection())


async def discard(queue: ErrorQueue) -> None:
    await queue.discard(Selection())


OPERATIONS = (messages, get, groups, summary, count, retry, spread, replay, edit, archive, unarchive, discard)


def test_these_tests_cover_every_operation() -> None:
    public = {name for name, _ in inspect.getmembers(ErrorQueue, inspect.isfunction) if not name.startswith("_")}
    assert {one.__name__ for one in OPERATIONS} - {"spread"} == public


@pytest.mark.parametrize("management", [True, False], ids=["management", "amqp"])
async def test_every_operation_refuses_delay_queues(client: bide.Client, broker: LocalBroker, management: bool) -> None:
    """With and without the queue's arguments from the management API."""
    target, url = fresh("orders"), broker.management_url if management else NOWHERE
    await client.declare(bide.Topology(queues=[Queue.quorum(target)]))
    receipt = await client.publish(b"x", to=target, delay="10s", message_id="m")
    queue = ErrorQueue(client, DIGIT, management_url=url)
    for operation in OPERATIONS:
        with pytest.raises(DelayQueueError, match="wait there until they are due"):
            await operation(queue)
    (message,) = await receive(client, target, 1)
    assert receipt.due is not None
    assert message.received_at >= receipt.due


@pytest.mark.parametrize("management", [True, False], ids=["management", "amqp"])
async def test_delay_queues_are_refused_as_targets(client: bide.Client, broker: LocalBroker, management: bool) -> None:
    error, target = fresh("error"), fresh("orders")
    await client.declare(bide.Topology(queues=[Queue.quorum(error), Queue.quorum(target)]))
    await client.publish(b"x", to=target, delay="10s")
    await client.publish(b"x", to=error, message_id="m")
    queue = ErrorQueue(client, error, management_url=broker.management_url if management else NOWHERE)
    with pytest.raises(DelayQueueError, match="has no target"):
        await queue.retry(Selection(), to=DIGIT)
    with pytest.raises(DelayQueueError, match="has no target"):
        await queue.replay(lambda _: client.now(), to=DIGIT)
    with pytest.raises(DelayQueueError, match="has no target"):
        await queue.edit("m", body=b"y", to=DIGIT)
    assert [one.message_id for one in await listed(queue)] == ["m"]


async def test_a_delay_queue_in_the_headers_gets_no_message(client: bide.Client, connection: Connection) -> None:
    """Such a message has no target: it would end in the undeliverable queue."""
    error = fresh("error")
    await client.declare(SMALL_CLOCK.topology() | bide.Topology(queues=[Queue.quorum(error)]))
    values = {"message_id": "m", "headers": {"bide-failed-queue": DIGIT}}
    async with await connection.channel(confirms=True) as channel:
        await channel.publish(exchange="", routing_key=error, values=values, body=b"x")
    queue = ErrorQueue(client, error, management_url=NOWHERE)
    for operation in (queue.retry(Selection()), queue.replay(lambda _: client.now())):
        found = await operation
        assert (found.done, list(found.kept.values())) == (0, [1])
        assert "has no target" in next(iter(found.kept))
    with pytest.raises(DelayQueueError, match="has no target"):
        await queue.edit("m", body=b"y")
    assert [one.message_id for one in await listed(queue)] == ["m"]


@pytest.mark.parametrize("management", [True, False], ids=["management", "amqp"])
async def test_a_level_under_another_name_is_refused(
    client: bide.Client, broker: LocalBroker, management: bool
) -> None:
    """By its arguments, or else by the keys on the first message of it that is read."""
    name, target = fresh("mine"), fresh("orders")
    arguments: dict[str, Argument] = {"x-message-ttl": 60_000, "x-dead-letter-exchange": "bide.v1.c"}
    mine = bide.Topology(queues=[Queue.quorum(name, arguments)], bindings=[Binding("bide.v1.s", name, "~s9")])
    await client.declare(SMALL_CLOCK.topology() | mine | bide.Topology(queues=[Queue.quorum(target)]))
    await client.publish(b"x", to=target, delay="9s")
    queue = ErrorQueue(client, name, management_url=broker.management_url if management else NOWHERE)
    with pytest.raises(DelayQueueError, match="belongs to a delay infrastructure"):
        await queue.retry(Selection())
    assert len(await receive(client, target, 1)) == 1


async def test_a_message_that_failed_after_its_delay_is_accepted(client: bide.Client, broker: LocalBroker) -> None:
    """A consumer that knows nothing of bide rejects it: the keys of its way are still on it."""
    name, target = fresh("error"), fresh("orders")
    dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": name}
    await client.declare(bide.Topology(queues=[Queue.quorum(name), Queue.quorum(target, dead)]))
    await client.publish(b"x", to=target, delay="1.05s", message_id="m")
    async with client.consume(target) as deliveries:
        await (await anext(deliveries)).reject()
    queue = ErrorQueue(client, name, management_url=broker.management_url, audit=False)

    async def is_listed() -> bool:
        return bool(await listed(queue))

    await eventually(is_listed)
    queue = ErrorQueue(client, name, management_url=NOWHERE, audit=False)
    # Neither is the queue that it was delivered to.
    assert (await queue.retry(Selection())).done == 1
    assert [one.message_id for one in await listed(ErrorQueue(client, target, management_url=NOWHERE))] == ["m"]


async def until_counted(queue: ErrorQueue, selection: Selection) -> None:
    """Wait until the queue has a message of the selection, for which the broker sends no event."""

    async def is_counted() -> bool:
        return bool(await queue.count(selection))

    await eventually(is_counted)


async def test_undeliverable_messages_can_be_read_but_not_retried(client: bide.Client, connection: Connection) -> None:
    target = fresh("gone")
    await delete_bound(client, connection, target)
    await client.publish(b"x", to=target, delay="200ms", message_id=target)
    queue = ErrorQueue(client, SMALL_CLOCK.undeliverable)
    mine = Selection(ids=frozenset({target}))
    await until_counted(queue, mine)
    for operation in (retry, spread, replay, edit):
        with pytest.raises(DelayQueueError, match=r"undeliverable\.resend\("):
            await operation(queue)
    assert (await queue.archive(mine)).done == 1
    assert (await queue.unarchive(mine)).done == 1
    assert (await queue.discard(mine)).done == 1


async def test_resending_sends_nothing_into_a_delay_queue(client: bide.Client, connection: Connection) -> None:
    """Any client that may write to the undeliverable queue can name one as the target."""
    await client.declare(SMALL_CLOCK.topology())
    async with await connection.channel(confirms=True) as channel:
        values = {"message_id": "forged", "headers": {"bide-to": f"q:{DIGIT}"}}
        await channel.publish(exchange="", routing_key=SMALL_CLOCK.undeliverable, values=values, body=b"x")
    found = await resend(client, allow=[DIGIT], management_url=NOWHERE)
    queue = ErrorQueue(client, SMALL_CLOCK.undeliverable)
    left = [one.message_id for one in await listed(queue)]
    await queue.discard(Selection())
    assert (found.sent, dict(found.kept), left) == (0, {f"q:{DIGIT}: DelayQueueError": 1}, ["forged"])


async def test_a_message_that_lacks_a_digit_queue_does_not_hide_the_undeliverable_queue(
    client: bide.Client, connection: Connection
) -> None:
    """It was set aside on its way, and still has the keys of queues that it did not pass."""
    target = fresh("orders")
    await client.declare(bide.Topology(queues=[Queue.quorum(target)]))
    await client.publish(b"declares what it needs", to=target, delay="1.05s")
    await receive(client, target, 1)
    async with await connection.channel() as channel:
        await channel.delete_queue("bide.v1.c5")
    # The client does not know that the queue is gone.
    await client.publish(b"x", to=target, delay="1.05s", message_id=target)
    queue = ErrorQueue(client, SMALL_CLOCK.undeliverable, management_url=NOWHERE)
    await until_counted(queue, Selection(ids=frozenset({target})))
    assert (await resend(client, allow=[target], management_url=NOWHERE)).sent == 1
    (message,) = await receive(client, target, 1)
    assert message.message_id == target


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_the_queues_of_an_event_bus_are_accepted(client: bide.Client, queue_type: str) -> None:
    bus = EventBusQueue(exchange=fresh("shop"), queue=fresh("orders"), delay=timedelta(hours=1), queue_type=queue_type)
    await client.declare(bus.topology())
    for name in (bus.retry_queue, bus.delay_queue, bus.parking_queue):
        await client.publish(b"x", to=name, message_id="m")
        queue = ErrorQueue(client, name)
        assert [one.message_id for one in await listed(queue)] == ["m"]
        assert (await queue.discard(Selection())).done == 1
