"""The routing model and exported definitions, compared with a real RabbitMQ."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import pytest

from bide.admin.apply import apply
from bide.local_broker.management import Management
from bide.topology import Binding, Exchange, Queue, Topology
from bide.topology.rendering import definitions, from_definitions
from bide.topology.routing import Model
from tests.broker.receiving import connected
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from bide.amqp.channel import Channel
    from bide.amqp.delivery import Delivery
    from bide.topology import Argument
    from tests.support import Vhost

EXCHANGES: Final = ("a", "b", "c", "d", "e")
QUEUES: Final = ("q0", "q1", "q2", "q3", "q4", "q5")
WORDS: Final = ("k", "l", "")
HEADERS: Final[tuple[Any, ...]] = (1, 2, "1", True, 1.5)
MESSAGES: Final = 60


@dataclass(frozen=True, slots=True)
class Sent:
    exchange: str
    routing_key: str
    headers: dict[str, Any]


@asynccontextmanager
async def channel_to(url: str) -> AsyncIterator[Channel]:
    async with connected(url) as connection:
        yield await connection.channel(confirms=True)


def random_key(chance: random.Random) -> str:
    return ".".join(chance.choices(WORDS, k=chance.randint(0, 3)))


def random_pattern(chance: random.Random) -> str:
    return ".".join(chance.choices([*WORDS, "*", "#", "k"], k=chance.randint(0, 3)))


def random_headers(chance: random.Random) -> dict[str, Any]:
    return {name: chance.choice(HEADERS) for name in chance.sample(["h", "i", "x-h"], k=chance.randint(0, 3))}


def random_network(chance: random.Random) -> Topology:
    """Exchanges of all four kinds, bound to queues and to each other, in circles too, with alternates."""
    exchanges = []
    for name in EXCHANGES:
        alternate = chance.choice([None, *EXCHANGES, "missing"])
        exchanges.append(
            Exchange(
                name,
                chance.choice(["direct", "topic", "topic", "fanout", "headers"]),
                arguments={} if alternate is None else {"alternate-exchange": alternate},
            )
        )
    types = {one.name: one.type for one in exchanges}
    bindings = []
    for _ in range(chance.randint(5, 18)):
        source = chance.choice(EXCHANGES)
        to_queue = chance.random() < 0.7
        arguments: dict[str, Argument] = {}
        if types[source] == "headers":
            arguments = random_headers(chance)
            if match := chance.choice(["", "all", "any", "all-with-x", "any-with-x"]):
                arguments["x-match"] = match
        bindings.append(
            Binding(
                source,
                chance.choice(QUEUES if to_queue else EXCHANGES),
                random_pattern(chance) if types[source] == "topic" else random_key(chance),
                "queue" if to_queue else "exchange",
                arguments,
            )
        )
    return Topology(exchanges, [Queue(name) for name in QUEUES], bindings)


def random_message(chance: random.Random, entries: tuple[str, ...] = (*EXCHANGES, "")) -> Sent:
    headers = random_headers(chance)
    for name in ("CC", "BCC"):
        if chance.random() < 0.3:
            headers[name] = [random_key(chance) for _ in range(chance.randint(0, 2))]
    exchange = chance.choice(entries)
    return Sent(exchange, chance.choice([*QUEUES, "none"]) if exchange == "" else random_key(chance), headers)


async def send(channel: Channel, messages: list[Sent]) -> None:
    await asyncio.gather(
        *(
            channel.publish(
                exchange=one.exchange,
                routing_key=one.routing_key,
                values={"headers": one.headers, "message_id": str(number), "delivery_mode": 2},
                body=b"",
                mandatory=False,
            )
            for number, one in enumerate(messages)
        )
    )


async def drain(channel: Channel, queue: str) -> list[Delivery]:
    found = []
    while (delivery := await channel.get(queue)) is not None:
        channel.ack(delivery.delivery_tag)
        found.append(delivery)
    return found


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(12))
async def test_the_model_routes_like_the_broker(vhost_url: str, seed: int) -> None:
    """Each message in exactly the queues that the model says, once, with its key and its headers without BCC."""
    chance = random.Random(seed)
    topology = random_network(chance)
    model = Model(topology)
    messages = [random_message(chance) for _ in range(MESSAGES)]

    async with channel_to(vhost_url) as channel:
        await declare(channel, topology)
        await send(channel, messages)
        found = [
            (message_number(one), queue, one.routing_key, one.values.get("headers") or {})
            for queue in QUEUES
            for one in await drain(channel, queue)
        ]

    expected = [
        (number, arrival.queue, arrival.routing_key, arrival.headers)
        for number, sent in enumerate(messages)
        for arrival in model.travel(sent.exchange, sent.routing_key, sent.headers)
        if arrival.fate == "arrived"
    ]
    assert sorted(found, key=repr) == sorted(expected, key=repr)


async def declare(channel: Channel, topology: Topology) -> None:
    """Without validation, which would refuse some of these networks."""
    await asyncio.gather(*(channel.declare_exchange(one) for one in topology.exchanges))
    await asyncio.gather(*(channel.declare_queue(one) for one in topology.queues))
    await asyncio.gather(*(channel.bind(one) for one in topology.bindings))


@pytest.mark.anyio
async def test_the_default_exchange_does_not_work_as_an_alternate(vhost_url: str) -> None:
    topology = Topology([Exchange("x", arguments={"alternate-exchange": ""})], [Queue("q")])

    async with channel_to(vhost_url) as channel:
        await declare(channel, topology)
        await send(channel, [Sent("x", "q", {})])
        assert await drain(channel, "q") == []

    assert not Model(topology).route("x", "q").queues


def random_waits(chance: random.Random) -> Topology:
    """Queues that hold messages back and pass them on, level by level, and queues at the end."""
    exchanges = [Exchange(name, chance.choice(["direct", "topic", "topic", "fanout"])) for name in EXCHANGES]
    levels = {name: level for level, name in enumerate(EXCHANGES)}
    queues = [Queue(name) for name in QUEUES]
    for number in range(10):
        arguments: dict[str, Argument] = {
            "x-message-ttl": chance.choice([0, 10, 60]),
            "x-dead-letter-exchange": chance.choice([*EXCHANGES[1:], *EXCHANGES[1:], ""]),
        }
        if chance.random() < 0.4:
            arguments["x-dead-letter-routing-key"] = chance.choice([*QUEUES, "k", "k.l"])
        if chance.random() < 0.5:
            arguments |= {"x-queue-type": "quorum"}
            if chance.random() < 0.7:
                arguments |= {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
        queues.append(Queue(f"wait{number}", arguments=arguments))
    bindings = []
    for _ in range(40):
        source = chance.choice(EXCHANGES)
        # Upwards only, so that no message comes back to where it was.
        waits = [
            one.name
            for one in queues
            if levels.get(str(one.arguments.get("x-dead-letter-exchange")), len(levels)) > levels[source]
        ]
        key = random_pattern(chance) if exchanges[levels[source]].type == "topic" else random_key(chance)
        bindings.append(Binding(source, chance.choice(waits), key))
    return Topology(exchanges, queues, bindings)


@pytest.mark.anyio
@pytest.mark.parametrize("seed", [1, 6, 8, 10])
async def test_the_model_dead_letters_like_the_broker(vhost_url: str, release: tuple[int, ...], seed: int) -> None:
    """The same ends, by the same queues, with the same keys and headers; and nothing else."""
    chance = random.Random(seed)
    topology = random_waits(chance)
    model = Model(topology)
    messages = [random_message(chance, EXCHANGES[:3]) for _ in range(MESSAGES)]
    expected = [
        (number, arrival.queue, arrival.routing_key, comparable(arrival.hops, release))
        for number, sent in enumerate(messages)
        for arrival in model.travel(sent.exchange, sent.routing_key, sent.headers)
        if arrival.fate == "arrived"
    ]
    assert any(len(hops) > 1 for *_, hops in expected), "no message waits twice: choose another seed"

    found: list[tuple[int, str, str, tuple[str, ...]]] = []
    async with channel_to(vhost_url) as channel:
        await declare(channel, topology)
        await send(channel, messages)
        # The waits add up to less than half a second; a slow machine has until the deadline.
        async with asyncio.timeout(TIMEOUT):
            while len(found) < len(expected):
                for queue in QUEUES:
                    found += [
                        (message_number(one), queue, one.routing_key, comparable(hops(one), release))
                        for one in await drain(channel, queue)
                    ]
                await asyncio.sleep(0.02)  # before the next look

    assert sorted(found) == sorted(expected)


def message_number(delivery: Delivery) -> int:
    return int(delivery.values["message_id"])


def hops(delivery: Delivery) -> tuple[str, ...]:
    """The queues that a message died in, the first one first."""
    deaths = (delivery.values.get("headers") or {}).get("x-death", [])
    return tuple(str(death["queue"]) for death in reversed(deaths))


def comparable(hops: tuple[str, ...], release: tuple[int, ...]) -> tuple[str, ...]:
    """The queues in their order where the broker keeps it: before 4.1 it mixes up the x-death of three or more."""
    return hops if release >= (4, 1) else tuple(sorted(hops))


# --- definitions

WHOLE: Final = Topology(
    [
        Exchange("in", "topic", arguments={"alternate-exchange": "rest"}),
        Exchange("rest", "fanout"),
        Exchange('quotes " and | and é', "headers", durable=False, auto_delete=True),
    ],
    [
        Queue.quorum("wait", {"x-message-ttl": 267_840_000_000, "x-dead-letter-exchange": "rest"}),
        Queue("rest", arguments={"x-queue-type": "classic", "x-single-active-consumer": True}),
        Queue("stream", arguments={"x-queue-type": "stream", "x-max-age": "7D"}),
    ],
    [
        Binding("in", "wait", "*.1.#"),
        Binding("in", "rest", "0.#", "exchange"),
        Binding("rest", "rest"),
        Binding('quotes " and | and é', "rest", "", "queue", {"x-match": "any", "flag": True, "size": 1.5, "n": 1}),
        Binding("amq.topic", "stream", "#"),
    ],
)


@pytest.mark.anyio
@pytest.mark.parametrize("whole_broker", [False, True])
async def test_the_broker_imports_definitions(vhost: Vhost, whole_broker: bool) -> None:
    """Imported, everything is there as declared: declaring it again changes nothing, and the export reads back."""
    place = urlsplit(vhost.broker.management_url)
    management = Management(
        host=str(place.hostname), port=place.port or 0, user=vhost.broker.user, password=vhost.broker.password
    )
    if whole_broker:
        management.call("POST", "definitions", body=definitions(WHOLE, vhost.name))
    else:
        management.call("POST", "definitions", vhost.name, body=definitions(WHOLE))

    async with connected(vhost.url) as connection:
        await apply(connection, WHOLE)

    exported = from_definitions(management.call("GET", "definitions", vhost.name))
    assert not WHOLE.diff(exported)


def test_the_broker_imports_a_file_of_definitions(vhost: Vhost, tmp_path: Path) -> None:
    file = tmp_path / "definitions.json"
    file.write_text(json.dumps(definitions(WHOLE, vhost.name)))

    vhost.broker.rabbitmqctl("import_definitions", str(file))

    names = vhost.broker.rabbitmqctl("list_queues", "--vhost", vhost.name, "--quiet", "--no-table-headers", "name")
    assert sorted(names.split()) == sorted(one.name for one in WHOLE.queues)
