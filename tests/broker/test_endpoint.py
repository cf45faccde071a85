"""Endpoints: handlers, immediate and delayed retries, and parked messages."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import pytest

import bide
from bide.amqp.connection import Connection
from bide.errors import DeliveryLimitError, InvalidInputError, TargetNotFoundError, UnsupportedBrokerError
from bide.recoverability.failed import FailedMessage
from bide.recoverability.history import read_nservicebus_time
from bide.topology import Binding, Exchange, Queue
from tests.broker.endpoints import Recorder, running
from tests.broker.receiving import eventually, fresh, has_consumer, leaping_clock, receive
from tests.support import Vhost
from tests.timeouts import TIMEOUT

QUICK = bide.Retry(immediate=0, delays=["50ms"])
NEVER = bide.Retry(immediate=0, delays=())


def endpoint(queue: str, recorder: Recorder, **options: Any) -> bide.Endpoint:
    """An endpoint with an error queue of its own."""
    # The default's 30 s are more than the small infrastructure of these tests holds.
    options.setdefault("retry", bide.Retry(delays=["1s"]))
    return bide.Endpoint(queue, error_queue=f"{queue}.error", observers=[recorder], **options)


async def failed(client: bide.Client, queue: str, number: int = 1) -> list[FailedMessage]:
    """The messages of an error queue."""
    messages = await receive(client, queue, number)
    return [FailedMessage.read(one.raw.exchange, one.raw.routing_key, one.raw.values, one.body) for one in messages]


async def test_ten_retries_change_only_the_counters(client: bide.Client, connection: Connection) -> None:
    queue, exchange, recorder = fresh("ten"), fresh("shop"), Recorder()
    seen: list[bide.Message] = []
    app = endpoint(queue, recorder, retry=bide.Retry(immediate=0, delays=["50ms"] * 10))

    @app.handler
    async def fail(message: bide.Message) -> None:
        seen.append(message)
        raise ValueError("never")

    async with running(app, client, recorder):
        await client.declare(bide.Topology([Exchange(exchange, "topic")]))
        async with await connection.channel() as channel:
            await channel.bind(Binding(exchange, queue, "order.*"))
        await client.publish(
            b"body",
            exchange=exchange,
            routing_key="order.created",
            message_id="one",
            correlation_id="c",
            headers={"tenant": 7, "list": ["a", {"b": 1}]},
            content_type="text/plain",
            app_id="shop",
            expiration="1h",
        )
        await recorder.until("parked")
    assert len(seen) == 11
    for message in seen:
        assert (message.exchange, message.routing_key, message.body) == (exchange, "order.created", b"body")
        assert (message.message_id, message.correlation_id, message.app_id) == ("one", "c", "shop")
        assert dict(message.headers) == {"tenant": 7, "list": ["a", {"b": 1}]}
        assert message.expiration == timedelta(hours=1)
    assert [one.history.retries for one in seen] == list(range(11))
    assert [len(one.history.times) for one in seen] == list(range(11))
    changing = {"bide-retries", "bide-attempts", "bide-attempt-times", "bide-due", "x-death"}
    constant, sizes = [], set()
    for message in seen[1:]:
        headers = message.raw.values["headers"]
        assert len(headers["bide-attempt-times"]) == 11
        (death,) = headers["x-death"]
        assert death["count"] == 1
        sizes.add(len(repr({name: value for name, value in headers.items() if name not in changing})))
        constant.append((message.raw.routing_key, {k: v for k, v in headers.items() if k not in changing}))
    assert all(one == constant[0] for one in constant)
    assert len(sizes) == 1
    (parked,) = await failed(client, f"{queue}.error")
    assert parked.history.retries == 10
    assert parked.history.attempts == 11
    assert len(parked.history.times) == 11
    assert (parked.exchange, parked.routing_key, parked.queue) == (exchange, "order.created", queue)


async def test_a_parked_message_describes_its_failure(client: bide.Client) -> None:
    queue, recorder = fresh("parked"), Recorder()
    app = endpoint(queue, recorder, name="billing", retry=bide.Retry(immediate=1, delays=["50ms"]))

    @app.handler
    async def charge(message: bide.Message) -> None:
        try:
            raise KeyError("card")
        except KeyError as error:
            raise ValueError("cannot charge 50 €") from error

    before = datetime.now(UTC) - timedelta(seconds=1)
    async with running(app, client, recorder):
        await client.publish(b"x", to=queue, message_id="one", app_id="shop", type="OrderPlaced", expiration="1h")
        await recorder.until("parked")
    assert recorder.kinds() == ["failed", "retried", "failed", "parked"]
    (message,) = await failed(client, f"{queue}.error")
    assert message.exception == "ValueError"
    assert message.text == "cannot charge 50 €"
    assert (message.inner_exception, message.inner_text) == ("KeyError", "'card'")
    assert message.stack is not None
    assert "raise KeyError" in message.stack
    assert "bide/endpoint" not in message.stack
    assert message.frame is not None
    assert message.frame.startswith("test_endpoint.py:")
    assert message.frame.endswith(" in charge")
    assert message.group == "ValueError at test_endpoint.py in charge"
    assert (message.endpoint, message.queue, message.reason) == ("billing", queue, "failed")
    assert (message.message_id, message.message_type, message.sent_by) == ("one", "OrderPlaced", "shop")
    assert message.host
    assert message.process
    assert message.failed_at is not None
    assert before < message.failed_at < datetime.now(UTC)
    assert len(message.history.times) == message.history.attempts == 4
    # It must not expire in the error queue.
    assert "expiration" not in message.values
    assert message.values["headers"]["bide-expiration"] == "3600000"


async def test_a_message_that_succeeds_on_a_retry_is_not_parked(client: bide.Client) -> None:
    queue, recorder = fresh("twice"), Recorder()
    app = endpoint(queue, recorder, retry=bide.Retry(immediate=1, delays=["50ms", "50ms"]))
    tries = 0

    @app.handler
    async def fail_three_times(message: bide.Message) -> None:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise ConnectionError("not yet")

    async with running(app, client, recorder):
        await client.publish(b"x", to=queue)
        await recorder.until("processed")
    assert recorder.kinds() == ["failed", "retried", "failed", "processed"]
    assert [(one.attempt, one.retries) for one in recorder.events] == [(1, 0), (2, 0), (1, 1), (2, 1)]


async def test_immediate_retries_are_counted_by_the_queue_for_all_its_consumers(
    client: bide.Client, connection: Connection
) -> None:
    queue, first, second = fresh("shared"), Recorder(), Recorder()
    tries: list[str] = []

    def made(name: str, recorder: Recorder) -> bide.Endpoint:
        app = endpoint(queue, recorder, name=name, concurrency=1, prefetch=1, retry=bide.Retry(immediate=5, delays=()))

        @app.handler
        async def fail(message: bide.Message) -> None:
            tries.append(name)
            raise ValueError("never")

        return app

    async with running(made("first", first), client, first), running(made("second", second), client, second):
        await eventually(partial(has_consumer, connection, queue, 2))
        for number in range(4):
            await client.publish(b"x", to=queue, message_id=f"{number}")

        async def all_parked() -> bool:
            return len([one for one in first.events + second.events if one.kind == "parked"]) == 4

        await eventually(all_parked)
    assert len(tries) == 4 * 6
    assert set(tries) == {"first", "second"}


async def test_plain_functions_run_concurrently_in_threads(client: bide.Client) -> None:
    queue, recorder = fresh("threads"), Recorder()
    app = endpoint(queue, recorder, concurrency=4)
    together = threading.Barrier(4, timeout=TIMEOUT)
    threads = set()

    @app.handler
    def wait_for_others(message: bide.Message) -> None:
        threads.add(threading.get_ident())
        together.wait()

    async with running(app, client, recorder):
        for _ in range(4):
            await client.publish(b"x", to=queue)
        await recorder.until("processed", count=4)
    assert len(threads) == 4
    assert threading.get_ident() not in threads


async def test_the_concurrency_is_never_exceeded(client: bide.Client) -> None:
    queue, recorder = fresh("limit"), Recorder()
    app = endpoint(queue, recorder, concurrency=3)
    most = inside = 0
    together = asyncio.Event()

    @app.handler
    async def count(message: bide.Message) -> None:
        nonlocal most, inside
        inside += 1
        most = max(most, inside)
        if inside == 3:
            together.set()
        assert app.in_flight <= 3
        await together.wait()
        await asyncio.sleep(0.02)  # time for a fourth, which must not come
        inside -= 1

    async with running(app, client, recorder):
        await asyncio.gather(*(client.publish(b"x", to=queue) for _ in range(30)))
        await recorder.until("processed", count=30)
    assert most == 3


@pytest.mark.parametrize(
    ("options", "body", "error"),
    [
        ({"type": "Unheard"}, b"{}", "bide.errors.UnknownMessageTypeError"),
        ({"type": "Order"}, b"not json", "bide.errors.UndecodableMessageError"),
    ],
)
async def test_undecodable_messages_are_parked_at_once(
    client: bide.Client, options: dict[str, Any], body: bytes, error: str
) -> None:
    queue, recorder = fresh("raw"), Recorder()
    app = endpoint(queue, recorder)

    @app.handler(type="Order")
    async def order(message: bide.Message) -> None:
        message.json()

    async with running(app, client, recorder):
        await client.publish(body, to=queue, headers={"a": b"\xff\x00"}, **options)
        await recorder.until("parked")
    assert recorder.kinds() == ["parked"]
    (message,) = await failed(client, f"{queue}.error")
    assert (message.exception, message.body) == (error, body)
    assert message.headers == {"a": b"\xff\x00"}


async def test_handlers_are_chosen_by_message_type(client: bide.Client) -> None:
    queue, recorder = fresh("types"), Recorder()
    app = endpoint(queue, recorder)
    calls: list[tuple[str, str | None]] = []

    @app.handler(type="Shop.OrderPlaced")
    async def placed(message: bide.Message) -> None:
        calls.append(("placed", message.message_id))

    @app.handler
    async def other(message: bide.Message) -> None:
        calls.append(("other", message.message_id))

    async with running(app, client, recorder):
        await client.publish(b"", to=queue, message_id="1", type="Shop.OrderPlaced")
        enclosed = {"NServiceBus.EnclosedMessageTypes": "Shop.OrderPlaced, Shop.Messages, Version=1.0.0.0;Shop.IEvent"}
        await client.publish(b"", to=queue, message_id="2", headers=enclosed)
        await client.publish(b"", to=queue, message_id="3", type="Shop.Other")
        await client.publish(b"", to=queue, message_id="4")
        await recorder.until("processed", count=4)
    assert sorted(calls, key=lambda one: one[1] or "") == [
        ("placed", "1"),
        ("placed", "2"),
        ("other", "3"),
        ("other", "4"),
    ]


async def test_a_custom_policy_chooses_each_decision(client: bide.Client) -> None:
    queue, recorder = fresh("custom"), Recorder()
    elsewhere = fresh("elsewhere")
    await client.declare(bide.Topology(queues=[Queue.quorum(elsewhere)]))

    def policy(failure: bide.Failure) -> Any:
        return {
            b"drop": bide.Discard("not needed"),
            b"later": bide.RetryLater(timedelta(milliseconds=50)) if failure.delayed_retries < 1 else bide.Park(),
            b"away": bide.Park(elsewhere),
            b"broken": "what?",
        }[failure.headers["what"]]

    app = endpoint(queue, recorder, retry=policy)

    @app.handler
    async def fail(message: bide.Message) -> None:
        raise RuntimeError("no")

    async with running(app, client, recorder):
        for what in (b"drop", b"later", b"away", b"broken"):
            await client.publish(b"", to=queue, message_id=what.decode(), headers={"what": what})
        await recorder.until("parked", "discarded", count=4)
    assert recorder.kinds("drop") == ["discarded"]
    assert recorder.kinds("later") == ["retried", "parked"]
    assert {one.message_id for one in await failed(client, f"{queue}.error", 2)} == {"later", "broken"}
    assert [one.message_id for one in await failed(client, elsewhere)] == ["away"]


@pytest.mark.parametrize("dead_lettered", [True, False])
async def test_an_expiration_counts_across_retries(client: bide.Client, dead_lettered: bool) -> None:
    queue, dead, recorder = fresh("expires"), fresh("dead"), Recorder()
    arguments: dict[str, Any] = (
        {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead} if dead_lettered else {}
    )
    await client.declare(bide.Topology(queues=[Queue.quorum(dead), Queue.quorum(queue, arguments)]))
    app = endpoint(queue, recorder, retry=bide.Retry(immediate=0, delays=["300ms"] * 10))

    with leaping_clock() as leap:

        @app.handler
        async def fail(message: bide.Message) -> None:
            leap(timedelta(minutes=4))
            raise ValueError("never")

        async with running(app, client, recorder):
            await client.publish(b"x", to=queue, message_id="one", expiration="10m")
            await recorder.until("expired")
    assert recorder.kinds() == ["retried", "retried", "expired"]
    if dead_lettered:
        (message,) = await failed(client, dead)
        assert (message.message_id, message.reason, message.queue) == ("one", "rejected", queue)


async def test_a_delayed_message_that_was_delivered_before_expires_by_its_due_time(client: bide.Client) -> None:
    """The copy that counts the deliveries of a classic queue has no due time of its own."""
    queue, recorder = fresh("counted"), Recorder()
    await client.declare(bide.Topology(queues=[Queue(queue)]))
    await client.publish(b"x", to=queue, message_id="one", delay="500ms", expiration="10m")
    # A process dies with it.
    async with client.consume(queue) as messages:
        await asyncio.wait_for(anext(messages), TIMEOUT)
    app = endpoint(queue, recorder, retry=QUICK)
    seen: list[bide.Message] = []

    @app.handler
    async def fail_once(message: bide.Message) -> None:
        seen.append(message)
        if len(seen) == 1:
            raise ValueError("once")

    async with running(app, client, recorder):
        await recorder.until("processed", "expired")
    assert recorder.kinds() == ["retried", "processed"]
    first = seen[0].history
    assert first.deliveries == 1
    assert first.first_due is not None
    assert first.expires_at == first.first_due + timedelta(minutes=10)


async def test_retry_copies_are_not_routed_by_cc_of_the_sender(client: bide.Client) -> None:
    queue, other, recorder = fresh("cc"), fresh("other"), Recorder()
    await client.declare(bide.Topology(queues=[Queue.quorum(other), Queue.quorum(queue)]))
    app = endpoint(queue, recorder, retry=QUICK)

    @app.handler
    async def fail(message: bide.Message) -> None:
        raise ValueError("never")

    async with running(app, client, recorder):
        await client.publish(b"x", to=queue, message_id="one", headers={"CC": [other]}, user_id=client.url.user)
        await recorder.until("parked")
    assert len(await receive(client, other, 1)) == 1
    with pytest.raises(TimeoutError):
        await receive(client, other, 1, seconds=0.3)
    (message,) = await failed(client, f"{queue}.error")
    assert message.sent_by == client.url.user


async def test_duplicates_within_the_window_are_handled_once(client: bide.Client) -> None:
    queue, recorder = fresh("dedup"), Recorder()
    app = endpoint(queue, recorder, deduplicate="1h", concurrency=5)
    handled: list[str | None] = []

    @app.handler
    async def slowly(message: bide.Message) -> None:
        await asyncio.sleep(0.05)  # so that duplicates come meanwhile
        if message.message_id == "fails" and len([one for one in handled if one == "fails"]) < 1:
            handled.append("fails")
            raise ValueError("once")
        handled.append(message.message_id)

    async with running(app, client, recorder):
        for message_id in ("a", "a", "b", "a", "fails"):
            await client.publish(b"x", to=queue, message_id=message_id)
        await client.publish(b"x", to=queue, message_id="a")
        await recorder.until("processed", "duplicate", count=6)
    assert sorted(str(one) for one in handled) == ["a", "b", "fails", "fails"]
    assert recorder.kinds("a").count("duplicate") == 3


async def test_consecutive_failures_slow_the_endpoint_down_until_a_success(client: bide.Client) -> None:
    queue, recorder = fresh("breaker"), Recorder()
    app = endpoint(queue, recorder, retry=NEVER, concurrency=4, slow_down_after=3)
    fixed = False
    most_while_slow = 0

    @app.handler
    async def handle(message: bide.Message) -> None:
        nonlocal most_while_slow
        if app.slow:
            most_while_slow = max(most_while_slow, app.in_flight)
        if not fixed:
            raise ConnectionError("down")

    async with running(app, client, recorder):
        for _ in range(9):
            await client.publish(b"x", to=queue)
        await recorder.until("parked", count=5)
        assert app.slow
        fixed = True
        await client.publish(b"x", to=queue)
        await recorder.until("processed")

        async def fast() -> bool:
            return not app.slow

        await eventually(fast)
    # Messages that were being handled when it slowed down may still count.
    assert most_while_slow <= 4


async def test_deliveries_of_a_classic_queue_are_counted_by_copies(client: bide.Client) -> None:
    queue, recorder = fresh("classic"), Recorder()
    await client.declare(bide.Topology(queues=[Queue(queue)]))
    await client.publish(b"x", to=queue, message_id="poison")
    app = endpoint(queue, recorder, poison_after=3, retry=bide.Retry(immediate=2, delays=()))
    handled: list[int] = []

    @app.handler
    async def handle(message: bide.Message) -> None:
        handled.append(message.history.deliveries)
        raise ValueError("never")

    # Three processes die with it.
    for _ in range(3):
        async with client.consume(queue) as messages:
            await asyncio.wait_for(anext(messages), TIMEOUT)
    async with running(app, client, recorder):
        await recorder.until("parked")
    # The queue reported one of the three only: "redelivered" is not a count.
    assert handled == [1, 1]
    (message,) = await failed(client, f"{queue}.error")
    assert message.history.attempts == 3


async def test_a_message_that_kills_its_consumers_is_parked(client: bide.Client) -> None:
    queue, recorder = fresh("poison"), Recorder()
    await client.declare(bide.Topology(queues=[Queue.quorum(queue)]))
    await client.publish(b"x", to=queue, message_id="poison")
    for _ in range(4):
        async with client.consume(queue) as messages:
            await asyncio.wait_for(anext(messages), TIMEOUT)
    app = endpoint(queue, recorder, poison_after=4, retry=bide.Retry(immediate=1, delays=["1s"]))

    @app.handler
    async def handle(message: bide.Message) -> None:
        raise AssertionError("never called")

    async with running(app, client, recorder):
        await recorder.until("parked")
    (message,) = await failed(client, f"{queue}.error")
    assert message.exception == "bide.errors.PoisonMessageError"
    assert message.text is not None
    assert "delivered 4 times" in message.text


async def test_the_delivery_limit_is_checked_at_the_start(vhost: Vhost, release: tuple[int, ...]) -> None:
    async with bide.connect(vhost.url) as client:
        low = Queue.quorum("low", {"x-delivery-limit": 3})
        await client.declare(bide.Topology(queues=[low, Queue.quorum("usual")]))

        def made(queue: str, **options: Any) -> bide.Endpoint:
            app = bide.Endpoint(queue, management_url=vhost.broker.management_url, **options)
            app.handler(lambda message: None)
            return app

        with pytest.raises(DeliveryLimitError, match=r"'low' .* after 3 deliveries, .* needs 10"):
            await made("low").run(client)
        if release >= (4, 0):
            with pytest.raises(DeliveryLimitError, match=r"'usual' .* after 20 deliveries, .* needs 25"):
                await made("usual", poison_after=25).run(client)
        await asyncio.to_thread(
            vhost.broker.rabbitmqctl,
            "set_policy",
            "-p",
            vhost.name,
            "limit",
            "^usual$",
            '{"delivery-limit": 5}',
            "--apply-to",
            "queues",
        )
        with pytest.raises(DeliveryLimitError, match=r"'usual' .* after 5 deliveries"):
            await made("usual").run(client)


async def test_missing_queues_without_declare_are_an_error(client: bide.Client) -> None:
    app = endpoint(fresh("absent"), Recorder(), declare=False)
    app.handler(lambda message: None)
    with pytest.raises(TargetNotFoundError, match="declare=True"):
        await app.run(client)


async def test_broker_retry_delays_and_parks_from_4_3_on(client: bide.Client, release: tuple[int, ...]) -> None:
    queue, recorder = fresh("broker-retry"), Recorder()
    app = endpoint(queue, recorder, retry=bide.BrokerRetry(first="200ms", longest="300ms", times=3))
    times: list[datetime] = []

    @app.handler
    async def fail(message: bide.Message) -> None:
        times.append(datetime.now(UTC))
        raise ValueError("never")

    if release < (4, 3):
        with pytest.raises(UnsupportedBrokerError, match=r"4\.3"):
            await app.run(client)
        return
    async with running(app, client, recorder):
        await client.publish(b"x", to=queue, message_id="one")
        await recorder.until("parked")
    assert recorder.kinds() == ["failed"] * 3 + ["parked"]
    gaps = [(after - before) // timedelta(milliseconds=1) for before, after in pairwise(times)]
    assert [min(gap, delay) for gap, delay in zip(gaps, (200, 300, 300), strict=True)] == [200, 300, 300]


async def test_the_event_stream_records_every_event(client: bide.Client) -> None:
    queue, stream = fresh("parked"), fresh("events")
    recorder = Recorder()
    app = bide.Endpoint(
        queue, error_queue=f"{queue}.error", retry=QUICK, observers=[bide.EventStream(stream, keep="1h"), recorder]
    )

    @app.handler
    async def fail(message: bide.Message) -> None:
        if message.body == b"bad":
            raise ValueError("no")

    async with running(app, client, recorder):
        await client.publish(b"good", to=queue, message_id="good", delay="100ms", type="Order")
        await client.publish(b"bad", to=queue, message_id="bad")
        await recorder.until("processed", "parked", count=2)
    events = []
    async with client.consume(stream, arguments={"x-stream-offset": "first"}) as messages:
        for _ in range(3):
            message = await asyncio.wait_for(anext(messages), TIMEOUT)
            events.append(message.json())
            await message.ack()
    by_id = {one["message_id"]: [e for e in events if e["message_id"] == one["message_id"]] for one in events}
    (good,) = by_id["good"]
    assert good["event"] == "processed"
    assert good["message_type"] == "Order"
    assert good["due"] <= good["delivered"] <= good["started"] <= good["ended"]
    assert good["sent"] <= good["due"] - 100
    assert [one["event"] for one in by_id["bad"]] == ["retried", "parked"]
    assert by_id["bad"][0]["delay"] == 50
    assert by_id["bad"][1]["group"] == "ValueError at test_endpoint.py in fail"
    assert "due" not in by_id["bad"][1]


async def test_retries_use_the_delay_queues_of_celery(vhost: Vhost) -> None:
    queue, recorder = fresh("celery"), Recorder()
    app = endpoint(queue, recorder, retry=bide.Retry(immediate=0, delays=["1s"]))
    keys: list[str] = []

    @app.handler
    async def fail_once(message: bide.Message) -> None:
        keys.append(message.routing_key)
        if message.history.retries == 0:
            raise ValueError("once")

    async with bide.connect(vhost.url, infrastructure=bide.Celery()) as client, running(app, client, recorder):
        await client.publish(b"x", to=queue)
        await recorder.until("processed")
    assert keys == [queue, queue]
    assert recorder.kinds() == ["retried", "processed"]


@pytest.mark.parametrize("routing", ["direct", "conventional"])
async def test_retries_and_failures_have_the_headers_of_nservicebus(
    vhost: Vhost, routing: Literal["direct", "conventional"]
) -> None:
    layout = bide.NServiceBus(routing=routing, levels=3)
    queue, recorder = fresh("nsb"), Recorder()
    app = endpoint(queue, recorder, retry=bide.Retry(immediate=0, delays=["1s"]))
    seen: list[dict[str, Any]] = []

    @app.handler
    async def fail(message: bide.Message) -> None:
        seen.append(message.raw.values["headers"])
        raise ValueError("never")

    async with bide.connect(vhost.url, infrastructure=layout) as client:
        async with running(app, client, recorder):
            await client.publish(b"x", to=queue, message_id="one")
            await recorder.until("parked")
        (message,) = await receive(client, f"{queue}.error", 1)
    assert seen[1]["NServiceBus.Retries"] == "1"
    assert read_nservicebus_time(seen[1]["NServiceBus.Retries.Timestamp"]) is not None
    headers = message.raw.values["headers"]
    assert headers["NServiceBus.FailedQ"] == queue
    assert headers["NServiceBus.ProcessingEndpoint"] == queue
    assert headers["NServiceBus.ExceptionInfo.ExceptionType"] == "ValueError"
    assert headers["NServiceBus.ExceptionInfo.Message"] == "never"
    assert "Traceback" in headers["NServiceBus.ExceptionInfo.StackTrace"]
    assert "NServiceBus.TimeOfFailure" in headers
    assert "NServiceBus.Retries" not in headers
    read = FailedMessage.read(message.raw.exchange, message.raw.routing_key, message.raw.values, message.body)
    assert (read.queue, read.endpoint, read.exception, read.text) == (queue, queue, "ValueError", "never")


async def test_invalid_settings_are_refused() -> None:
    for options, what in [
        ({"error_queue": "q"}, "own queue"),
        ({"concurrency": 0}, "concurrency"),
        ({"retry": 5}, "function"),
        ({"poison_after": 5}, "poison_after"),
        ({"prefetch": 3}, "prefetch"),
    ]:
        with pytest.raises(InvalidInputError, match=what):
            bide.Endpoint("q", **options)  # type: ignore[arg-type]  # wrong on purpose
    app = bide.Endpoint("q")
    app.handler(lambda message: None)
    with pytest.raises(InvalidInputError, match="already"):
        app.handler(lambda message: None)


async def test_an_endpoint_without_handlers_does_not_start(client: bide.Client) -> None:
    with pytest.raises(InvalidInputError, match="no handler"):
        await bide.Endpoint(fresh("none")).run(client)


async def test_a_stop_waits_for_handlers_and_requeues_the_rest(client: bide.Client) -> None:
    queue, recorder = fresh("drain"), Recorder()
    app = endpoint(queue, recorder, concurrency=2, prefetch=20)
    inside, go_on = asyncio.Semaphore(0), asyncio.Event()

    @app.handler
    async def slowly(message: bide.Message) -> None:
        inside.release()
        await go_on.wait()

    async with running(app, client, recorder):
        for number in range(10):
            await client.publish(b"x", to=queue, message_id=f"{number}")
        for _ in range(2):
            await asyncio.wait_for(inside.acquire(), TIMEOUT)
        app.stop()
        # Those that it had fetched ahead are for others at once, not only when the handlers are done.
        given_back = await receive(client, queue, 8)
        go_on.set()
        await recorder.until("processed", count=2)
    assert recorder.kinds() == ["processed"] * 2
    handled = {one.message_id for one in recorder.events}
    assert handled | {one.message_id for one in given_back} == {f"{number}" for number in range(10)}
    with pytest.raises(TimeoutError):
        await receive(client, queue, 1, seconds=0.3)


async def test_a_handler_that_exceeds_the_drain_time_is_cancelled_and_requeued(client: bide.Client) -> None:
    queue, recorder = fresh("late"), Recorder()
    app = endpoint(queue, recorder, drain="200ms")
    inside, cancelled = asyncio.Event(), asyncio.Event()

    @app.handler
    async def for_ever(message: bide.Message) -> None:
        inside.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    work = asyncio.create_task(app.run(client))
    await asyncio.wait_for(recorder.ready.wait(), TIMEOUT)
    await client.publish(b"x", to=queue, message_id="one")
    await asyncio.wait_for(inside.wait(), TIMEOUT)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(work, TIMEOUT)
    assert cancelled.is_set()
    assert recorder.events == []
    (message,) = await receive(client, queue, 1)
    assert message.message_id == "one"
    assert message.redelivered


async def test_messages_are_held_until_the_error_queue_is_back(client: bide.Client, connection: Connection) -> None:
    queue, recorder = fresh("held"), Recorder()
    app = endpoint(queue, recorder, retry=NEVER)

    @app.handler
    async def fail(message: bide.Message) -> None:
        raise ValueError("never")

    async with running(app, client, recorder):
        async with await connection.channel() as channel:
            await channel.delete_queue(f"{queue}.error")
        await client.publish(b"x", to=queue, message_id="one")
        with pytest.raises(AssertionError, match="still not so"):
            await recorder.until("parked", seconds=1)
        await client.declare(bide.Topology(queues=[Queue.quorum(f"{queue}.error")]))
        await recorder.until("parked")
    assert [one.message_id for one in await failed(client, f"{queue}.error")] == ["one"]
