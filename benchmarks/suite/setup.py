"""Queues, exchanges and messages that the cases use."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Final

from benchmarks.suite.raw import FRAME_MAX, RawConnection
from benchmarks.suite.task import Job
from bide.admin.infrastructure import install
from bide.amqp import codec
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.client import connect
from bide.delay.clock import Clock
from bide.delay.protocol import HEADER_DUE, HEADER_TO, DelayInfrastructure, QueueTarget
from bide.durations import to_milliseconds
from bide.messages.outgoing import OutgoingMessage
from bide.messages.prepared import PreparedMessage, check_message
from bide.topology import Queue, Topology

TARGET: Final = "target"

WINDOW: Final = 10_000
"""Messages sent and not confirmed, where a client leaves the choice to us."""

IN_FLIGHT: Final = 1_000
"""Publishes under way at once, where each has a task of its own."""

_MINUTES: Final = range(10, 60)
_DIFFERENT: Final = 5_000
"""Messages that are made before; they are sent over and over."""


def minutes_clock() -> Clock:
    """The 59 queues of whole minutes: what delays of 10 to 59 minutes need."""
    return Clock(max_delay=timedelta(minutes=_MINUTES[-1]), resolution=timedelta(minutes=1))


def random_minutes(*, seed: int = 1) -> list[timedelta]:
    """Delays of 10 to 59 minutes."""
    chance = random.Random(seed)
    return [timedelta(minutes=chance.choice(_MINUTES)) for _ in range(_DIFFERENT)]


async def prepare(url: str, infrastructure: DelayInfrastructure) -> DelayInfrastructure:
    """Declare the target queue and all of the infrastructure; return that as it is used on this broker."""
    connection = await Connection.open(BrokerUrl.parse(url))
    try:
        await install(connection, infrastructure)
    finally:
        await connection.close()
    async with connect(url, infrastructure=infrastructure) as client:
        await client.declare(Topology(queues=[Queue.quorum(TARGET)]))
        await client.bind(TARGET)
        return await client.infrastructure()


def delayed_frames(infrastructure: DelayInfrastructure, delays: list[timedelta], size: int) -> list[bytes]:
    """Messages with these delays as bide sends them, encoded."""
    return [
        _frames(check_message(OutgoingMessage(bytes(size), to=TARGET, delay=delay)), infrastructure) for delay in delays
    ]


def _frames(message: PreparedMessage, infrastructure: DelayInfrastructure) -> bytes:
    now = datetime.now(UTC)
    message = message.starting(now)
    route = message.route(infrastructure, now)
    assert route is not None
    properties = codec.properties(message.wire_values(route, now))
    return b"".join(
        codec.publish(
            1,
            exchange=route.exchange,
            routing_key=route.routing_key,
            mandatory=True,
            encoded_properties=properties,
            body=message.body,
            frame_max=FRAME_MAX,
        )
    )


@dataclass(frozen=True, slots=True)
class Plain:
    """A message for clients other than bide.

    Attributes:
        headers: among them what delays the message.
    """

    exchange: str
    routing_key: str
    headers: dict[str, Any]
    message_id: str


class PlainMessages:
    """Delayed messages for other clients: where they go is known before, so that they have no more to do than bide.

    What is left to them is what differs from message to message: the id, the due time, and the headers to encode.
    """

    def __init__(self, clock: DelayInfrastructure) -> None:
        delays = random_minutes()
        self._routes = [
            (delay // timedelta(milliseconds=1), clock.route(delay, QueueTarget(TARGET))) for delay in delays
        ]
        self._numbers = count()

    def next(self) -> Plain:
        """One more."""
        number = next(self._numbers)
        milliseconds, route = self._routes[number % _DIFFERENT]
        due = to_milliseconds(datetime.now(UTC)) + milliseconds
        return Plain(route.exchange, route.routing_key, {**route.headers, HEADER_DUE: due}, f"{number:032x}")


async def fill(job: Job, *, body: bytes | None = None) -> None:
    """Put ``messages`` messages (or a few more) into the target queue.

    They look like delayed messages that have arrived, and are published at once.

    Args:
        body: the body of each message; ``size`` bytes if None.
    """
    async with connect(job.url) as client:
        await client.declare(Topology(queues=[Queue.quorum(TARGET)]))
    values = {"delivery_mode": 2, "message_id": "0" * 32, "headers": {HEADER_TO: f"q:{TARGET}", HEADER_DUE: 1 << 40}}
    encoded = codec.publish(
        1,
        exchange="",
        routing_key=TARGET,
        mandatory=True,
        encoded_properties=codec.properties(values),
        body=bytes(job.options["size"]) if body is None else body,
        frame_max=FRAME_MAX,
    )
    connection = RawConnection.open(BrokerUrl.parse(job.url))
    connection.publish([b"".join(encoded)], window=WINDOW, until=lambda sent: sent >= job.options["messages"])
    connection.close()
