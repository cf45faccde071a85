"""Refusals of RabbitMQ and of the in-memory broker, with equal reply texts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import pytest

import bide.testing
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.errors import BideError, DeclarationMismatchError
from bide.local_broker import LocalBroker
from bide.topology import Argument, Binding, Exchange, Queue, Topology
from tests.broker.receiving import declare

Act = Callable[[Channel], Awaitable[Any]]

THERE: Final = Topology(
    [Exchange("x"), Exchange("inside", "fanout", internal=True), Exchange("headers", "headers")],
    [
        Queue("q", arguments={"x-message-ttl": 1000, "x-dead-letter-exchange": "x"}),
        Queue("full"),
        Queue.quorum("single", {"x-single-active-consumer": True}),
    ],
    [Binding("x", "q", "k")],
)


def queue(name: str, **arguments: Argument) -> Queue:
    return Queue(name, arguments={f"x-{key.replace('_', '-')}": value for key, value in arguments.items()})


def publish(exchange: str, key: str = "", **values: Any) -> Act:
    return lambda channel: channel.publish(exchange=exchange, routing_key=key, values=values, body=b"x")


async def exclusively(channel: Channel) -> None:
    for _ in range(2):
        await channel.consume("q", on_message=lambda _: None, on_end=lambda _: None, exclusive=True)


async def twice(channel: Channel) -> None:
    channel.ack(7)
    for _ in range(3):
        await channel.qos(1)


async def by_another(channel: Channel) -> None:
    await channel.declare_queue(Queue("own", exclusive=True))
    assert isinstance(channel.connection, Connection)
    other = await Connection.open(channel.connection.url)
    try:
        await (await other.channel()).declare_queue(Queue("own"), passive=True)
    finally:
        await other.close()


ACTS: Final[dict[str, Act]] = {
    "another TTL": lambda channel: channel.declare_queue(queue("q", message_ttl=2000, dead_letter_exchange="x")),
    "no TTL": lambda channel: channel.declare_queue(queue("q", dead_letter_exchange="x")),
    "one argument more": lambda channel: channel.declare_queue(queue("full", max_length=5)),
    "another type of queue": lambda channel: channel.declare_queue(Queue.quorum("full")),
    "another durability": lambda channel: channel.declare_queue(Queue("full", durable=False, exclusive=True)),
    "auto-delete": lambda channel: channel.declare_queue(Queue("full", auto_delete=True)),
    "the same": lambda channel: channel.declare_queue(Queue("full")),
    "the same, asked for": lambda channel: channel.declare_queue(queue("full", max_length=9), passive=True),
    "another type of exchange": lambda channel: channel.declare_exchange(Exchange("x", "topic")),
    "an alternate more": lambda channel: channel.declare_exchange(Exchange("x", arguments={"alternate-exchange": "y"})),
    "an exchange that is internal": lambda channel: channel.declare_exchange(Exchange("x", internal=True)),
    "a predeclared exchange": lambda channel: channel.declare_exchange(Exchange("amq.topic", "topic")),
    "a reserved exchange": lambda channel: channel.declare_exchange(Exchange("amq.mine")),
    "the default exchange": lambda channel: channel.declare_exchange(Exchange("")),
    "a reserved queue": lambda channel: channel.declare_queue(Queue("amq.mine")),
    "a missing queue": lambda channel: channel.declare_queue(Queue("none"), passive=True),
    "a missing exchange": lambda channel: channel.declare_exchange(Exchange("none"), passive=True),
    "a negative TTL": lambda channel: channel.declare_queue(queue("new", message_ttl=-1)),
    "a TTL that is text": lambda channel: channel.declare_queue(queue("new", message_ttl="5")),
    "an unknown overflow": lambda channel: channel.declare_queue(queue("new", overflow="explode")),
    "an unknown type of queue": lambda channel: channel.declare_queue(queue("new", queue_type="other")),
    "a priority on a quorum queue": lambda channel: channel.declare_queue(
        queue("new", queue_type="quorum", max_priority=3)
    ),
    "a delivery limit on a classic queue": lambda channel: channel.declare_queue(queue("new", delivery_limit=3)),
    "a quorum queue that is not durable": lambda channel: channel.declare_queue(
        Queue("new", durable=False, arguments={"x-queue-type": "quorum"})
    ),
    "an exclusive quorum queue": lambda channel: channel.declare_queue(
        Queue("new", exclusive=True, arguments={"x-queue-type": "quorum"})
    ),
    "a dead-letter key alone": lambda channel: channel.declare_queue(queue("new", dead_letter_routing_key="k")),
    "an unknown argument": lambda channel: channel.declare_queue(queue("new", whatever=3)),
    "a binding from nowhere": lambda channel: channel.bind(Binding("none", "q")),
    "a binding to nowhere": lambda channel: channel.bind(Binding("x", "none")),
    "a binding to a missing exchange": lambda channel: channel.bind(Binding("x", "none", destination_type="exchange")),
    "a binding from the default exchange": lambda channel: channel.bind(Binding("", "q", "k")),
    "an unknown match": lambda channel: channel.bind(Binding("headers", "q", arguments={"x-match": "some"})),
    "the removal of no binding": lambda channel: channel.unbind(Binding("x", "q", "other")),
    "the removal of a binding from nowhere": lambda channel: channel.unbind(Binding("none", "q")),
    "to a missing exchange": publish("none"),
    "to an internal exchange": publish("inside"),
    "unroutable": publish("x", "other"),
    "an expiration that is not a number": publish("x", "k", expiration="soon"),
    "a negative expiration": publish("x", "k", expiration="-1"),
    "CC that is not a list": publish("x", "k", headers={"CC": "k"}),
    "a reply without a consumer": publish("x", "k", reply_to="amq.rabbitmq.reply-to"),
    "the end of a missing queue": lambda channel: channel.delete_queue("none"),
    "the end of a missing exchange": lambda channel: channel.delete_exchange("none"),
    "the end of a predeclared exchange": lambda channel: channel.delete_exchange("amq.fanout"),
    "the end of a used exchange": lambda channel: channel.delete_exchange("x", if_unused=True),
    "a purge of a missing queue": lambda channel: channel.purge_queue("none"),
    "a message of a missing queue": lambda channel: channel.get("none"),
    "a message of a queue with a single active consumer": lambda channel: channel.get("single"),
    "a consumer of a missing queue": lambda channel: channel.consume(
        "none", on_message=lambda _: None, on_end=lambda _: None
    ),
    "a second exclusive consumer": exclusively,
    "a settlement of nothing": twice,
    "another's queue": by_another,
}


async def outcome(act: Act, url: BrokerUrl) -> tuple[Any, ...]:
    """The outcome: ``done``, or the parts of the error that a program can use."""
    connection = await Connection.open(url)
    try:
        channel = await connection.channel(confirms=True)
        await act(channel)
        if not channel.is_open:
            return ("closed", type(channel.closed_with).__name__)
    except DeclarationMismatchError as error:
        return ("differs", error.kind, error.name, error.argument, error.wanted, error.found)
    except BideError as error:
        return (type(error).__name__, getattr(error, "reply_code", None))
    else:
        return ("done",)
    finally:
        await connection.close()


async def prepare(url: BrokerUrl) -> None:
    connection = await Connection.open(url)
    await declare(await connection.channel(), THERE)
    await connection.close()


@pytest.fixture(scope="module")
def refusing_url(broker: LocalBroker) -> Iterator[str]:
    """The URL of a virtual host that has all that is there."""
    url = broker.add_vhost("refusing")
    asyncio.run(prepare(BrokerUrl.parse(url)))
    yield url
    broker.delete_vhost("refusing")


@pytest.mark.parametrize("what", ACTS)
async def test_refusals_in_memory_equal_those_of_the_broker(
    what: str, refusing_url: str, release: tuple[int, ...]
) -> None:
    async with bide.testing.broker(release=release) as memory:
        await prepare(memory.url)
        in_memory = await outcome(ACTS[what], memory.url)
    assert in_memory == await outcome(ACTS[what], BrokerUrl.parse(refusing_url))
