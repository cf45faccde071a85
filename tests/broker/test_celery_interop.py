"""``Celery`` and the real Celery, delaying messages for each other on the same queues."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import kombu
import pytest
from kombu import serialization
from kombu.transport import native_delayed_delivery

import bide
from bide.admin.apply import apply
from bide.admin.infrastructure import install_guard, remove
from bide.admin.locate import management_api
from bide.admin.verify import verify
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client import broker_state
from bide.delay.celery import Celery
from bide.errors import DeclarationMismatchError, NotEmptyError, UnsupportedTargetError
from bide.topology import Binding, Exchange, Queue, Topology
from bide.topology.rendering import from_definitions
from tests.broker import celery_app
from tests.broker.celery_app import EXCHANGE, PLAIN, REPORTS, ROUTING_KEY, TASK, WORK
from tests.broker.receiving import eventually, receive
from tests.timeouts import MAX_LATENESS, TIMEOUT

if TYPE_CHECKING:
    from tests.support import Vhost

# Only part of kombu has type annotations.
kombu_delay: Any = native_delayed_delivery
dumps: Any = serialization.dumps
KombuConnection: Any = vars(kombu)["Connection"]

PROJECT = Path(__file__).parents[2]

DELAY = 3
"""Seconds: two levels, so that a message comes from one level's queue into another's."""

QueueType = Literal["quorum", "classic"]


# --- the real Celery


@dataclass(frozen=True, slots=True)
class Report:
    """A worker started a task."""

    label: str
    at: datetime
    retries: int


class Worker:
    """A running Celery worker."""

    def __init__(self, process: asyncio.subprocess.Process, reports: bide.Consumer, log: Path) -> None:
        self._process = process
        self._reports = reports
        self._log = log

    async def report(self, *, seconds: float = TIMEOUT) -> Report:
        """The next report of the worker."""
        message = asyncio.ensure_future(anext(self._reports))
        exited = asyncio.ensure_future(self._process.wait())
        await asyncio.wait({message, exited}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        exited.cancel()
        if not message.done():
            message.cancel()
            pytest.fail(f"the worker reported nothing within {seconds} s; its log:\n{self._log.read_text()}")
        received = await message
        await received.ack()
        values = received.json()
        return Report(values["label"], datetime.fromtimestamp(values["at"], UTC), values["retries"])


@asynccontextmanager
async def running_worker(client: bide.Client, url: str, log: Path) -> AsyncIterator[Worker]:
    """A worker on the client's virtual host, ready, and ended by its process id."""
    await client.declare(Topology(queues=[Queue.quorum(REPORTS)]))
    command = [sys.executable, "-m", "celery", "-A", celery_app.__name__, "worker"]
    options = ["--pool", "solo", "--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "info"]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            *options,
            cwd=PROJECT,
            env={**os.environ, "CELERY_BROKER_URL": url},
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
        )
    try:
        async with client.consume(REPORTS) as reports:
            worker = Worker(process, reports, log)
            assert (await worker.report()).label == "ready"
            yield worker
    finally:
        # Idle, it would notice a gentler signal only seconds later. It has no children (--pool solo), and what it
        # leaves on the broker goes with the virtual host.
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
async def client(vhost_url: str) -> AsyncIterator[bide.Client]:
    """A client that delays messages as Celery does, on a virtual host of its own."""
    async with bide.connect(vhost_url, infrastructure=Celery()) as client:
        yield client


@pytest.fixture
def connection(vhost_connection: Connection) -> Connection:
    """A bare connection to the same virtual host."""
    return vhost_connection


@pytest.fixture
def app(vhost_url: str) -> Iterator[Any]:
    """The Celery application as a sender has it."""
    app = celery_app.create(vhost_url)
    yield app
    app.close()


def as_celery_makes_it(app: Any, label: str, **arguments: int) -> dict[str, Any]:
    """The message of a task by Celery's own hand, as arguments of ``Client.publish``."""
    message = app.amqp.as_task_v2(str(uuid.uuid4()), TASK, (label,), arguments)
    content_type, content_encoding, body = dumps(message.body, "json")
    return {
        "body": body,
        "headers": message.headers,
        "content_type": content_type,
        "content_encoding": content_encoding,
        **message.properties,
    }


def by_hand(label: str, **arguments: int) -> dict[str, Any]:
    """The least that makes a task, for senders without Celery."""
    return {"json": [[label], arguments, {}], "headers": {"task": TASK, "id": str(uuid.uuid4()), "lang": "py"}}


# --- bide delays, Celery's worker runs


async def test_a_worker_runs_tasks_delayed_by_bide(
    client: bide.Client, app: Any, vhost_url: str, tmp_path: Path
) -> None:
    """Once each and not early: by its exchange or by its queue, made with Celery or without."""
    targets: dict[str, dict[str, Any]] = {
        "exchange": {"exchange": EXCHANGE, "routing_key": ROUTING_KEY},
        "queue": {"to": WORK},
        "queue of a direct exchange": {"to": PLAIN},
    }
    async with running_worker(client, vhost_url, tmp_path / "worker.log") as worker:
        due = {}
        for label, target in targets.items():
            for maker, message in (
                ("Celery", as_celery_makes_it(app, f"{label}, Celery")),
                ("hand", by_hand(f"{label}, hand")),
            ):
                receipt = await client.publish(**message, **target, delay=timedelta(seconds=DELAY))
                assert receipt.due is not None
                due[f"{label}, {maker}"] = receipt.due
        reports = [await worker.report() for _ in due]

        # Each queue is in order: what came twice would be in front of these.
        for queue in (WORK, PLAIN):
            await client.publish(**by_hand("last"), to=queue)
        assert [(await worker.report()).label for _ in range(2)] == ["last", "last"]

    assert sorted(one.label for one in reports) == sorted(due)
    assert all(timedelta(0) <= one.at - due[one.label] < MAX_LATENESS for one in reports)


async def test_a_task_that_bide_delayed_is_retried_by_its_worker(
    client: bide.Client, connection: Connection, app: Any, vhost_url: str, tmp_path: Path
) -> None:
    """Again and again through the same levels, by Celery's own hand, with the headers that it came with."""
    await apply(connection, Celery().topology())
    retries: dict[str, int] = {"retries": 2, "countdown": DELAY}
    async with running_worker(client, vhost_url, tmp_path / "worker.log") as worker:
        sent_at = datetime.now(UTC)
        target: dict[str, Any] = {"exchange": EXCHANGE, "routing_key": ROUTING_KEY, "delay": f"{DELAY}s"}
        await client.publish(**as_celery_makes_it(app, "Celery", **retries), **target)
        await client.publish(**by_hand("hand", **retries), **target)
        reports = [await worker.report() for _ in range(6)]

    for label in ("Celery", "hand"):
        runs = [one for one in reports if one.label == label]
        assert [one.retries for one in runs] == [0, 1, 2]
        started = [sent_at, *(one.at for one in runs)]
        assert all(
            timedelta(seconds=DELAY) <= after - before < timedelta(seconds=DELAY) + MAX_LATENESS
            for before, after in itertools.pairwise(started)
        )


# --- Celery delays, bide receives


def worker_queue(name: str, exchange: str = EXCHANGE, routing_key: str = ROUTING_KEY) -> Any:
    """A queue as a Celery worker would have it, by default on the exchange that the application sends to."""
    return celery_app.Queue(
        name, celery_app.Exchange(exchange, "topic"), routing_key, queue_arguments={"x-queue-type": "quorum"}
    )


def declare_by_kombu(url: str, queue_type: QueueType = "quorum", prefix: str | None = None) -> None:
    with KombuConnection(url) as connection:
        kombu_delay.declare_native_delayed_delivery_exchanges_and_queues(connection, queue_type, prefix)


def declare_as_worker(url: str, queue: Any) -> None:
    """What a worker does for its queue at its start."""
    declare_by_kombu(url)
    with KombuConnection(url) as connection:
        queue(connection.default_channel).declare()
        kombu_delay.bind_queue_to_native_delayed_delivery_exchange(connection, queue)


async def test_bide_receives_tasks_delayed_by_celery(client: bide.Client, app: Any, vhost_url: str) -> None:
    """In a queue that Celery bound, in one that bide bound, and in one that both did: once, and as it was sent."""
    await asyncio.to_thread(declare_as_worker, vhost_url, worker_queue(WORK))
    await asyncio.to_thread(declare_as_worker, vhost_url, worker_queue("both"))
    layout = Celery()
    exact = layout.cascade.exact_key(ROUTING_KEY)
    ours = [Binding(layout.delivery_exchange, queue, exact) for queue in ("bound", "both")]
    both = Queue.quorum("both")
    await client.declare(layout.topology() | Topology(queues=[Queue.quorum("bound"), both], bindings=ours))
    send = app.tasks[TASK].apply_async

    sent_at = datetime.now(UTC)
    result = await asyncio.to_thread(send, ("delayed",), queue=WORK, countdown=DELAY)
    delayed = [*await receive(client, WORK, 1), *await receive(client, "bound", 1), *await receive(client, "both", 1)]
    await asyncio.to_thread(send, ("at once",), queue=WORK)
    await client.publish("last", to="bound")
    (at_once,), (last,) = await receive(client, WORK, 1), await receive(client, "bound", 1)
    (again,) = await receive(client, "both", 1)

    assert (at_once.json()[0], again.json()[0], last.body) == (["at once"], ["at once"], b"last"), "one came twice"
    for message in delayed:
        assert timedelta(seconds=DELAY) <= message.received_at - sent_at < timedelta(seconds=DELAY) + MAX_LATENESS
        assert message.raw.routing_key == kombu_delay.calculate_routing_key(DELAY, ROUTING_KEY)
        assert "x-death" in message.raw.values["headers"]
        assert message.routing_key == ROUTING_KEY
        assert message.headers.keys() == at_once.headers.keys()
        assert message.correlation_id == message.headers["id"] == result.id
        assert message.json()[0] == ["delayed"]
        # Celery says when the task is due only in a header of its own.
        assert (message.due, message.lateness) == (None, None)
        assert datetime.fromisoformat(message.headers["eta"]) - sent_at < timedelta(seconds=DELAY) + MAX_LATENESS


async def test_a_message_can_be_delayed_repeatedly_with_all_its_headers(
    client: bide.Client, app: Any, vhost_url: str, release: tuple[int, ...]
) -> None:
    """Through the same levels thrice, because bide strips x-death: below 4.0.1 a copy of it stops a message."""
    await asyncio.to_thread(declare_as_worker, vhost_url, worker_queue(WORK))
    await asyncio.to_thread(app.tasks[TASK].apply_async, ("delayed",), queue=WORK, countdown=DELAY)
    (message,) = await receive(client, WORK, 1)
    for _ in range(2):
        raw = message.raw.values["headers"]
        assert "x-death" in raw
        receipt = await client.publish(
            message.body,
            exchange=EXCHANGE,
            routing_key=message.routing_key,
            headers={name: value for name, value in raw.items() if not name.startswith("bide-")},
            delay=f"{DELAY}s",
        )
        (message,) = await receive(client, WORK, 1)
        assert message.message_id == receipt.message_id
        assert message.routing_key == ROUTING_KEY
        assert message.lateness is not None
        assert timedelta(0) <= message.lateness < MAX_LATENESS

    copied = {"x-death": message.raw.values["headers"]["x-death"]}

    # kombu strips nothing. The clean one waits longer, and in another queue: what is behind a stopped message may be
    # stopped with it.
    def send_by_kombu() -> None:
        with KombuConnection(vhost_url) as connection, connection.Producer() as producer:
            for label, headers, delay in (("copied", copied, DELAY), ("clean", {}, DELAY + 1)):
                key = kombu_delay.calculate_routing_key(delay, ROUTING_KEY)
                producer.publish(label, exchange="celery_delayed_27", routing_key=key, headers=headers)

    await asyncio.to_thread(send_by_kombu)
    arrived = ["clean"] if release < (4, 0, 1) else ["clean", "copied"]
    assert sorted(one.body.decode() for one in await receive(client, WORK, len(arrived))) == arrived


# --- targets that take nothing, and exchanges of other types

STUCK = 40
"""More than the stock dead-letter prefetch of 32, which this number of stuck messages exhausts."""


def on_exchange(kind: str, exchange: str, queue: str, key: str) -> Topology:
    """A queue behind an exchange under one plain key, as programs without Celery bind it."""
    return Topology([Exchange(exchange, kind)], [Queue.quorum(queue)], [Binding(exchange, queue, key)])


@pytest.mark.usefixtures("stock_dead_lettering")
@pytest.mark.parametrize("kind", ["direct", "topic", "fanout", "x-consistent-hash"])
async def test_confirmed_messages_for_an_exchange_do_not_stay_in_a_level(client: bide.Client, kind: str) -> None:
    """Whatever its type, they arrive once, on time, as they were published."""
    key = "1" if kind == "x-consistent-hash" else "order.created"
    await client.declare(on_exchange(kind, "plain", "orders", key))
    target: dict[str, Any] = {"exchange": "plain", "routing_key": key}
    sent = await asyncio.gather(*(client.publish(b"", **target, delay="1s") for _ in range(STUCK)))
    arrived = await receive(client, "orders", STUCK)
    await client.publish(b"last", **target)
    (last,) = await receive(client, "orders", 1)
    assert last.body == b"last", "one came twice"
    assert {one.message_id for one in arrived} == {one.message_id for one in sent}
    for one in arrived:
        assert (one.exchange, one.routing_key, one.raw.routing_key) == ("plain", key, key)
        assert "x-death" not in one.headers
        assert one.lateness is not None
        assert timedelta(0) <= one.lateness < MAX_LATENESS


@pytest.mark.usefixtures("stock_dead_lettering")
async def test_messages_for_bad_targets_do_not_stop_tasks_delayed_by_celery(
    client: bide.Client, connection: Connection, app: Any, vhost_url: str
) -> None:
    """An exchange that matches nothing, an exchange that is deleted, and a full queue that is isolated."""
    await asyncio.to_thread(declare_as_worker, vhost_url, worker_queue(WORK))
    limits: dict[str, str | int] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    await client.declare(
        on_exchange("direct", "plain", "orders", "order.created") | on_exchange("topic", "gone", "q", "#")
    )
    await client.declare(Topology(queues=[Queue.quorum("full", limits)]))
    channel = await connection.channel(confirms=True)
    for _ in range(2):
        await channel.publish(exchange="", routing_key="full", values={}, body=b"")
    bad: list[dict[str, Any]] = [
        {"exchange": "plain", "routing_key": "order.deleted"},
        {"exchange": "gone", "routing_key": "order.created"},
        {"to": "full", "isolated": True},
    ]
    for target in bad:
        await asyncio.gather(*(client.publish(b"bad", **target, delay="1s") for _ in range(STUCK)))
    await channel.delete_exchange("gone")
    sent_at = datetime.now(UTC)
    for number in range(5):
        await asyncio.to_thread(app.tasks[TASK].apply_async, (f"{number}",), queue=WORK, countdown=DELAY)
    for message in await receive(client, WORK, 5):
        assert timedelta(seconds=DELAY) <= message.received_at - sent_at < timedelta(seconds=DELAY) + MAX_LATENESS


async def test_the_number_of_release_queues_is_limited(client: bide.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_state, "MAX_RELEASE_QUEUES", 3)
    await client.declare(on_exchange("topic", "plain", "orders", "#"))
    for number in range(3):
        await client.publish(b"", exchange="plain", routing_key=f"order.{number}", delay="1s")
    with pytest.raises(UnsupportedTargetError, match=r"'plain' with the routing key 'order\.3'.* has declared 3"):
        await client.publish(b"", exchange="plain", routing_key="order.3", delay="1s")
    await client.publish(b"", exchange="plain", routing_key="order.0", delay="1s")
    await client.publish(b"", exchange="plain", routing_key="order.4")
    assert len(await receive(client, "orders", 5)) == 5


async def test_messages_stuck_for_a_bad_target_are_found_and_removed(
    client: bide.Client, connection: Connection, vhost: Vhost
) -> None:
    """Verify names the release queue with the stuck message, and destroy takes it away."""
    layout = Celery()
    await client.declare(on_exchange("direct", "plain", "orders", "order.created"))
    await client.publish(b"", exchange="plain", routing_key="order.deleted", delay="1s")
    name = "bide.release.celery:plain~order/deleted"
    async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:

        async def is_stuck() -> bool:
            return any(name in one.text for one in (await verify(connection, layout, api)).findings)

        await eventually(is_stuck, step=1)
        with pytest.raises(NotEmptyError, match=name):
            await remove(connection, layout, api)
        await remove(connection, layout, api, force=True)
        assert [one.queue.name for one in await api.queues(vhost.name, "")] == ["orders"]


# --- declaring side by side


def on_the_broker(vhost: Vhost) -> Topology:
    """Everything that the virtual host holds."""
    return from_definitions(vhost.broker.management.call("GET", "definitions", vhost.name))


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
@pytest.mark.parametrize("order", ["bide first", "kombu first"])
@pytest.mark.parametrize("prefix", [None, "shop"])
async def test_bide_and_kombu_declare_the_same_topology(
    vhost: Vhost, connection: Connection, queue_type: QueueType, order: str, prefix: str | None
) -> None:
    """The second to declare finds everything as it expects, and adds nothing."""
    ours = Celery(prefix=prefix, queue_type=queue_type).topology()

    async def bide_declares() -> None:
        await apply(connection, ours)

    async def kombu_declares() -> None:
        await asyncio.to_thread(declare_by_kombu, vhost.url, queue_type, prefix)

    for declare in (bide_declares, kombu_declares) if order == "bide first" else (kombu_declares, bide_declares):
        await declare()
        assert not ours.diff(on_the_broker(vhost))


async def test_the_guard_accepts_declarations_of_kombu_and_guards_its_messages(
    vhost: Vhost, connection: Connection, app: Any
) -> None:
    """The guard is a policy: kombu's own declare is not refused, and what matches nothing is set aside."""
    layout = Celery()
    await apply(connection, layout.topology())
    async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:
        await install_guard(connection, api, layout)
    await asyncio.to_thread(declare_by_kombu, vhost.url)
    await asyncio.to_thread(app.tasks[TASK].apply_async, ("unrouted",), queue=WORK, countdown=1)
    async with bide.connect(vhost.url, infrastructure=layout) as client:
        (message,) = await receive(client, layout.undeliverable, 1)
    assert (message.json()[0], message.routing_key) == (["unrouted"], ROUTING_KEY)


async def test_another_queue_type_than_that_of_the_workers_is_refused(client: bide.Client, vhost_url: str) -> None:
    await asyncio.to_thread(declare_as_worker, vhost_url, worker_queue(WORK))
    with pytest.raises(DeclarationMismatchError) as caught:
        await client.declare(Celery(queue_type="classic").topology())
    assert (caught.value.kind, caught.value.name) == ("queue", "celery_delayed_0")
    assert caught.value.argument in {"x-queue-type", "x-dead-letter-strategy"}
