"""Round trip of messages: from a stream through a table into a queue."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from tests.spark.receiving import new_queue
from tests.spark.streams import Streams
from tests.timeouts import TIMEOUT

TIME = datetime(2026, 1, 1, 0, 0, 5, tzinfo=UTC)
VALUES: dict[str, Any] = {
    "text": "täxt",
    "empty": "",
    "bytes": b"\xff\x00",
    "ascii": b"abc",
    "true": True,
    "false": False,
    "null": None,
    "small": -5,
    "large": 2**40,
    "fraction": 2.25,
    "whole": 2.0,
    "time": TIME,
    "list": [1, "a", None, [True, b"\xff"]],
    "table": {"k": 1, "n": {"$bytes": "t"}, "t": TIME},
    "empty list": [],
    "empty table": {},
    "$bytes": "x",
}
MESSAGES: dict[str, dict[str, Any]] = {
    "all properties": {
        "content_type": "text/plain",
        "content_encoding": "gzip",
        "delivery_mode": 2,
        "priority": 3,
        "correlation_id": "cörrelation",
        "reply_to": "replies/1 %2F",
        "expiration": "86400000",
        "timestamp": TIME,
        "type": "Shop.OrderCreated",
        "app_id": "shop",
        "headers": {"a": "b"},
    },
    "user": {"delivery_mode": 2, "user_id": "USER"},
    "transient": {"delivery_mode": 1, "content_type": "", "priority": 0},
    "values": {"delivery_mode": 2, "headers": VALUES},
    "values of x-": {"delivery_mode": 2, "headers": {f"x-{name}": value for name, value in VALUES.items()}},
    "sent by bide": {
        "delivery_mode": 2,
        "headers": {"bide-sent": 1700000000123, "bide-due": 1700000001123, "bide-to": "q:orders"},
    },
}
OF_SOURCE = ("stream", "offset", "timestamp", "due", "scheduled", "exchange", "routing_key")


def test_a_queue_gets_from_a_table_what_rabbitmq_delivers_from_the_stream(
    streams: Streams, tmp_path: Path, release: tuple[int, ...]
) -> None:
    publish(streams)
    table = streams.batch(stream="s", includeHeaders="json").drop(*OF_SOURCE)
    table.write.parquet(str(tmp_path / "table"))
    queue = new_queue(streams.vhost.url)
    (
        streams.spark.read.parquet(str(tmp_path / "table"))
        .write.format("rabbitmq")
        .mode("append")
        .options(url=streams.vhost.url, queue=queue, bideHeaders="keep")
        .save()
    )
    expected, found = received(streams, "s", {"x-stream-offset": "first"}), received(streams, queue, {})
    assert set(found) == set(MESSAGES)
    if release >= (4,):
        # RabbitMQ 4 delivers bytes from a stream as text. They are bytes in the stream, in the table and in the queue.
        assert expected["values"]["headers"]["ascii"] == "abc"
        assert found["values"]["headers"]["ascii"] == b"abc"
        expected, found = as_text(expected), as_text(found)
    for name, values in expected.items():
        assert found[name] == values, name


def test_headers_of_bide_are_refused_or_dropped(streams: Streams) -> None:
    publish(streams)
    table = streams.batch(stream="s", includeHeaders="json").drop(*OF_SOURCE).where("message_id = 'sent by bide'")
    queue = new_queue(streams.vhost.url)
    writer = table.write.format("rabbitmq").mode("append").options(url=streams.vhost.url, queue=queue)
    with pytest.raises(Exception, match=r"'bide-sent'.* set the option bideHeaders to drop or keep"):
        writer.save()
    writer.option("bideHeaders", "drop").save()
    ((name, values),) = received(streams, queue, {}, number=1).items()
    assert name == "sent by bide"
    assert list(values["headers"]) == ["bide-sent"], "the sink's own"
    assert values["headers"]["bide-sent"] > 1700000000123


def publish(streams: Streams) -> None:
    streams.declare("s")
    asyncio.run(_publish(BrokerUrl.parse(streams.vhost.url)))


async def _publish(url: BrokerUrl) -> None:
    """Publish without a client, which would add headers. (pika does not encode floats.)"""
    connection = await Connection.open(url)
    try:
        channel = await connection.channel(confirms=True)
        for name, given in MESSAGES.items():
            values = {**given, "message_id": name, **({"user_id": url.user} if "user_id" in given else {})}
            await channel.publish(exchange="", routing_key="s", values=values, body=name.encode())
    finally:
        await connection.close()


def received(
    streams: Streams, queue: str, arguments: dict[str, Any], *, number: int = len(MESSAGES)
) -> dict[str, dict[str, Any]]:
    """The properties of messages as RabbitMQ delivers them, by body."""
    found: dict[str, dict[str, Any]] = {}
    streams.channel.basic_qos(prefetch_count=number)
    for method, properties, body in streams.channel.consume(queue, arguments=arguments, inactivity_timeout=TIMEOUT):
        assert method is not None, f"nothing arrives, after {len(found)} messages"
        streams.channel.basic_ack(method.delivery_tag)
        values = {name: value for name, value in vars(properties).items() if value is not None}
        values["headers"] = dict(values.get("headers") or {})
        values["headers"].pop("x-stream-offset", None)
        found[body.decode()] = values
        if len(found) == number:
            break
    streams.channel.cancel()
    return found


def as_text(value: Any) -> Any:
    """The value with bytes as text where they are UTF-8."""
    match value:
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return value
        case list():
            return [as_text(one) for one in value]
        case dict():
            return {name: as_text(one) for name, one in value.items()}
        case _:
            return value
