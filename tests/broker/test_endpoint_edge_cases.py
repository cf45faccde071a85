"""Endpoints with odd exceptions, policies and messages, none of which holds up others."""

from __future__ import annotations

import struct
from datetime import UTC, datetime

import pytest

import bide
from bide.amqp import codec
from bide.amqp.confirms import Awaited
from bide.amqp.connection import Connection
from bide.errors import InvalidInputError
from bide.recoverability.failed import FailedMessage
from bide.topology import Queue
from tests.broker.endpoints import Recorder, running
from tests.broker.receiving import fresh, receive
from tests.support import Vhost

ONCE = bide.Retry(immediate=0, delays=())
TWICE = bide.Retry(immediate=1, delays=())


async def parked(client: bide.Client, queue: str) -> FailedMessage:
    """The one message of an error queue."""
    (one,) = await receive(client, queue, 1)
    return FailedMessage.read(one.raw.exchange, one.raw.routing_key, one.raw.values, one.body)


async def test_a_stream_is_refused_as_a_queue(vhost: Vhost) -> None:
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[Queue("log", arguments={"x-queue-type": "stream"})]))
        app = bide.Endpoint("log", management_url=vhost.broker.management_url)
        app.handler(lambda message: None)
        with pytest.raises(InvalidInputError, match="'log' is a stream"):
            await app.run(client)


async def post(connection: Connection, queue: str, properties: bytes) -> None:
    """Publish with properties that our own encoder would refuse."""
    async with await connection.channel(confirms=True) as channel:
        frames = codec.publish(
            channel.number,
            exchange="",
            routing_key=queue,
            mandatory=True,
            encoded_properties=properties,
            body=b"x",
            frame_max=connection.frame_max,
        )
        confirm = Awaited("", queue, "", b"x", loop=connection.loop)
        channel.post(b"".join(frames), confirm)
        await confirm.future


def headers(raw: bytes) -> bytes:
    """Properties with nothing but this content of the header table."""
    return struct.pack(">HI", 1 << 13, len(raw)) + raw


LARGEST = {f"bide-{name}": (1 << 63) - 1 for name in ("retries", "attempts", "deliveries", "due", "expires", "sent")}
FULL = codec.properties({"headers": {"own": "x" * 130_900}})


def nested(times: int) -> bytes:
    """A header table in a header table, and so on."""
    raw = b""
    for _ in range(times):
        raw = b"\x01aF" + struct.pack(">I", len(raw)) + raw
    return raw


STRANGE = {
    "headers nested without end": headers(nested(5000)),
    "nothing": codec.properties({}),
    "a time after the year 9999": struct.pack(">HQ", 1 << 6, (1 << 64) - 1),
    "the end of time, and an expiration": codec.properties(
        {"expiration": "99999999", "timestamp": datetime(9999, 12, 31, tzinfo=UTC)}
    ),
    "a header with such a time": headers(b"\x02abT" + b"\xff" * 8),
    "an id that is not text": struct.pack(">H", 1 << 7) + b"\x03\xff\xfe\x00",
    "a header's name that is not text": headers(b"\x02\xff\xfeI\x00\x00\x00\x07"),
    "a long id that is not text": struct.pack(">H", 1 << 7) + b"\x64" + b"\xff" * 100,
    "a long type that is not text": struct.pack(">H", 1 << 5) + b"\x64" + b"\xff" * 100,
    "a header's long name that is not text": headers(b"\x64" + b"\xff" * 100 + b"I\x00\x00\x00\x07"),
    "a header that is not text": headers(b"\x02abS\x00\x00\x00\x01\xff"),
    "our own headers, nonsense": codec.properties({"headers": {**LARGEST, "bide-to": 5, "bide-exchange": b"\xff"}}),
    "our own headers, other nonsense": codec.properties(
        {"headers": {"bide-retries": "99999999999", "bide-attempt-times": [1 << 62, "a"], "bide-expiration": 5}}
    ),
    "a foreign x-death": codec.properties({"headers": {"x-death": [{"queue": 1}], "x-first-death-queue": 5}}),
    "the count of another queue": codec.properties({"headers": {"x-delivery-count": 1}}),
    "no count": codec.properties({"headers": {"x-delivery-count": "many"}}),
    "headers that fill a frame": FULL,
}


@pytest.mark.parametrize("classic", [False, True])
@pytest.mark.parametrize("strange", STRANGE)
async def test_malformed_messages_are_retried_and_parked(
    client: bide.Client, connection: Connection, strange: str, classic: bool
) -> None:
    queue, recorder = fresh("strange"), Recorder()
    await client.declare(bide.Topology(queues=[Queue(queue) if classic else Queue.quorum(queue)]))
    app = bide.Endpoint(queue, error_queue=f"{queue}.error", observers=[recorder], retry=TWICE)

    @app.handler
    async def fail(message: bide.Message) -> None:
        raise ValueError("mine")

    async with running(app, client, recorder):
        await post(connection, queue, STRANGE[strange])
        await recorder.until("parked")
    assert recorder.kinds() in (["failed", "parked"], ["parked"])
    (message,) = await receive(client, f"{queue}.error", 1)
    assert message.body == b"x"
    if STRANGE[strange] is FULL:
        assert dict(message.headers) == {"own": "x" * 130_900}
    else:
        assert message.raw.values["headers"]["bide-error-message"] == "mine"
