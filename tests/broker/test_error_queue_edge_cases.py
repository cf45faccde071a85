"""Error queues that are browsed often, shared, or contain messages of other systems."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import pika
import pytest

import bide
from bide.error_queues import ErrorQueue, Selection
from bide.errors import BrokerError, InvalidInputError, NotFoundError
from bide.local_broker import LocalBroker
from bide.topology import Queue
from tests.broker.endpoints import Recorder, running
from tests.broker.receiving import eventually, fresh, receive
from tests.broker.test_error_queues import listed, park

LIMIT = 4


def publish(url: bide.BrokerUrl, queue: str, bodies: Sequence[bytes], properties: pika.BasicProperties) -> None:
    """As a program does that has never heard of bide."""
    ((host, port),) = url.hosts
    credentials = pika.PlainCredentials(url.user, url.password)
    with pika.BlockingConnection(pika.ConnectionParameters(host, port, url.vhost, credentials)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for body in bodies:
            channel.basic_publish("", queue, body, properties, mandatory=True)


async def wait_for_count(queue: ErrorQueue, number: int) -> None:
    """Wait until ``number`` messages were dead-lettered, for which the broker sends no event."""

    async def are_there() -> bool:
        return await queue.count() >= number

    await eventually(are_there)


async def list_one(queue: ErrorQueue) -> None:
    """As ``bide errors list --limit 1`` does."""
    async with aclosing(queue.messages()) as messages:
        await anext(messages)


async def get_second(queue: ErrorQueue) -> None:
    await queue.get("1")


async def get_missing(queue: ErrorQueue) -> None:
    with pytest.raises(NotFoundError):
        await queue.get("missing")


async def fail_to_retry_all(queue: ErrorQueue) -> None:
    assert (await queue.retry(Selection(), to="missing")).done == 0


async def fail_to_retry_one(queue: ErrorQueue) -> None:
    assert (await queue.retry(Selection(ids=frozenset({"1"})), to="missing")).done == 0


async def fail_to_edit(queue: ErrorQueue) -> None:
    with pytest.raises(BrokerError):
        await queue.edit("1", body=b"new", to="missing")


async def interrupt_browsing(queue: ErrorQueue) -> None:
    """As Ctrl-C does."""
    looking = asyncio.Event()

    async def look() -> None:
        async with aclosing(queue.messages()) as messages:
            async for _ in messages:
                looking.set()
                await asyncio.Event().wait()

    task = asyncio.create_task(look())
    await looking.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    "what", [list_one, get_second, get_missing, fail_to_retry_all, fail_to_retry_one, fail_to_edit, interrupt_browsing]
)
async def test_reading_that_ends_early_loses_nothing_to_the_delivery_limit(
    client: bide.Client, broker: LocalBroker, what: Callable[[ErrorQueue], Awaitable[None]]
) -> None:
    """Whatever ends a look early: the queue counts a delivery of all messages that were on their way to it."""
    name = fresh("error")
    await client.declare(bide.Topology(queues=[Queue.quorum(name, {"x-delivery-limit": LIMIT})]))
    for number in range(5):
        await client.publish(b"x", to=name, message_id=f"{number}")
    queue = ErrorQueue(client, name, audit=False, management_url=broker.management_url)
    for _ in range(2 * LIMIT):
        await what(queue)
    assert {one.message_id for one in await listed(queue)} == set("01234")


async def test_an_unknown_delivery_limit_is_logged(
    client: bide.Client, caplog: pytest.LogCaptureFixture, release: tuple[int, ...]
) -> None:
    name = fresh("error")
    await client.declare(bide.Topology(queues=[Queue.quorum(name, {"x-delivery-limit": 20})]))
    await client.publish(b"x", to=name)
    queue = ErrorQueue(client, name, audit=False, management_url="http://127.0.0.1:1")
    with caplog.at_level(logging.WARNING):
        for _ in range(25):
            assert await queue.count() == 1
    # From 4.3 on, browsing does not count as a failed delivery.
    assert ("delivery limit" in caplog.text) is (release < (4, 3))


async def test_identical_messages_are_all_moved(client: bide.Client) -> None:
    """Messages without an id and without a time of failure, and two with the same id."""
    name, other = fresh("plain"), fresh("other")
    await client.declare(bide.Topology(queues=[Queue.quorum(name), Queue.quorum(other)]))
    await asyncio.to_thread(publish, client.url, name, [b"ping"] * 3, pika.BasicProperties())
    await client.publish(b"first", to=name, message_id="twin")
    await client.publish(b"second", to=name, message_id="twin")
    queue = ErrorQueue(client, name)
    names = {one.id for one in await listed(queue)}
    assert {one.id for one in await listed(queue)} == names
    assert len(names) == 2
    moved = await queue.archive(Selection())
    assert (moved.done, moved.seen) == (5, 5)
    assert {one.id for one in await listed(ErrorQueue(client, queue.archive_queue))} == names
    assert (await queue.unarchive(Selection(ids=frozenset(names)))).done == 5
    assert (await queue.retry(Selection(), to=other)).done == 5
    bodies = sorted(one.body for one in await receive(client, other, 5))
    assert bodies == [b"first", b"ping", b"ping", b"ping", b"second"]


async def test_copies_are_not_routed_by_cc(client: bide.Client) -> None:
    """CC is an address too."""
    name, other, orders = fresh("error"), fresh("other"), fresh("orders")
    await client.declare(bide.Topology(queues=[Queue.quorum(one) for one in (name, other, orders)]))
    properties = pika.BasicProperties(headers={"bide-failed-queue": orders, "CC": [other]})
    await asyncio.to_thread(publish, client.url, name, [b"x"], properties)
    assert len(await receive(client, other, 1)) == 1
    queue = ErrorQueue(client, name)
    assert (await queue.archive(Selection())).done == 1
    assert (await queue.unarchive(Selection())).done == 1
    assert (await queue.retry(Selection())).done == 1
    assert len(await receive(client, orders, 1)) == 1
    assert await ErrorQueue(client, other).count() == 0


async def test_an_archive_keeps_the_origin_from_x_death(client: bide.Client) -> None:
    """For messages of other systems only ``x-death`` names the failed queue, and brokers drop it from copies."""
    work, dead = fresh("work"), fresh("dead")
    arguments = {"x-queue-type": "quorum", "x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    await client.declare(bide.Topology(queues=[Queue(work, arguments=arguments), Queue.quorum(dead)]))
    await asyncio.to_thread(publish, client.url, work, [b"x"], pika.BasicProperties(headers={"tenant": 7}))
    async with client.consume(work) as messages:
        await (await anext(messages)).reject()
    queue = ErrorQueue(client, dead)
    await wait_for_count(queue, 1)
    (before,) = await listed(queue)
    assert (before.queue, before.reason) == (work, "rejected")
    assert (await queue.archive(Selection())).done == 1
    (archived,) = await listed(ErrorQueue(client, queue.archive_queue))
    assert (await queue.unarchive(Selection())).done == 1
    (after,) = await listed(queue)
    for one in (archived, after):
        assert (one.id, one.queue, one.reason, one.failed_at, one.exchange, one.routing_key, dict(one.headers)) == (
            *(before.id, work, "rejected", before.failed_at, "", work, dict(before.headers)),
        )
    assert (await queue.retry(Selection())).queues == {work: 1}


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
async def test_a_message_rejected_again_at_once_is_sent_once(client: bide.Client, queue_type: str) -> None:
    """The broker's times are in whole seconds, and tell nothing of what happened within one."""
    work, dead, rejected = fresh("work"), fresh("dead"), 0
    arguments = {"x-queue-type": queue_type, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    await client.declare(
        bide.Topology(queues=[Queue(work, arguments=arguments), Queue(dead, arguments={"x-queue-type": queue_type})])
    )

    async def reject() -> None:
        nonlocal rejected
        async with client.consume(work) as messages:
            async for message in messages:
                rejected += 1
                await message.reject()

    rejecting = asyncio.create_task(reject())
    try:
        for number in range(20):
            await client.publish(b"x", to=work, message_id=f"{number}")
        queue = ErrorQueue(client, dead)
        await wait_for_count(queue, 20)
        for run in (1, 2):
            assert (await queue.retry(Selection())).done == 20
            await wait_for_count(queue, 20)
            assert rejected == 20 * (run + 1)
        assert {one.history.returned for one in await listed(queue)} == {2}
    finally:
        rejecting.cancel()
        await asyncio.gather(rejecting, return_exceptions=True)


async def test_the_history_of_operators_survives_the_next_failure(client: bide.Client) -> None:
    name, error, recorder = fresh("night"), fresh("night-error"), Recorder()
    app = bide.Endpoint(name, error_queue=error, retry=bide.Retry(immediate=0, delays=["50ms"]), observers=[recorder])

    @app.handler
    async def handle(message: bide.Message) -> None:
        raise ConnectionError("down")

    async with running(app, client, recorder):
        await client.publish(b"x", to=name, message_id="one")
        await recorder.until("parked")
        queue = ErrorQueue(client, error)
        new = await queue.edit("one", body=b"y")
        await recorder.until("parked", count=2)
        (message,) = await listed(queue)
        assert (message.message_id, message.history.returned, message.history.edit_of) == (new, 1, "one")
        await queue.retry(Selection())
        await recorder.until("parked", count=3)
        (message,) = await listed(queue)
        assert (message.history.returned, message.history.edit_of) == (2, "one")


async def test_missing_ids_and_headers_are_reported(client: bide.Client) -> None:
    name, orders = fresh("error"), fresh("orders")
    await park(client, name, 2, orders)
    queue = ErrorQueue(client, name)
    moved = await queue.retry(Selection(ids=frozenset({"m0", "missing", "x"})))
    assert (moved.done, moved.missing) == (1, ("missing", "x"))
    with pytest.raises(InvalidInputError, match="has no header 'tennant'"):
        await queue.edit("m1", without=frozenset({"tennant"}))
    with pytest.raises(InvalidInputError, match="empty"):
        await queue.retry(Selection(text=""))
    assert await queue.count() == 1


async def test_a_stream_is_refused(client: bide.Client) -> None:
    name = fresh("stream")
    await client.declare(bide.Topology(queues=[Queue(name, arguments={"x-queue-type": "stream"})]))
    await client.publish(b"x", to=name)
    with pytest.raises(BrokerError, match="is a stream"):
        await ErrorQueue(client, name).count()
    with pytest.raises(BrokerError, match="is a stream"):
        await ErrorQueue(client, name).retry(Selection())


async def test_messages_held_by_other_consumers_are_logged(
    client: bide.Client, caplog: pytest.LogCaptureFixture
) -> None:
    name = fresh("error")
    await park(client, name, 2, fresh("orders"))
    async with client.consume(name) as messages:
        await anext(messages)
        with caplog.at_level(logging.WARNING):
            assert await ErrorQueue(client, name).count() == 0
    assert f"{name!r} has other consumers (1)" in caplog.text
    # The broker requeues a moment after the consumer has ended.
    await wait_for_count(ErrorQueue(client, name), 2)


async def test_large_messages_do_not_fill_the_memory(client: bide.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading stops by bytes, and not only by number."""
    from bide.error_queues import browser

    name, most = fresh("large"), 0
    monkeypatch.setattr(browser, "_PAUSE_AT_BYTES", 4 << 20)
    await client.declare(bide.Topology(queues=[Queue.quorum(name)]))
    for _ in range(20):
        await client.publish(bytes(1 << 20), to=name)
    put = browser.QueueBrowser.put

    def watch(self: browser.QueueBrowser, delivery: Any) -> None:
        nonlocal most
        put(self, delivery)
        most = max(most, self._unread_bytes)

    monkeypatch.setattr(browser.QueueBrowser, "put", watch)
    queue = ErrorQueue(client, name)
    async with aclosing(queue.messages()) as messages:
        count = 0
        async for _ in messages:
            await asyncio.sleep(0.01)  # as a slow terminal
            count += 1
    assert count == 20
    # What the socket had been read for already still comes.
    assert most <= 6 << 20


async def test_a_queue_keeps_its_order(client: bide.Client, release: tuple[int, ...]) -> None:
    """Also when messages were removed, the last one included, and when browsing stopped early."""
    name = fresh("long")
    await client.declare(bide.Topology(queues=[Queue.quorum(name)]))
    for start in range(0, 1500, 500):
        await asyncio.gather(*(client.publish(b"x", to=name, message_id=f"{start + one}") for one in range(500)))
    queue = ErrorQueue(client, name, audit=False)
    before = [str(one.message_id) for one in await listed(queue)]
    gone = {before[place] for place in (0, 31, 700, 1499)}
    assert (await queue.discard(Selection(ids=frozenset(gone)))).done == 4
    left = [one for one in before if one not in gone]
    await list_one(queue)
    assert [one.message_id for one in await listed(queue)] == left
    # Given back they were, and not only dropped with the connection.
    (first,) = await listed(queue, ids=frozenset(left[:1]))
    count = first.values["headers"].get("x-delivery-count", 0)
    assert count == (0 if release >= (4, 3) else 4)
