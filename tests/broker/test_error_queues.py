"""Error queues: browse, retry, edit, archive, discard, and the record of operations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

import pika
import pytest

import bide
from bide.amqp.connection import Connection
from bide.error_queues import ErrorQueue, FailedMessage, OperationResult, Selection, read_operator_log
from bide.error_queues.operator_log import OPERATOR_LOG, OperatorLogWriter
from bide.errors import (
    InvalidInputError,
    NotFoundError,
    PublishRefusedError,
    ReservedHeaderError,
    TargetNotFoundError,
)
from bide.local_broker import LocalBroker
from bide.recoverability.exception_text import ExceptionText
from bide.recoverability.history import History
from bide.recoverability.report import FailureReport
from bide.topology import Binding, Exchange, Queue
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.endpoints import Recorder, running
from tests.broker.receiving import eventually, fresh, receive
from tests.support import Vhost
from tests.timeouts import TIMEOUT


def report(error: Exception, queue: str, **changes: Any) -> dict[str, Any]:
    """The headers of a parked message."""
    now = datetime.now(UTC)
    values: dict[str, Any] = {
        "endpoint": "billing",
        "queue": queue,
        "failed_at": now,
        "explanation": ExceptionText.of(error),
        "history": History(attempts=3, times=(now,) * 3, first_failed_at=now, retries=2),
        "host": "h",
        "process": 7,
    } | changes
    return FailureReport(**values).headers(nservicebus=False)


async def park(client: bide.Client, queue: str, number: int, failed_on: str, **options: Any) -> None:
    """Put messages into an error queue, as an endpoint does."""
    from bide.delay.received import SentMessage
    from bide.recoverability import copies

    error = options.pop("error", ValueError("no"))
    prefix = options.pop("prefix", "m")
    headers = report(error, failed_on, **options)
    await client.declare(bide.Topology(queues=[Queue.quorum(queue), Queue.quorum(failed_on)]))

    def copy(place: int) -> Any:
        values = {"message_id": f"{prefix}{place}", "type": "Order", "delivery_mode": 2, "headers": {"place": place}}
        sent = SentMessage(exchange="shop", routing_key="order.created", values=values, due=None)
        return copies.parked(sent, b"body %d" % place, queue=queue, headers=headers, sent_by="shop")

    await asyncio.gather(*(client.forward(copy(place)) for place in range(number)))


async def listed(error_queue: ErrorQueue, /, **conditions: Any) -> list[FailedMessage]:
    """The chosen messages."""
    return [one async for one in error_queue.messages(Selection(**conditions))]


async def test_reading_an_error_queue_repeatedly_changes_nothing(client: bide.Client) -> None:
    """More often than any delivery limit, in the same order, with the same ids."""
    name = fresh("error")
    await park(client, name, 5, fresh("orders"))
    queue = ErrorQueue(client, name, audit=False)
    before = await listed(queue)
    assert len(before) == 5
    for _ in range(45):
        assert {one.id for one in await listed(queue)} == {one.id for one in before}
    after = await listed(queue)
    assert {(one.id, one.body, one.exception, one.queue, one.exchange, one.routing_key) for one in after} == {
        (one.id, one.body, one.exception, one.queue, one.exchange, one.routing_key) for one in before
    }
    assert all(one.history == before[0].history for one in after)


async def test_reading_loses_nothing_at_a_low_delivery_limit(client: bide.Client, broker: LocalBroker) -> None:
    name = fresh("error")
    await client.declare(bide.Topology(queues=[Queue.quorum(name, {"x-delivery-limit": 4})]))
    for number in range(3):
        await client.publish(b"x", to=name, message_id=f"{number}")
    queue = ErrorQueue(client, name, audit=False, management_url=broker.management_url)
    for _ in range(10):
        assert len(await listed(queue)) == 3


async def test_every_condition_selects_its_messages(client: bide.Client) -> None:
    name, orders, billing = fresh("error"), fresh("orders"), fresh("billing")
    await park(client, name, 2, orders)
    old = datetime.now(UTC) - timedelta(days=2)
    await park(client, name, 3, billing, error=TimeoutError("Gateway down"), failed_at=old, prefix="b", endpoint="cash")
    queue = ErrorQueue(client, name, audit=False)
    assert await queue.count() == 5
    cases: list[tuple[dict[str, Any], int]] = [
        ({"queue": billing}, 3),
        ({"endpoint": "cash"}, 3),
        ({"exception": "TimeoutError"}, 3),
        ({"text": "GATEWAY"}, 3),
        ({"older_than": timedelta(days=1)}, 3),
        ({"newer_than": timedelta(days=1)}, 2),
        ({"headers": {"place": "1"}}, 2),
        ({"headers": {"place": "1"}, "queue": orders}, 1),
        ({"message_type": "Order"}, 5),
        ({"reason": "failed"}, 5),
        ({"reason": "expired"}, 0),
        ({"group": "ValueError"}, 2),
        ({"ids": frozenset({"b1"})}, 1),
    ]
    for conditions, expected in cases:
        assert len(await listed(queue, **conditions)) == expected, conditions
    groups = await queue.groups()
    assert [(one.name, one.count, one.queues) for one in groups] == [
        ("TimeoutError", 3, {billing}),
        ("ValueError", 2, {orders}),
    ]
    assert [one.name for one in await queue.groups(by="type")] == ["Order"]
    summary = await queue.summary(Selection(queue=billing))
    assert (summary.total, dict(summary.by["exception"])) == (3, {"TimeoutError": 3})
    assert (await queue.get("b1")).endpoint == "cash"
    with pytest.raises(NotFoundError, match="'missing'"):
        await queue.get("missing")


async def test_a_retry_restores_exactly_the_chosen_messages(client: bide.Client) -> None:
    name, orders = fresh("error"), fresh("orders")
    await park(client, name, 4, orders)
    queue = ErrorQueue(client, name)
    moved = await queue.retry(Selection(ids=frozenset({"m1", "m3"})))
    assert (moved.done, moved.queues, moved.kept, moved.seen) == (2, {orders: 2}, {}, 4)
    messages = {one.message_id: one for one in await receive(client, orders, 2)}
    assert set(messages) == {"m1", "m3"}
    one = messages["m1"]
    assert (one.body, one.exchange, one.routing_key, one.type) == (b"body 1", "shop", "order.created", "Order")
    assert dict(one.headers) == {"place": 1}
    # The history is kept, the failure is not; retries begin anew.
    assert (one.history.attempts, len(one.history.times), one.history.retries) == (3, 3, 0)
    assert not {header for header in one.raw.values["headers"] if "error" in header or "failed" in header}
    assert one.raw.values["headers"]["bide-operator-retries"] == 1
    assert one.sent_by == "shop"
    assert {left.message_id for left in await listed(queue)} == {"m0", "m2"}


async def test_messages_leave_the_error_queue_at_the_chosen_pace(
    client: bide.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a look may hold nothing until the next one is due, and between messages that are not chosen."""
    monkeypatch.setattr("bide.error_queues.operation.HOLD", 0.1)
    name, orders, billing = fresh("error"), fresh("orders"), fresh("billing")
    await park(client, name, 3, billing, prefix="b")
    await park(client, name, 5, orders)
    queue = ErrorQueue(client, name)
    progress: list[tuple[int, int]] = []
    begin = datetime.now(UTC)
    moving = asyncio.create_task(
        queue.retry(Selection(queue=orders), over="2s", progress=lambda *now: progress.append(now))
    )
    messages = await receive(client, orders, 5)
    waits = [(one.received_at - begin).total_seconds() for one in messages]
    for place, wait in enumerate(waits):
        assert wait >= place * 0.4
    moved = await moving
    assert (moved.done, moved.queues, moved.seen, moved.left) == (5, {orders: 5}, 8, None)
    assert progress == [(0, 5), *((done, 5) for done in range(1, 6))]
    assert await queue.count() == 3


async def test_messages_that_cannot_be_sent_do_not_slow_the_pace(
    client: bide.Client, monkeypatch: pytest.MonkeyPatch, connection: Connection
) -> None:
    """Each is tried once, and seen again by later passes over the queue."""
    monkeypatch.setattr("bide.error_queues.operation.HOLD", 0.1)
    name, gone, orders = fresh("error"), fresh("gone"), fresh("orders")
    await park(client, name, 2, gone, prefix="g")
    await park(client, name, 3, orders)
    async with await connection.channel() as channel:
        await channel.delete_queue(gone)
    moved = await ErrorQueue(client, name).retry(Selection(), over="2s")
    assert (moved.done, sum(moved.kept.values()), moved.queues) == (3, 2, {orders: 3})
    assert len(await receive(client, orders, 3)) == 3


async def cancel_after_the_first(operation: Callable[..., Coroutine[Any, Any, OperationResult]]) -> None:
    """Begin a paced operation on all messages, and cancel it after the first one."""
    begun = asyncio.Event()
    moving = asyncio.create_task(
        operation(Selection(), over="1h", progress=lambda done, _: begun.set() if done else None)
    )
    async with asyncio.timeout(TIMEOUT):
        await begun.wait()
    moving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await moving


async def test_a_cancelled_retry_is_recorded_and_sends_no_more(client: bide.Client) -> None:
    name, orders = fresh("error"), fresh("orders")
    await park(client, name, 6, orders)
    queue = ErrorQueue(client, name)
    await cancel_after_the_first(queue.retry)
    assert queue.interrupted is not None
    assert (queue.interrupted.done, queue.interrupted.left) == (1, 5)
    assert await queue.count() == 5
    records = [one async for one in read_operator_log(client) if one.queue == name]
    assert [one.step for one in records] == ["begun", "ids", "interrupted"]
    assert (records[-1].details["done"], records[-1].details["left"]) == (1, 5)


@pytest.mark.parametrize("operation", ["discard", "archive"])
async def test_messages_are_discarded_and_archived_at_the_chosen_pace(
    client: bide.Client, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Each at its time, and not with a batch of others."""
    monkeypatch.setattr("bide.error_queues.operation.HOLD", 0.1)
    name = fresh("error")
    await park(client, name, 5, fresh("orders"))
    queue = ErrorQueue(client, name)
    begin, progress = time.monotonic(), list[tuple[int, int, float]]()
    moved = await getattr(queue, operation)(
        Selection(), over="2s", progress=lambda done, total: progress.append((done, total, time.monotonic() - begin))
    )
    assert (moved.done, moved.kept, await queue.count()) == (5, {}, 0)
    assert [one[:2] for one in progress] == [(done, 5) for done in range(6)]
    for done, _, at in progress[1:]:
        assert at >= (done - 1) * 0.4
    records = [one async for one in read_operator_log(client) if one.queue == name]
    assert (records[0].operation, records[0].details["over"]) == (operation, "0:00:02")


async def test_a_discard_at_a_fast_pace_records_messages_together(client: bide.Client) -> None:
    """Those of a second, instead of each."""
    name = fresh("error")
    await park(client, name, 40, fresh("orders"))
    queue = ErrorQueue(client, name)
    assert (await queue.discard(Selection(), over="4s")).done == 40
    records = [one.details["ids"] async for one in read_operator_log(client) if (one.queue, one.step) == (name, "ids")]
    assert len(records) <= 5
    assert sum(map(len, records)) == 40
    assert await queue.count() == 0


@pytest.mark.parametrize("operation", ["discard", "archive"])
async def test_a_cancelled_discard_or_archive_keeps_the_rest(client: bide.Client, operation: str) -> None:
    name = fresh("error")
    await park(client, name, 6, fresh("orders"))
    queue = ErrorQueue(client, name)
    await cancel_after_the_first(getattr(queue, operation))
    assert queue.interrupted is not None
    assert (queue.interrupted.done, queue.interrupted.left, await queue.count()) == (1, 5, 5)
    records = [one async for one in read_operator_log(client) if one.queue == name]
    assert [one.step for one in records] == ["begun", "ids", "interrupted"]


async def test_a_message_that_is_recorded_as_discarded_leaves_the_queue(
    client: bide.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the operation is cancelled between the two."""
    # However late the first message is, the second one is not due yet, and one pass waits for it.
    monkeypatch.setattr("bide.error_queues.operation.HOLD", 10 * TIMEOUT)
    name = fresh("error")
    await park(client, name, 4, fresh("orders"))
    queue = ErrorQueue(client, name)
    recorded, going_on, record_ids = asyncio.Event(), asyncio.Event(), OperatorLogWriter.ids

    async def ids(writer: OperatorLogWriter, found: Sequence[str]) -> None:
        await record_ids(writer, found)
        recorded.set()
        await going_on.wait()

    monkeypatch.setattr(OperatorLogWriter, "ids", ids)
    moving = asyncio.create_task(queue.discard(Selection(), over=timedelta(seconds=8 * TIMEOUT)))
    async with asyncio.timeout(TIMEOUT):
        await recorded.wait()
        moving.cancel()
        await asyncio.sleep(0)  # delivers the cancellation
        going_on.set()
        with pytest.raises(asyncio.CancelledError):
            await moving
    records = [one async for one in read_operator_log(client) if one.queue == name]
    gone = [one for record in records if record.step == "ids" for one in record.details["ids"]]
    assert (len(gone), await queue.count()) == (1, 3)


async def test_a_retry_to_a_missing_queue_keeps_messages_and_to_another_sends_them(
    client: bide.Client, connection: Connection
) -> None:
    name, gone, other = fresh("error"), fresh("gone"), fresh("other")
    await park(client, name, 3, gone)
    async with await connection.channel() as channel:
        await channel.delete_queue(gone)
    queue = ErrorQueue(client, name)
    moved = await queue.retry(Selection())
    assert moved.done == 0
    ((reason, count),) = moved.kept.items()
    assert count == 3
    assert gone in reason
    assert await queue.count() == 3
    await client.declare(bide.Topology(queues=[Queue.quorum(other)]))
    assert (await queue.retry(Selection(), to=other)).done == 3
    assert len(await receive(client, other, 3)) == 3


async def test_edit_sends_a_new_message(client: bide.Client) -> None:
    name, orders = fresh("error"), fresh("orders")
    await park(client, name, 2, orders)
    queue = ErrorQueue(client, name)
    new = await queue.edit("m0", body=b"fixed", headers={"tenant": "a"}, without=frozenset({"place"}))
    (message,) = await receive(client, orders, 1)
    assert (message.message_id, message.body, dict(message.headers)) == (new, b"fixed", {"tenant": "a"})
    assert message.raw.values["headers"]["bide-edit-of"] == "m0"
    assert [one.message_id for one in await listed(queue)] == ["m1"]
    with pytest.raises(ReservedHeaderError):
        await queue.edit("m1", headers={"bide-due": "1"})
    with pytest.raises(InvalidInputError, match="would change nothing"):
        await queue.edit("m1")
    with pytest.raises(NotFoundError):
        await queue.edit("m0", body=b"again")
    assert [one.message_id for one in await listed(queue)] == ["m1"]


async def test_edit_says_whether_the_target_is_missing_or_refuses(client: bide.Client) -> None:
    name, full = fresh("error"), fresh("full")
    await park(client, name, 1, fresh("orders"))
    limited = bide.Queue(full, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    await client.declare(bide.Topology(queues=[limited]))
    await client.publish(b"the only one", to=full)
    queue = ErrorQueue(client, name)
    with pytest.raises(PublishRefusedError, match=rf"still in '{name}': the queue '{full}' refuses messages"):
        await queue.edit("m0", body=b"x", to=full)
    with pytest.raises(TargetNotFoundError, match=rf"still in '{name}': the queue 'missing' does not exist"):
        await queue.edit("m0", body=b"x", to="missing")
    assert [one.message_id for one in await listed(queue)] == ["m0"]


async def test_archived_messages_can_be_put_back(client: bide.Client) -> None:
    name, orders = fresh("error"), fresh("orders")
    await park(client, name, 3, orders)
    queue = ErrorQueue(client, name)
    before = {one.id: one for one in await listed(queue)}
    assert (await queue.archive(Selection(ids=frozenset({"m0", "m1"})), keep="1h")).done == 2
    assert [one.message_id for one in await listed(queue)] == ["m2"]
    archived = await listed(ErrorQueue(client, queue.archive_queue))
    assert {one.id for one in archived} == {one.id for one in before.values() if one.message_id != "m2"}
    assert all(one.values["expiration"] == "3600000" for one in archived)
    assert (await queue.unarchive(Selection(ids=frozenset({"m0"})))).done == 1
    (back,) = await listed(queue, ids=frozenset({"m0"}))
    assert "expiration" not in back.values
    assert "bide-archived-at" not in back.values["headers"]
    assert (back.exception, back.history, back.queue) == ("ValueError", before[back.id].history, orders)


async def test_an_archive_drops_messages_after_its_retention(client: bide.Client) -> None:
    name = fresh("error")
    await park(client, name, 1, fresh("orders"))
    queue = ErrorQueue(client, name)
    assert (await queue.archive(Selection(), keep="1s")).done == 1
    archive = ErrorQueue(client, queue.archive_queue)

    async def is_empty() -> bool:
        return await archive.count() == 0

    await eventually(is_empty)
    with pytest.raises(InvalidInputError, match="1 s"):
        await queue.archive(Selection(), keep="10ms")


async def test_a_discard_is_recorded(vhost: Vhost) -> None:
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await park(client, "error", 3, "orders")
        queue = ErrorQueue(client, "error")
        chosen = {one.id for one in await listed(queue, ids=frozenset({"m0", "m2"}))}
        moved = await queue.discard(Selection(ids=frozenset({"m0", "m2"})))
        assert (moved.done, moved.seen) == (2, 3)
        assert [one.message_id for one in await listed(queue)] == ["m1"]
        records = [one async for one in read_operator_log(client)]
    assert [(one.operation, one.step, one.queue) for one in records] == [
        ("discard", "begun", "error"),
        ("discard", "ids", "error"),
        ("discard", "ended", "error"),
    ]
    assert records[0].details["selection"] == {"ids": ["m0", "m2"]}
    assert set(records[1].details["ids"]) == chosen
    assert records[2].details["done"] == 2
    assert len({one.run for one in records}) == 1
    assert "@" in records[0].who
    assert records[0].user == client.url.user


async def test_malformed_records_and_errors_of_the_reader_do_not_break_the_audit(vhost: Vhost) -> None:
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        writer = OperatorLogWriter(client, operation="retry", queue="error", run="r")
        await writer.begin({})
        for junk in ("no json", "[]", "{}", '{"at": 7}', "[" * 100_000):
            await client.publish(junk, to=OPERATOR_LOG)
        await writer.end({})
        assert [one.step async for one in read_operator_log(client)] == ["begun", "ended"]
        async with aclosing(read_operator_log(client)) as records:
            await anext(records)
            with pytest.raises(KeyError, match="of the reader"):
                await records.athrow(KeyError("of the reader"))


async def test_nothing_is_recorded_before_the_first_operation(vhost: Vhost) -> None:
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        assert [one async for one in read_operator_log(client)] == []
        assert not await client.exists(OPERATOR_LOG)
        with pytest.raises(TargetNotFoundError, match="'error'"):
            await ErrorQueue(client).count()


async def test_reading_ends_while_the_queue_is_being_filled(client: bide.Client) -> None:
    name = fresh("error")
    await park(client, name, 50, fresh("orders"))
    queue = ErrorQueue(client, name)
    seen = 0
    async with aclosing(queue.messages()) as messages:
        async for _ in messages:
            seen += 1
            if seen % 10 == 0:
                await client.publish(b"new", to=name)
    assert 50 <= seen <= 56


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
async def test_a_dead_letter_queue_filled_by_pika_can_be_read_and_retried(client: bide.Client, queue_type: str) -> None:
    """pika alone: published to an exchange, rejected, expired, and dead-lettered, with the properties of pika."""
    work, dead, shop = fresh("work"), fresh("dead"), fresh("shop")
    began = datetime.now(UTC).replace(microsecond=0)  # as exact as ``x-death``
    await asyncio.to_thread(fill, client.url, work, dead, shop, queue_type)
    queue = ErrorQueue(client, dead)
    messages = await listed(queue)
    assert len(messages) == 4
    reasons = {one.body: one.reason for one in messages}
    assert reasons == {b"r0": "rejected", b"r1": "rejected", b"e0": "expired", b"e1": "expired"}
    for one in messages:
        assert (one.queue, one.exchange, one.routing_key) == (work, shop, "order.created")
        assert one.message_id is None
        assert one.failed_at is not None
        assert began <= one.failed_at <= datetime.now(UTC)
    assert [one.name for one in await queue.groups()] == [f"expired on {work}", f"rejected on {work}"]
    chosen = next(one for one in messages if one.body == b"r1")
    assert (await queue.retry(Selection(ids=frozenset({chosen.id})))).queues == {work: 1}
    (back,) = await receive(client, work, 1)
    assert (back.body, back.exchange, back.routing_key) == (b"r1", shop, "order.created")
    assert dict(back.headers) == {"tenant": 7}
    assert "x-death" not in back.raw.values["headers"]
    # The same message keeps its name, however often it is looked at.
    assert {one.id for one in await listed(queue)} == {one.id for one in messages} - {chosen.id}
    assert (await queue.retry(Selection(reason="expired"))).done == 2


def fill(url: bide.BrokerUrl, work: str, dead: str, shop: str, queue_type: str) -> None:
    """What a program does that has never heard of bide."""
    ((host, port),) = url.hosts
    credentials = pika.PlainCredentials(url.user, url.password)
    connection = pika.BlockingConnection(pika.ConnectionParameters(host, port, url.vhost, credentials))
    channel = connection.channel()
    channel.exchange_declare(shop, "topic", durable=True)
    channel.queue_declare(dead, durable=True, arguments={"x-queue-type": queue_type})
    arguments = {"x-queue-type": queue_type, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    channel.queue_declare(work, durable=True, arguments=arguments)
    channel.queue_bind(work, shop, "order.*")
    for body in (b"r0", b"r1"):
        channel.basic_publish(shop, "order.created", body, pika.BasicProperties(headers={"tenant": 7}))
    for body in (b"r0", b"r1"):
        for method, _properties, found in channel.consume(work, inactivity_timeout=TIMEOUT):
            assert found == body
            channel.basic_reject(method.delivery_tag, requeue=False)
            break
    channel.cancel()
    for body in (b"e0", b"e1"):
        properties = pika.BasicProperties(headers={"tenant": 7}, expiration="50")
        channel.basic_publish(shop, "order.created", body, properties)
    deadline = time.monotonic() + TIMEOUT
    while channel.queue_declare(dead, passive=True).method.message_count < 4:
        assert time.monotonic() < deadline, "they did not expire"
        connection.sleep(0.02)  # before the next look
    connection.close()


async def test_a_parked_message_is_handled_after_its_retry(client: bide.Client) -> None:
    name, error, recorder = fresh("night"), fresh("night-error"), Recorder()
    broken = True
    app = bide.Endpoint(name, error_queue=error, retry=bide.Retry(immediate=1, delays=["50ms"]), observers=[recorder])

    @app.handler
    async def handle(message: bide.Message) -> None:
        if broken:
            raise ConnectionError("down")

    async with running(app, client, recorder):
        await client.publish(b"x", to=name, message_id="one", expiration="1h", delay="50ms")
        await recorder.until("parked")
        queue = ErrorQueue(client, error)
        assert (await queue.groups())[0].name == "ConnectionError at test_error_queues.py in handle"
        await queue.retry(Selection())
        await recorder.until("parked", count=2)
        (message,) = await listed(queue)
        # Once more all attempts of the policy, and all of them in the history.
        assert message.history.attempts == 8
        broken = False
        await queue.retry(Selection())
        await recorder.until("processed")
    assert await queue.count() == 0
    # All tell when its sender wanted it, and only the first delivery is late.
    (due,) = {one.due_at for one in recorder.events}
    first = recorder.events[:2]
    assert due is not None
    assert [one.lateness for one in recorder.events] == [one.delivered_at - due for one in first] + [None] * 7


async def test_a_message_without_an_origin_is_kept_with_the_reason(client: bide.Client) -> None:
    name = fresh("plain")
    await client.declare(
        bide.Topology(queues=[Queue(name)], exchanges=[Exchange("e")], bindings=[Binding("e", name, "k")])
    )
    await client.publish(b"x", exchange="e", routing_key="k")
    queue = ErrorQueue(client, name)
    (message,) = await listed(queue)
    assert (message.reason, message.queue, message.exchange) == ("unknown", None, "e")
    moved = await queue.retry(Selection())
    assert moved.done == 0
    assert list(moved.kept) == ["its headers do not say which queue it failed on: name a queue with to=..."]
    assert await queue.count() == 1
