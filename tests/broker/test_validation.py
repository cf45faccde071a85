"""Validation of topologies, compared with what a real RabbitMQ accepts and refuses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest

from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.errors import BrokerError
from bide.topology import Binding, Exchange, Queue, Topology
from bide.topology.queue_arguments import QUEUE_TYPES, RULES
from bide.topology.validation import problems
from tests.broker.receiving import declare

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bide.topology import Argument

pytestmark = pytest.mark.anyio

POOL: Final[tuple[Argument, ...]] = (
    -1, 0, 1, 2, 15, 16, 255, 256, 315_360_000_000, 315_360_000_001, True, 1.5, "", "5", "7D",
    "amq.fanout", "at-least-once", "at-most-once", "drop-head", "reject-publish", "reject-publish-dlx", "lazy",
    "default", "client-local", "balanced", "random", "min-masters", "least-leaders", "all",
)  # fmt: skip
_SHARES: Final = 4
"""Of the values for each argument, one in four is tried by ``make test``."""
IN_SILENCE: Final = (
    # What brokers accept and then ignore, or take for something else, and bide reports.
    "x-queue-type is ''",
    "x-max-priority is 0",
    "x-delivery-limit is",
    "x-delayed-retry-",
    "x-consumer-disconnected-timeout ",
    "x-consumer-timeout ",
    "x-member-placement-tag ",
    "x-stream-filter-size-bytes ",
    "x-queue-mode is",
    "x-queue-master-locator ",
    "x-dead-letter-strategy is 'at-least-once' with",
    "x-dead-letter-strategy is 'at-least-once' without",
    "x-overflow is 'reject-publish-dlx', which quorum queues",
    "does not exist",
    "x-queue-leader-locator ",
)


@pytest.fixture
async def connection(vhost_url: str) -> AsyncIterator[Connection]:
    connection = await Connection.open(BrokerUrl.parse(vhost_url))
    yield connection
    await connection.close()


async def accepts(connection: Connection, queue: Queue) -> bool:
    try:
        async with asyncio.timeout(20):
            channel = await connection.channel()
            await channel.declare_queue(queue)
            await channel.delete_queue(queue.name)
            await channel.close()
    except BrokerError:
        return False
    except TimeoutError:
        # RabbitMQ 3.10 sometimes does not answer a declaration whose x-queue-master-locator is not text.
        await connection.close()
        return False
    return True


@pytest.mark.parametrize(
    ("queue_type", "first"),
    [
        pytest.param(kind, first, marks=pytest.mark.long if first else ())
        for kind in QUEUE_TYPES
        for first in range(_SHARES)
    ],
)
async def test_validation_accepts_exactly_what_the_broker_accepts(vhost_url: str, queue_type: str, first: int) -> None:
    connection = await Connection.open(BrokerUrl.parse(vhost_url))
    wrong = []
    for place, name in enumerate(RULES):
        # The first share of each argument begins elsewhere, so that it has values of all kinds.
        for value in POOL[(first + place) % _SHARES :: _SHARES]:
            # Some values crash what handles them on the broker, and the connection with it.
            if not connection.is_open:
                connection = await Connection.open(BrokerUrl.parse(vhost_url))
            arguments: dict[str, Argument] = {"x-queue-type": queue_type, name: value}
            # Each has a name of its own: one that the broker choked on may stay blocked.
            queue = Queue(f"q{name}{value}", arguments=arguments)
            found = problems(Topology(queues=[queue]), release=connection.release)
            taken = await accepts(connection, queue)
            if not taken and not found:
                # A queue that expires at once may be gone before a busy broker has declared it.
                if not connection.is_open:
                    connection = await Connection.open(BrokerUrl.parse(vhost_url))
                taken = await accepts(connection, replace(queue, name=f"{queue.name} again"))
            silent = all(any(words in one for words in IN_SILENCE) for one in found)
            if taken and not silent:
                wrong.append(f"taken, but {found}")
            elif not taken and not found:
                wrong.append(f"refused, and not reported: {name}={value!r}")
    await connection.close()

    assert wrong == []


@pytest.mark.parametrize(
    "topology",
    [
        Topology([Exchange("x", "nonsense")]),
        Topology([Exchange("amq.mine")]),
        Topology([Exchange("amq.topic", "direct")]),
        Topology([Exchange("")]),
        Topology(queues=[Queue("amq.mine")]),
        Topology(queues=[Queue.quorum("q", {})], bindings=[Binding("", "q", "q")]),
        Topology(bindings=[Binding("amq.topic", "gone", "k")]),
        Topology(queues=[Queue("q")], bindings=[Binding("gone", "q", "k")]),
        Topology(queues=[Queue("q")], bindings=[Binding("amq.headers", "q", arguments={"x-match": "some"})]),
        Topology(queues=[Queue("q")], bindings=[Binding("amq.headers", "q", arguments={"x-match": 1})]),
        Topology([Exchange("x", arguments={"alternate-exchange": 1})]),
        *(
            Topology(queues=[Queue("q", arguments={"x-queue-type": kind}, **{flag: flag != "durable"})])
            for kind in ("quorum", "stream")
            for flag in ("durable", "exclusive", "auto_delete")
        ),
        *(Topology(queues=[Queue("", arguments={"x-queue-type": kind})]) for kind in ("quorum", "stream")),
    ],
)
async def test_the_broker_refuses_what_validation_reports(connection: Connection, topology: Topology) -> None:
    channel = await connection.channel()

    with pytest.raises(BrokerError):
        await declare(channel, topology)

    assert problems(topology)


async def test_a_name_with_a_line_break_is_changed_by_the_broker(connection: Connection) -> None:
    channel = await connection.channel()
    queue = Queue("two\r\nlines")

    assert (await channel.declare_queue(queue)).queue == "twolines"
    assert problems(Topology(queues=[queue]))


async def test_the_broker_refuses_a_topic_key_with_three_hash_wildcards_from_4_3_5_on(connection: Connection) -> None:
    topology = Topology([Exchange("x", "topic")], [Queue("q")], [Binding("x", "q", "#.a.#.b.#")])
    channel = await connection.channel()
    await channel.declare_exchange(topology.exchanges[0])
    await channel.declare_queue(topology.queues[0])

    if connection.release >= (4, 3, 5):
        with pytest.raises(BrokerError):
            await channel.bind(topology.bindings[0])
    else:
        await channel.bind(topology.bindings[0])
    assert bool(problems(topology, release=connection.release)) == (connection.release >= (4, 3))
