"""Messages published over the stream protocol: stored once, and as RabbitMQ encodes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pika
import pytest

from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.errors import (
    AccessRefusedError,
    BrokerError,
    ConnectionLostError,
    InvalidInputError,
    TargetNotFoundError,
)
from bide.streams import frames
from bide.streams.amqp10 import Sections, decode
from bide.streams.amqp10_encoder import StreamMessageEncoder
from bide.streams.connection import StreamConnection
from bide.streams.log import Address
from bide.streams.publisher import StreamPublisher
from tests.stream_contents import bodies, messages
from tests.support import Vhost, stream_port
from tests.timeouts import TIMEOUT

DELETE_PUBLISHER = 0x06

TIME = datetime(2026, 1, 1, 0, 0, 5, tzinfo=UTC)
HEADERS: dict[str, Any] = {
    "text": "täxt",
    "long": "x" * 300,
    "bytes": b"\xff\x00",
    "true": True,
    "false": False,
    "null": None,
    "small": -5,
    "large": 2**40,
    "fraction": 2.25,
    "time": TIME,
}
MESSAGES: dict[str, dict[str, Any]] = {
    "few": {"delivery_mode": 2, "message_id": "m-1"},
    "all": {
        "content_type": "text/plain",
        "content_encoding": "gzip",
        "delivery_mode": 2,
        "priority": 3,
        "correlation_id": "cörrelation",
        "reply_to": "replies/1 %2F",
        "expiration": "86400000",
        "message_id": "m-2",
        "timestamp": TIME,
        "type": "Shop.OrderCreated",
        "app_id": "shop",
        "headers": {"a": "b"},
    },
    "user": {"delivery_mode": 2, "user_id": "USER", "priority": 0},
    "transient": {"delivery_mode": 1, "message_id": "i" * 255},
    "headers": {"delivery_mode": 2, "headers": HEADERS},
    "headers of x-": {"delivery_mode": 2, "headers": {f"x-{name}": value for name, value in HEADERS.items()}},
    "many headers": {"delivery_mode": 2, "headers": {f"h{number}": number for number in range(200)}},
}


@pytest.fixture
def address(vhost: Vhost) -> Address:
    return Address.of(vhost.url, stream_port(vhost.broker))


@pytest.fixture
def channel(vhost: Vhost) -> Iterator[Any]:
    with closing(pika.BlockingConnection(pika.URLParameters(vhost.idle_url))) as connection:
        channel = connection.channel()
        for name in ("s", "other"):
            channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
        yield channel


def publisher(address: Address, name: str = "p") -> StreamPublisher:
    return StreamPublisher(address, "s", name, timeout=TIMEOUT)


def publish_all(into: StreamPublisher, first: int, last: int) -> None:
    """Publish messages in a frame each, and wait for the confirms."""
    for number in range(first, last + 1):
        into.publish(number, encoded(number, number))
    into.flush()


def decoded(one: Sections) -> tuple[Any, ...]:
    properties = decode(one.properties) if one.properties else []
    while properties and properties[-1] is None:
        properties.pop()
    maps = [decode(section) if section else None for section in (one.header, one.annotations, one.application)]
    return (one.body, properties, *maps)


def encoder(address: Address) -> StreamMessageEncoder:
    with address.connect() as connection:
        return StreamMessageEncoder("s", connection.release)


def encoded(first: int, last: int) -> list[bytes]:
    """Messages whose bodies are these numbers. How they are encoded does not matter here."""
    encode = StreamMessageEncoder("s", (4, 3, 6)).encode
    return [encode({}, str(number).encode()) for number in range(first, last + 1)]


async def publish_over_amqp(url: BrokerUrl, given: dict[str, dict[str, Any]]) -> None:
    connection = await Connection.open(url)
    try:
        channel = await connection.channel(confirms=True)
        for name, values in given.items():
            await channel.publish(exchange="", routing_key="s", values=values, body=name.encode())
    finally:
        await connection.close()


@pytest.mark.usefixtures("channel")
def test_a_message_is_encoded_as_rabbitmq_stores_one_of_amqp_0_9_1(address: Address) -> None:
    user = address.url.user
    given = {name: {**one, **({"user_id": user} if "user_id" in one else {})} for name, one in MESSAGES.items()}
    asyncio.run(publish_over_amqp(address.url, given))
    encode = encoder(address).encode
    with publisher(address) as into:
        into.publish(1, [encode(one, name.encode()) for name, one in given.items()])
        into.flush()
    found = messages(address, "s")
    assert len(found) == 2 * len(given)
    for expected, one in zip(found[: len(given)], found[len(given) :], strict=True):
        assert decoded(one) == decoded(expected)


@pytest.mark.parametrize("value", [[1], {"a": 1}])
def test_a_header_that_streams_drop_is_refused(value: object) -> None:
    with pytest.raises(InvalidInputError, match=r"the header 'a' is of type .*: send it as text"):
        StreamMessageEncoder("s", (4, 3, 6)).encode({"headers": {"a": value}}, b"")


def test_an_expiration_beyond_the_type_of_streams_is_refused() -> None:
    encode = StreamMessageEncoder("s", (4, 3, 6)).encode
    assert encode({"expiration": str(2**32 - 1)}, b"")
    with pytest.raises(InvalidInputError, match="the expiration is 4,294,967,296 ms"):
        encode({"expiration": str(2**32)}, b"")


@pytest.mark.usefixtures("channel")
def test_a_stream_drops_what_a_publisher_of_the_same_name_sends_again(address: Address) -> None:
    given = encoded(1, 5)
    with publisher(address) as first:
        assert first.last_id() == 0
        first.publish(1, given[:3])
        first.flush()
    with publisher(address) as second:
        assert second.last_id() == 3
        second.publish(1, given)
        second.flush()
        assert second.last_id() == 5
    with publisher(address, "another") as another:
        another.publish(1, given[:1])
        another.flush()
    assert bodies(address, "s") == ["1", "2", "3", "4", "5", "1"]


@pytest.mark.usefixtures("channel")
def test_a_message_whose_confirm_was_lost_is_stored_once(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, cut = StreamConnection.publish, [2, 5, 6, 14, 40]
    calls = 0

    def publish_or_cut(self: StreamConnection, first: int, messages: Sequence[bytes], seconds: float) -> None:
        nonlocal calls
        calls += 1
        if calls not in cut:
            publish(self, first, messages, seconds)
            return
        self._send(frames.publish(1, first, messages[: len(messages) // 2]))
        self.barrier()
        self.close()
        raise ConnectionLostError("the test has cut it")

    monkeypatch.setattr(StreamConnection, "publish", publish_or_cut)
    with publisher(address) as into:
        for first in range(1, 500, 10):
            into.publish(first, encoded(first, first + 9))
        into.flush()
    assert calls > 50 + len(cut), "frames in flight are sent again"
    assert bodies(address, "s") == [str(number) for number in range(1, 501)]


@pytest.mark.usefixtures("channel")
def test_a_publisher_waits_when_many_frames_are_unconfirmed(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []

    def wait_for_confirms(self: StreamConnection, first: int, count: int, seconds: float) -> None:
        waited.append(first)

    monkeypatch.setattr(StreamConnection, "wait_for_confirms", wait_for_confirms)
    with publisher(address) as into:
        for number in range(1, 7):
            into.publish(number, encoded(number, number))
        assert waited == [1, 2, 3]
        into.flush()
        assert waited == [1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("channel")
def test_a_refused_frame_is_followed_by_refused_ones_only(address: Address) -> None:
    """Otherwise, the stream would have a later message, and drop the refused ones when they come again."""
    one, two, three = ([data] for data in encoded(1, 3))
    with address.connect() as connection:
        connection.declare_publisher("s", "p")
        connection.publish(1, one, TIMEOUT)
        connection._ask(DELETE_PUBLISHER, b"\x01")
        connection.publish(2, two, TIMEOUT)
        with pytest.raises(ConnectionLostError, match="publisher does not exist"):
            connection.wait_for_confirms(2, 1, TIMEOUT)
        connection.publish(3, three, TIMEOUT)
        with pytest.raises(ConnectionLostError, match="publisher does not exist"):
            connection.wait_for_confirms(3, 1, TIMEOUT)
    assert bodies(address, "s") == ["1"]


@pytest.mark.usefixtures("channel")
def test_a_connection_keeps_the_permission_to_write(vhost: Vhost, address: Address) -> None:
    """Otherwise, the broker could refuse a frame, and take a later one when the permission is back."""
    broker = vhost.broker
    broker.add_user("writer", "secret")
    try:
        broker.set_permissions(vhost.name, "writer")
        theirs = Address.of(broker.vhost_url(vhost.name, user="writer", password="secret"), address.port)
        with publisher(theirs) as into:
            into.publish(1, encoded(1, 1))
            into.flush()
            broker.set_permissions(vhost.name, "writer", write="")
            into.publish(2, encoded(2, 2))
            into.flush()
        with publisher(theirs) as another, pytest.raises(AccessRefusedError, match="access refused"):
            another.publish(3, encoded(3, 3))
    finally:
        broker.delete_user("writer")
    assert bodies(address, "s") == ["1", "2"]


def test_a_stream_deleted_while_frames_are_in_flight_is_named(address: Address, channel: Any) -> None:
    with publisher(address) as into:
        into.publish(1, encoded(1, 1))
        into.flush()
        channel.queue_delete("s")
        with pytest.raises(TargetNotFoundError, match="there is no stream 's'"):
            publish_all(into, 2, 10)


def test_a_stream_that_was_declared_again_between_two_publishes_is_named(address: Address, channel: Any) -> None:
    """It would get the second message only, and drop the first one if it came again."""
    with publisher(address) as into:
        into.publish(1, encoded(1, 1))
        into.flush()
        channel.queue_delete("s")
        channel.queue_declare("s", durable=True, arguments={"x-queue-type": "stream"})
        with pytest.raises(BrokerError, match="the stream 's' lacks messages that it has confirmed to 'p'"):
            publish_all(into, 2, 2)
    assert bodies(address, "s") == []
