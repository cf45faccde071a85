"""Delays and retries of FastStream handlers, and what the adapter does not change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aio_pika
import pytest
from aio_pika.exceptions import ChannelNotFoundEntity
from faststream.exceptions import NackMessage, RejectMessage
from faststream.rabbit import (
    ExchangeType,
    RabbitBroker,
    RabbitExchange,
    RabbitQueue,
    RabbitResponse,
    TestRabbitBroker,
)
from faststream.rabbit.annotations import RabbitMessage

import bide
from bide.errors import InvalidDelayError, InvalidInputError, TargetNotFoundError
from bide.integrations import delays
from bide.integrations.faststream import DelayMiddleware, delayed
from tests.broker.receiving import eventually, ready_at
from tests.relay_process import gate
from tests.support import Vhost
from tests.timeouts import TIMEOUT

MAX_LATENESS = 30.0
"""Seconds. A message on a wrong route waits for minutes, or never arrives."""

Kind = Literal["stock", "adapted"]

DIRECT = RabbitExchange("direct")
TOPIC = RabbitExchange("topic", type=ExchangeType.TOPIC)


@dataclass
class Handled:
    """A message that a handler got, and when: seconds since the start of the test."""

    body: Any
    at: float
    message: RabbitMessage


@dataclass
class Application:
    """A broker, the middleware, and what its handlers got."""

    broker: RabbitBroker
    delays: DelayMiddleware
    began: float = field(default_factory=time.time)
    handled: asyncio.Queue[Handled] = field(default_factory=asyncio.Queue)

    def handler(self, queue: str | RabbitQueue, *errors: Exception, exchange: RabbitExchange | None = None) -> None:
        """Handle the messages of a queue. The first calls raise these errors."""
        left = list(errors)

        @self.broker.subscriber(queue, exchange)
        async def handle(body: Any, message: RabbitMessage) -> None:
            self.handled.put_nowait(Handled(body, time.time() - self.began, message))
            if left:
                raise left.pop(0)

    async def next(self) -> Handled:
        async with asyncio.timeout(TIMEOUT):
            return await self.handled.get()

    async def many(self, count: int) -> list[Handled]:
        return [await self.next() for _ in range(count)]

    async def handles_once(self, bodies: set[str]) -> None:
        """Wait for messages. The broker may deliver one again, but none was sent twice.

        FastStream consumes and publishes on one channel. A lost connection closes it, and so does the 404 of a publish
        to a deleted exchange. The broker then requeues the messages whose acks it has not got.
        """
        came: set[str] = set()
        while came != bodies:
            one = await self.next()
            assert one.body in bodies
            assert one.body not in came or one.message.raw_message.redelivered, f"{one.body} was sent twice"
            came.add(one.body)


def application(url: str, kind: Kind = "adapted", **options: Any) -> Application:
    broker = RabbitBroker(url, logger=None, reconnect_interval=0.1)
    middleware = DelayMiddleware(broker, **options)
    if kind == "adapted":
        broker.add_middleware(middleware)
    return Application(broker, middleware)


@asynccontextmanager
async def started(app: Application) -> AsyncIterator[None]:
    async with app.broker:
        await app.broker.start()
        yield
    await app.delays.close()


def dead_lettered(queue: str) -> RabbitQueue:
    """A queue whose rejected messages go to the queue ``dead``."""
    return RabbitQueue(queue, arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})


def holds(url: str, queue: str, count: int) -> Callable[[], Any]:
    async def is_so() -> bool:
        try:
            return await ready_at(url, queue) == count
        except TargetNotFoundError:
            # The first retry declares its delay queue a moment after its handler has failed.
            return False

    return is_so


# --- with and without the adapter


@pytest.mark.parametrize("kind", ["stock", "adapted"])
async def test_messages_without_a_delay_are_handled_as_before(vhost: Vhost, kind: Kind) -> None:
    """Sent in every way, answered, requeued by a nack, and rejected after an error."""
    app = application(vhost.url, kind)
    app.handler("work", NackMessage())
    app.handler(dead_lettered("failing"), ValueError("failed"))

    @app.broker.subscriber("doubling")
    @app.broker.publisher("work", headers={"by": "publisher"})
    async def double(number: int) -> RabbitResponse:
        return RabbitResponse(2 * number, headers={"of": str(number)})

    async with started(app):
        await app.broker.declare_queue(RabbitQueue("dead"))
        await app.broker.publish("plain", "work", headers={"a": "b"}, priority=3)
        first, again = await app.many(2)
        assert [first.body, again.body] == ["plain", "plain"]
        assert [one.message.raw_message.redelivered for one in (first, again)] == [False, True]
        assert again.message.headers == {"a": "b"}
        assert again.message.raw_message.priority == 3

        await app.broker.publish(4, "doubling")
        doubled = await app.next()
        assert doubled.body == 8
        assert {name: doubled.message.headers[name] for name in ("by", "of")} == {"by": "publisher", "of": "4"}
        answer = await app.broker.request(5, "doubling", timeout=TIMEOUT)
        assert await answer.decode() == 10
        assert (await app.next()).body == 10

        await app.broker.publish("fails", "failing")
        assert (await app.next()).body == "fails"
        await eventually(holds(vhost.url, "dead", 1))


# --- delays


async def test_delayed_messages_arrive_when_they_are_due(vhost: Vhost) -> None:
    """Through classic queues, direct and topic exchanges, once, not behind one that waits for longer."""
    app = application(vhost.url)
    app.handler("work")
    app.handler("bound", exchange=DIRECT)
    app.handler(RabbitQueue("topics", routing_key="order.*"), exchange=TOPIC)
    async with started(app):
        sends: list[tuple[str, dict[str, Any], float]] = [
            ("long", {"queue": "work"}, 3600),
            ("queue", {"queue": "work"}, 0.61),
            ("direct", {"queue": "bound", "exchange": DIRECT}, 0.3),
            ("topic", {"routing_key": "order.created", "exchange": TOPIC}, 0.3),
            ("soon", {"queue": "work"}, 0.01),
            ("now", {"queue": "work"}, 0),
        ]
        for body, target, delay in sends:
            headers = {**delayed(f"{delay}s"), "name": body}
            await app.broker.publish(body, **target, headers=headers)
        handled = await app.many(5)
        await app.broker.publish("last", "work")
        assert (await app.next()).body == "last", "one came twice"
    assert sorted(one.body for one in handled) == ["direct", "now", "queue", "soon", "topic"]
    least = {body: delay for body, _, delay in sends}
    for one in handled:
        assert least[one.body] <= one.at < least[one.body] + MAX_LATENESS
        assert one.message.headers == {"name": one.body}


async def test_every_way_to_publish_takes_a_delay(vhost: Vhost) -> None:
    """A publisher's own headers, its ``publish``, a response, and a message of aio-pika; others stay undelayed."""
    app = application(vhost.url)
    app.handler("work")
    publisher = app.broker.publisher("work", headers={**delayed("100ms"), "of": "publisher"})

    @app.broker.subscriber("asking")
    @app.broker.publisher("work")
    async def answer(delay: str) -> RabbitResponse:
        return RabbitResponse("response", headers=delayed(delay))

    message = aio_pika.Message(b"message", headers={"own": "header"}, delivery_mode=2, app_id="app")
    async with started(app):
        for _ in range(2):
            await publisher.publish("publisher")
        await app.broker.publish("100ms", "asking")
        await app.broker.publish(message, "work", headers=delayed("100ms"))
        await app.broker.publish("plain", "work")
        handled = await app.many(5)
    named = [(one.body if isinstance(one.body, str) else one.body.decode(), one) for one in handled]
    found = sorted(named, key=lambda one: one[0])
    assert [body for body, _ in found] == ["message", "plain", "publisher", "publisher", "response"]
    by_body = dict(found)
    assert by_body["publisher"].message.headers["of"] == "publisher"
    assert by_body["message"].message.headers == {"own": "header"}
    assert by_body["message"].message.raw_message.app_id == "app"
    for body, one in found:
        assert ("bide-due" in one.message.raw_message.headers) is (body != "plain")
        assert "bide-delay" not in one.message.headers


async def test_a_delayed_message_arrives_as_it_was_sent(vhost: Vhost, release: tuple[int, ...]) -> None:
    app = application(vhost.url)
    app.handler("work")
    options: dict[str, Any] = {
        "persist": True,
        "priority": 5,
        "message_id": "id",
        "correlation_id": "correlation",
        "reply_to": "",
        "message_type": "type",
        "content_encoding": "identity",
        "timestamp": 1_700_000_000,
    }
    async with started(app):
        await app.broker.publish({"a": [1]}, "work", headers={"list": "x"}, **options)
        await app.broker.publish({"a": [1]}, "work", headers={"list": "x", **delayed("15ms")}, **options)
        plain, late = await app.many(2)
    assert plain.body == late.body == {"a": [1]}
    assert plain.message.headers == late.message.headers
    for name in (
        *("delivery_mode", "message_id", "correlation_id", "reply_to", "type", "app_id", "user_id"),
        *("content_type", "content_encoding", "timestamp", "routing_key"),
    ):
        assert getattr(plain.message.raw_message, name) == getattr(late.message.raw_message, name)
    # From 4.0 on and below 4.3, a priority would hold back other messages that wait.
    assert late.message.raw_message.priority == (0 if (4, 0) <= release < (4, 3) else 5)


async def test_no_delay_is_lost_without_the_middleware(vhost: Vhost) -> None:
    """The header cannot be sent."""
    app = application(vhost.url, "stock")
    app.handler("work")
    async with started(app):
        with pytest.raises(Exception, match="Delayed"):
            await app.broker.publish("body", "work", headers=delayed("1h"))
        await app.broker.publish("last", "work")
        assert (await app.next()).body == "last"


async def test_a_missing_target_is_an_error_of_its_message_alone(vhost: Vhost) -> None:
    app = application(vhost.url)
    app.handler("work")
    async with started(app):
        for target in ({"queue": "missing"}, {"exchange": RabbitExchange("missing"), "routing_key": "k"}):
            results = await asyncio.gather(
                app.broker.publish("lost", **target, headers=delayed("10ms")),
                *(app.broker.publish(number, "work", headers=delayed("10ms")) for number in range(20)),
                return_exceptions=True,
            )
            assert isinstance(results[0], ChannelNotFoundEntity)
            assert not [one for one in results[1:] if isinstance(one, BaseException)]
            assert sorted(one.body for one in await app.many(20)) == list(range(20))


async def test_delays_go_on_after_a_lost_connection(vhost: Vhost) -> None:
    """And after the infrastructure was deleted."""
    app = application(vhost.url)
    app.handler("work")
    async with started(app):
        await app.broker.publish("first", "work", headers=delayed("10ms"))
        connection = await app.broker.connect()
        assert connection.transport is not None
        await connection.transport.connection.close()
        await app.broker.publish("second", "work", headers=delayed("10ms"))
        async with connection.channel() as channel:
            for exchange in ("bide.v1.in.c", "bide.v1.c"):
                await channel.exchange_delete(exchange)
        await app.broker.publish("third", "work", headers=delayed("10ms"))
        await app.handles_once({"first", "second", "third"})


def test_wrong_delays_are_refused() -> None:
    for delay in ("-1s", "soon", 5):
        with pytest.raises(InvalidDelayError):
            delayed(delay)  # type: ignore[arg-type]  # wrong on purpose


# --- retries


async def test_a_failed_handler_gets_its_message_again_after_the_backoff(vhost: Vhost) -> None:
    """And after the last retry the message is rejected, as without the adapter."""
    app = application(vhost.url, backoff=["100ms", "200ms"])
    app.handler(dead_lettered("work"), *(ValueError(f"failure {number}") for number in range(3)))
    async with started(app):
        await app.broker.declare_queue(RabbitQueue("dead"))
        options: dict[str, Any] = {"message_id": "id", "correlation_id": "c", "priority": 3, "expiration": 3600}
        await app.broker.publish("body", "work", headers={"a": "b"}, **options)
        first, second, third = await app.many(3)
        await eventually(holds(vhost.url, "dead", 1))
        assert await ready_at(vhost.url, "work") == 0
    assert 0.1 <= second.at - first.at < 0.1 + MAX_LATENESS
    assert 0.2 <= third.at - second.at < 0.2 + MAX_LATENESS
    for one in (first, second, third):
        assert one.body == "body"
        assert one.message.headers == {"a": "b"}
        assert (one.message.message_id, one.message.correlation_id) == ("id", "c")
    for one in (second, third):
        # In the header, because a priority would hold back other messages that wait on RabbitMQ 4.0 to 4.2.
        assert one.message.raw_message.headers["bide-priority"] == 3
        assert one.message.raw_message.headers["bide-expiration"] == "3600000"


async def test_nacks_and_errors_share_the_backoff(vhost: Vhost) -> None:
    """A nack with a delay does not count, and the last nack rejects."""
    app = application(vhost.url, backoff=["100ms", "50ms"])
    errors = (NackMessage(), NackMessage(delay="150ms"), ValueError("failed"), NackMessage())
    app.handler(dead_lettered("work"), *errors)
    async with started(app):
        await app.broker.declare_queue(RabbitQueue("dead"))
        await app.broker.publish("body", "work")
        handled = await app.many(4)
        await eventually(holds(vhost.url, "dead", 1))
    for before, after, least in zip(handled, handled[1:], (0.1, 0.15, 0.05), strict=False):
        assert least <= after.at - before.at < least + MAX_LATENESS


async def test_a_rejected_message_and_a_settled_one_are_not_retried(vhost: Vhost) -> None:
    app = application(vhost.url, backoff=["10ms"])
    app.handler(dead_lettered("work"), RejectMessage())

    @app.broker.subscriber("settled")
    async def settle(body: Any, message: RabbitMessage) -> None:
        await message.ack()
        app.handled.put_nowait(Handled(body, 0, message))
        raise ValueError("failed after the ack")

    async with started(app):
        await app.broker.declare_queue(RabbitQueue("dead"))
        await app.broker.publish("rejected", "work")
        await app.broker.publish("settled", "settled")
        assert sorted(one.body for one in await app.many(2)) == ["rejected", "settled"]
        await eventually(holds(vhost.url, "dead", 1))
        for queue in ("work", "settled"):
            await app.broker.publish("last", queue, headers=delayed("20ms"))
        assert [one.body for one in await app.many(2)] == ["last", "last"], "one was retried"


async def test_retries_go_to_the_queue_that_failed(vhost: Vhost) -> None:
    """Not to the exchange: its other queues have handled the message."""
    app = application(vhost.url, backoff=["10ms"])
    fanout = RabbitExchange("fanout", type=ExchangeType.FANOUT)
    app.handler("failing", ValueError("failed"), exchange=fanout)
    app.handler("fine", exchange=fanout)
    async with started(app):
        await app.broker.publish("body", exchange=fanout)
        handled = await app.many(3)
        await app.broker.publish("last", exchange=fanout, headers=delayed("20ms"))
        assert [one.body for one in await app.many(2)] == ["last", "last"]
    assert [one.body for one in handled] == ["body"] * 3


@pytest.fixture
def modest_url(vhost: Vhost) -> Iterator[str]:
    """The URL of a user who may not declare the delay infrastructure."""
    name = f"modest-{vhost.name}"
    vhost.broker.add_user(name, "secret")
    vhost.broker.set_permissions(vhost.name, name, configure=r"^(?!bide\.)")
    yield vhost.broker.vhost_url(vhost.name, user=name, password="secret")
    vhost.broker.delete_user(name)


@pytest.mark.parametrize("error", [ValueError("failed"), NackMessage(delay="1s"), NackMessage(delay="soon")])
async def test_a_message_whose_retry_cannot_be_sent_is_requeued_after_a_pause(
    vhost: Vhost, modest_url: str, error: Exception
) -> None:
    """The broker refuses to declare the queues of its delay, or its delay cannot be read."""
    app = application(modest_url, backoff=["1s"])
    app.handler(dead_lettered("work"), error, error)
    async with started(app):
        await app.broker.declare_queue(RabbitQueue("dead"))
        await app.broker.publish("body", "work")
        first, again, third = await app.many(3)
        assert {one.body for one in (first, again, third)} == {"body"}
        assert again.message.raw_message.redelivered
    # Half a pause at least, and the second pause is twice as long.
    assert again.at - first.at >= 0.5
    assert third.at - again.at >= 1.0
    assert await ready_at(vhost.url, "dead") == 0


async def test_a_retry_goes_to_its_queue_and_not_to_the_copies(vhost: Vhost) -> None:
    """The handler gets the header with the keys of the copies; the retry leaves it out."""
    app = application(vhost.url, backoff=["10ms"])
    app.handler("work", ValueError("failed"), exchange=DIRECT)
    app.handler("copy", exchange=DIRECT)
    async with started(app):
        await app.broker.publish("body", "work", DIRECT, headers={"CC": ["copy"], "a": "b"})
        handled = await app.many(3)
        await app.broker.publish("last", "copy", headers=delayed("20ms"))
        assert (await app.next()).body == "last", "the retry went to the copy"
    headers = sorted((one.message.headers for one in handled), key=len)
    assert headers == [{"a": "b"}, {"CC": ["copy"], "a": "b"}, {"CC": ["copy"], "a": "b"}]


async def test_waiting_messages_are_unacknowledged_nowhere(vhost: Vhost) -> None:
    """Neither delayed ones nor those that wait for a retry."""
    app = application(vhost.url, backoff=["1h"])
    app.handler("work", *(ValueError("failed") for _ in range(5)))
    async with started(app):
        for number in range(5):
            await app.broker.publish(number, "work")
            await app.broker.publish(number, "work", headers=delayed("2h"))
        await app.many(5)
        for hours in (1, 2):
            await eventually(holds(vhost.url, f"bide.v1.h{hours}", 5))

        async def is_unacknowledged_nowhere() -> bool:
            listed = await asyncio.to_thread(
                vhost.broker.rabbitmqctl,
                *("list_queues", "-p", vhost.name, "--silent", "--no-table-headers", "messages_unacknowledged"),
            )
            return set(listed.split()) == {"0"}

        # The broker may handle an ack after the copy is ready.
        await eventually(is_unacknowledged_nowhere)


async def test_the_test_broker_delivers_at_once_and_retries_nothing() -> None:
    app = application("amqp://nowhere", backoff=["1h"])
    app.handler("work")
    app.handler("failing", ValueError("failed"))
    async with TestRabbitBroker(app.broker):
        await app.broker.publish("body", "work", headers={**delayed("1h", key="key"), "a": "b"})
        handled = await app.next()
        with pytest.raises(ValueError, match="failed"):
            await app.broker.publish("body", "failing")
    assert handled.body == "body"
    assert "bide-delay" not in handled.message.headers


# --- keys


async def test_a_message_with_a_key_can_be_cancelled_while_it_waits(vhost: Vhost, tmp_path: Path) -> None:
    app = application(vhost.url, schedules=bide.connect(vhost.url))
    app.handler("work")
    app.handler("bound", exchange=DIRECT)
    async with started(app):
        await app.broker.publish(1, "work", headers=delayed("1h", key="invoice:1"))
        await app.broker.publish(2, "work", headers=delayed("1h", key="invoice:2"))
        # Instead of the message before.
        later = {**delayed("100ms", key="invoice:2"), "a": "b"}
        await app.broker.publish({"number": 2}, "bound", DIRECT, headers=later, correlation_id="c")
        with gate(vhost, tmp_path):
            assert (await app.delays.cancel("invoice:1")).outcome is bide.ScheduleOutcome.CANCELLED
            handled = await app.next()
            assert (await app.delays.cancel("invoice:2")).outcome is bide.ScheduleOutcome.TOO_LATE
    assert handled.body == {"number": 2}
    assert handled.message.headers == {"a": "b"}
    assert handled.message.correlation_id == "c"


async def test_a_key_needs_a_client_for_schedules(vhost: Vhost) -> None:
    app = application(vhost.url)
    app.handler("work")
    async with started(app):
        with pytest.raises(InvalidInputError, match=r"schedules=bide\.connect"):
            await app.broker.publish(1, "work", headers=delayed("1h", key="k"))
        with pytest.raises(InvalidInputError, match=r"schedules=bide\.connect"):
            await app.delays.cancel("k")


async def test_deleted_bindings_are_declared_again(vhost: Vhost, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that was deleted and declared again gets messages after the next check."""
    monkeypatch.setattr(delays, "REBIND_AFTER", 0.0)
    app = application(vhost.url)
    app.handler("work")
    async with started(app):
        await app.broker.publish("first", "work", headers=delayed("10ms"))
        await app.next()
        connection = await app.broker.connect()
        async with connection.channel() as channel:
            queue = await channel.declare_queue("other", durable=False)
            await app.broker.publish("lost", "other", headers=delayed("10ms"))
            await eventually(holds(vhost.url, "other", 1))
            await queue.delete(if_empty=False)
            await channel.declare_queue("other", durable=False)
        await app.broker.publish("second", "other", headers=delayed("10ms"))
        await eventually(holds(vhost.url, "other", 1))
