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
from bide.errors import BrokerError, ConnectionLostError, InvalidInputError, TargetNotFoundError
from bide.streams import frames
from bide.streams.amqp10 import Sections, decode
from bide.streams.amqp10_encoder import StreamMessageEncoder
from bide.streams.connection import StreamConnection
from bide.streams.log import Address
from bide.streams.publisher import StreamPublisher
from tests.stream_contents import bodies, messages
from tests.support import Vhost, stream_port
from tests.timeouts import TIMEOUT

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


def decoded(one: Sections) -> tuple[Any, ...]:
    properties = decode(one.properties) if one.properties else []
    while properties and properties[-1] is None:
        properties.pop()
    maps = [decode(section) if section else None for section in (one.header, one.annotations, one.application)]
    return (one.body, properties, *maps)


def encoder(address: Address) -> StreamMessageEncoder:
    with address.connect() as connection:
        return StreamMessageEncoder("s", connection.release)


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
        into.publish([(number, encode(one, name.encode())) for number, (name, one) in enumerate(given.items(), 1)])
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
    encode = encoder(address).encode
    given = [(number, encode({}, str(number).encode())) for number in range(1, 6)]
    with publisher(address) as first:
        assert first.last_id() == 0
        first.publish(given[:3])
    with publisher(address) as second:
        assert second.last_id() == 3
        second.publish(given)
        assert second.last_id() == 5
    with publisher(address, "another") as another:
        another.publish(given[:1])
    assert bodies(address, "s") == ["1", "2", "3", "4", "5", "1"]


@pytest.mark.usefixtures("channel")
def test_a_message_whose_confirm_was_lost_is_stored_once(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, cut = StreamConnection.publish, [2, 3, 7]
    calls = 0

    def publish_or_cut(self: StreamConnection, messages: Sequence[tuple[int, bytes]], seconds: float) -> None:
        nonlocal calls
        calls += 1
        if calls not in cut:
            publish(self, messages, seconds)
            return
        self._send(frames.publish(1, messages[: len(messages) // 2]))
        self.barrier()
        self.close()
        raise ConnectionLostError("the test has cut it")

    monkeypatch.setattr(StreamConnection, "publish", publish_or_cut)
    encode = encoder(address).encode
    with publisher(address) as into:
        for first in range(0, 50, 10):
            into.publish([(number, encode({}, str(number).encode())) for number in range(first + 1, first + 11)])
    assert calls == 5 + len(cut)
    assert bodies(address, "s") == [str(number) for number in range(1, 51)]


def test_a_stream_deleted_between_two_publishes_is_named(address: Address, channel: Any) -> None:
    encode = encoder(address).encode
    with publisher(address) as into:
        into.publish([(1, encode({}, b"1"))])
        channel.queue_delete("s")
        with pytest.raises(TargetNotFoundError, match="there is no stream 's'"):
            into.publish([(2, encode({}, b"2"))])


def test_a_stream_that_was_declared_again_between_two_publishes_is_named(address: Address, channel: Any) -> None:
    """It would get the second message only, and drop the first one if it came again."""
    encode = encoder(address).encode
    with publisher(address) as into:
        into.publish([(1, encode({}, b"1"))])
        channel.queue_delete("s")
        channel.queue_declare("s", durable=True, arguments={"x-queue-type": "stream"})
        with pytest.raises(BrokerError, match="the stream 's' lacks messages that it has confirmed to 'p'"):
            into.publish([(2, encode({}, b"2"))])
    assert bodies(address, "s") == []
