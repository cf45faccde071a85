"""Pattern 15: the x-delay header, on brokers without the plugin."""

from __future__ import annotations

import time
from typing import Any

import pytest

import bide
from bide.amqp.connection import Connection
from bide.errors import InvalidDelayError, InvalidInputError, TargetNotFoundError, UnsupportedBrokerError
from bide.messaging.delayed_message import DelayedMessagePublisher
from bide.patterns.catalogue import find_pattern
from bide.topology import Argument, Binding, Exchange, Queue, Topology
from tests.broker.patterns.queue_contents import bodies
from tests.broker.receiving import receive
from tests.timeouts import MAX_LATENESS


async def test_without_the_plugin_the_error_names_its_replacement(client: bide.Client) -> None:
    with pytest.raises(UnsupportedBrokerError) as caught:
        await client.declare(find_pattern("15").sample_topology())
    assert "no exchange type 'x-delayed-message'" in str(caught.value)
    assert "delay=... to an exchange of the plain type instead (Client.publish)" in str(caught.value)
    assert "bide.messaging.delayed_message.DelayedMessagePublisher" in str(caught.value)


@pytest.mark.parametrize("value", [250, "250", 250.0, 249.6])
async def test_x_delay_can_be_a_number_or_numeric_text(client: bide.Client, value: Any) -> None:
    await client.declare(Topology([Exchange("x", "direct")], [Queue("q")], [Binding("x", "q", "k")]))
    started = time.monotonic()
    await DelayedMessagePublisher(client).publish(
        "m", exchange="x", routing_key="k", headers={"x-delay": value, "a": 1}
    )
    (message,) = await receive(client, "q", 1)
    assert time.monotonic() - started >= float(value) / 1000
    # As the plugin leaves it.
    assert message.headers == {"x-delay": -250, "a": 1}
    assert message.routing_key == "k"
    assert message.lateness is not None
    assert message.lateness < MAX_LATENESS


@pytest.mark.parametrize(
    ("kind", "key", "arguments"),
    [
        ("direct", "order.created", {}),
        ("topic", "order.*", {}),
        ("fanout", "", {}),
        ("headers", "", {"kind": "order", "x-match": "all"}),
    ],
)
async def test_every_type_of_exchange_routes_delayed_messages(
    client: bide.Client, kind: str, key: str, arguments: dict[str, Argument]
) -> None:
    queues = ["a", "b"]
    bindings = [Binding("x", queue, key, arguments=arguments) for queue in queues]
    await client.declare(Topology([Exchange("x", kind)], [Queue(queue) for queue in queues], bindings))
    await DelayedMessagePublisher(client).publish(
        "m", exchange="x", routing_key="order.created", headers={"x-delay": 50, "kind": "order"}
    )
    for queue in queues:
        (message,) = await receive(client, queue, 1)
        assert (message.body, message.routing_key) == (b"m", "order.created")


async def test_a_message_delayed_before_is_not_delayed_again(client: bide.Client, connection: Connection) -> None:
    await client.declare(Topology([Exchange("x", "fanout")], [Queue("q")], [Binding("x", "q")]))
    publisher = DelayedMessagePublisher(client)
    for value in (-500, 0, None):
        receipt = await publisher.publish(
            repr(value), exchange="x", headers={} if value is None else {"x-delay": value}
        )
        assert receipt.due is None
    assert await bodies(connection, "q") == {"q": ["-500", "0", "None"]}


async def test_the_default_exchange_delivers_to_the_queue(client: bide.Client) -> None:
    await client.declare(Topology(queues=[Queue("q")]))
    await DelayedMessagePublisher(client).publish("m", exchange="", routing_key="q", headers={"x-delay": 50})
    (message,) = await receive(client, "q", 1)
    assert message.body == b"m"


async def test_invalid_delays_and_missing_exchanges_are_refused(client: bide.Client) -> None:
    publisher = DelayedMessagePublisher(client)
    with pytest.raises(InvalidDelayError, match="'soon'"):
        await publisher.publish("m", exchange="x", headers={"x-delay": "soon"})
    with pytest.raises(InvalidInputError, match="delay="):
        await publisher.publish("m", exchange="x", delay="5s")
    with pytest.raises(TargetNotFoundError):
        await publisher.publish("m", exchange="nowhere", headers={"x-delay": 50})
