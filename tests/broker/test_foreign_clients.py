"""The interface for clients of other libraries, used from pika and aiormq."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiormq
import pika
import pytest

import bide
from bide.errors import InvalidDueTimeError
from bide.integrations import Delays
from tests.broker.receiving import receive
from tests.timeouts import TIMEOUT

EXCHANGE = "shop"
KEY = "order.created"


@pytest.fixture
def connection(vhost_url: str) -> Iterator[Any]:
    """A connection of pika, with a queue and an exchange of the application."""
    connection = pika.BlockingConnection(pika.URLParameters(vhost_url))
    channel = connection.channel()
    channel.queue_declare("mail", durable=True)
    channel.exchange_declare(EXCHANGE, "topic", durable=True)
    channel.queue_declare("orders", durable=True)
    channel.queue_bind("orders", EXCHANGE, KEY)
    yield connection
    connection.close()


@pytest.fixture
def channel(connection: Any) -> Any:
    channel = connection.channel()
    channel.confirm_delivery()
    return channel


MAIL = bide.QueueTarget("mail", isolated=True)
ORDERS = bide.ExchangeTarget(EXCHANGE, KEY)


def publish(delays: Delays, channel: Any, target: Any, body: bytes, **options: Any) -> int:
    """Publish with pika, and return the number of declarations."""
    connection = channel.connection
    server = connection._impl.server_properties
    route = delays.route(target, server_properties=server, **options)
    calls = list(delays.declarations(route, connection=connection))
    for call in calls:
        call.call(channel)
    delays.declared(route, connection=connection)
    properties = pika.BasicProperties(**route.properties)
    channel.basic_publish(route.exchange, route.routing_key, body, properties, mandatory=True)
    return len(calls)


def get(channel: Any, queue: str) -> tuple[Any, Any, bytes]:
    """The next message of a queue."""
    channel.basic_qos(prefetch_count=1)
    for method, properties, body in channel.consume(queue, inactivity_timeout=TIMEOUT):
        assert method is not None, f"no message came to {queue!r}"
        channel.basic_ack(method.delivery_tag)
        channel.cancel()
        return method, properties, body
    raise AssertionError


@pytest.mark.parametrize(("target", "queue"), [(MAIL, "mail"), (ORDERS, "orders")], ids=["queue", "exchange"])
def test_a_delayed_message_arrives_as_an_undelayed_one(channel: Any, target: Any, queue: str) -> None:
    """On time, with the exchange and the routing key that it would have without a delay."""
    delays = Delays()
    due = datetime.now(UTC) + timedelta(seconds=1.25)
    headers = {"task": "remind", "bide-due": 1, "x-death": [{"queue": "other"}]}
    publish(delays, channel, target, b"later", due=due, properties={"headers": headers, "app_id": "shop"})
    method, properties, body = get(channel, queue)
    assert datetime.now(UTC) >= due
    address = ("", "mail") if target is MAIL else (EXCHANGE, KEY)
    assert (method.exchange, method.routing_key, body) == (*address, b"later")

    restored = delays.restore(method.exchange, method.routing_key, {"headers": properties.headers, "app_id": "shop"})
    assert (restored.exchange, restored.routing_key) == address
    assert restored.values == {"headers": {"task": "remind"}, "app_id": "shop"}
    assert restored.due is not None
    assert timedelta(0) <= restored.due - due < timedelta(milliseconds=1)


def test_only_what_a_connection_has_not_declared_is_declared(channel: Any, vhost_url: str) -> None:
    delays = Delays()
    first = publish(delays, channel, MAIL, b"1", delay="1s")
    assert first > 50
    assert publish(delays, channel, MAIL, b"2", delay="1s") == 0
    # The queue of another digit, its binding, and the queue that is deleted again.
    assert publish(delays, channel, MAIL, b"3", delay="2s") == 4
    # The binding of the digit for keys of two words, the release queue of the exchange, and its binding.
    assert publish(delays, channel, ORDERS, b"4", delay="1s") == 5
    other = pika.BlockingConnection(pika.URLParameters(vhost_url))
    # Everything, except that no queue is new.
    assert publish(delays, other.channel(), MAIL, b"5", delay="1s") == first - 2
    other.close()
    assert sorted(get(channel, "mail")[2] for _ in range(4)) == [b"1", b"2", b"3", b"5"]


def test_a_deleted_infrastructure_is_declared_again_after_forget(channel: Any, connection: Any) -> None:
    delays = Delays()
    publish(delays, channel, MAIL, b"1", delay="1s")
    get(channel, "mail")
    for exchange in delays.infrastructure.topology().exchanges:
        channel.exchange_delete(exchange.name)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker):
        publish(delays, channel, MAIL, b"2", delay="1s")
    delays.forget(connection)
    channel = connection.channel()
    publish(delays, channel, MAIL, b"3", delay="1s")
    assert get(channel, "mail")[2] == b"3"


@pytest.mark.parametrize("priority", [0, 9])
def test_a_priority_holds_back_no_message(channel: Any, release: tuple[int, ...], priority: int) -> None:
    """Two messages in one digit queue come in the order in which they are due, and not by priority.

    From 4.3 on a queue expires the head of each priority, so that two messages that are due at about the same time may
    change places.
    """
    delays = Delays()
    publish(delays, channel, MAIL, b"first", delay="2s", properties={"priority": 9 - priority})
    publish(delays, channel, MAIL, b"second", delay="2s", properties={"priority": priority})
    received = [get(channel, "mail"), get(channel, "mail")]
    if release >= (4, 3):
        received.sort(key=lambda one: one[2])
    (_, _, first), (_, second, body) = received
    assert (first, body) == (b"first", b"second")
    assert second.priority == (None if (4, 0) <= release < (4, 3) else priority)
    restored = delays.restore("", "", {"headers": second.headers})
    assert restored.values.get("priority", second.priority) == priority


def test_a_message_that_is_due_goes_straight_to_its_target(channel: Any) -> None:
    delays = Delays()
    assert publish(delays, channel, MAIL, b"now", due=datetime.now(UTC) - timedelta(hours=1)) == 0
    method, properties, _ = get(channel, "mail")
    assert (method.exchange, method.routing_key) == ("", "mail")
    assert "bide-due" in properties.headers


@pytest.mark.parametrize("options", [{}, {"delay": "1s", "due": "2030-01-01T00:00:00Z"}])
def test_a_delay_and_a_due_time_exclude_each_other(channel: Any, options: Any) -> None:
    with pytest.raises(InvalidDueTimeError, match="give one"):
        publish(Delays(), channel, MAIL, b"", **options)


async def test_aiormq_publishes_with_the_same_calls(vhost_url: str) -> None:
    delays = Delays()
    connection = await aiormq.connect(vhost_url)
    channel = await connection.channel()
    await channel.queue_declare("mail", durable=True)
    route = delays.route(MAIL, delay="1s", server_properties=connection.server_properties)
    for call in delays.declarations(route, connection=connection):
        await call.call(channel)
    delays.declared(route, connection=connection)
    properties = aiormq.spec.Basic.Properties(**route.properties)
    await channel.basic_publish(b"later", exchange=route.exchange, routing_key=route.routing_key, properties=properties)
    async with bide.connect(vhost_url) as client:
        (message,) = await receive(client, "mail", 1)
    assert (message.body, message.exchange, message.due) == (b"later", "", route.due)
    await connection.close()


async def test_the_program_of_the_documentation_prints_what_the_page_shows(vhost_url: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "other-clients.md").read_text()
    program, shown = re.findall(r"^```(?:python)?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, env={**os.environ, "BIDE_URL": vhost_url}, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(TIMEOUT):
        printed, _ = await process.communicate()
    assert process.returncode == 0
    assert re.sub(r"\d\S+ \S+\+00:00", "TIME", printed.decode()) == re.sub(r"\d\S+ \S+\+00:00", "TIME", shown)
