"""Waiting messages between delay infrastructures, on a real broker."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import bide
from bide.admin.infrastructure import install
from bide.delay.cascade_keys import HEADER_DELAY
from bide.delay.nservicebus import format_timestamp, nservicebus_headers
from bide.delay.protocol import DelayInfrastructure, QueueTarget
from bide.errors import InvalidInputError, MigrationRunningError, NotAppliedError
from bide.local_broker import LocalBroker
from bide.migration import Migration
from bide.relay import Relay
from bide.topology import Binding, Exchange, Queue, Topology
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.receiving import connected, eventually, ready, ready_at, receive, until_ready
from tests.support import Vhost

LAYOUTS: dict[str, DelayInfrastructure] = {
    "clock": SMALL_CLOCK,
    "nservicebus": bide.NServiceBus(routing="direct"),
    "nservicebus-v1": bide.NServiceBus(version=1, routing="direct"),
    "celery": bide.Celery(),
    "hall": bide.WaitingHall(levels=4),
}
PLACES = Topology(
    [Exchange("shop", "topic")],
    [Queue.quorum("orders.eu"), Queue.quorum("events")],
    [Binding("shop", "events", "order.*")],
)
HEADERS = {"colour": "grün", "size": 7, "deep": {"list": [1, "two", None]}, "big": 2**40}


@pytest.fixture(autouse=True)
def patient_migrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The management API counts every five seconds, but a busy one may need longer."""
    monkeypatch.setattr("bide.migration.migration._RECOUNT", 60.0)


@dataclass
class Sent:
    """What was sent, and what of it came."""

    due: dict[str, datetime] = field(default_factory=dict)
    came: list[bide.Message] = field(default_factory=list)

    @property
    def ids(self) -> Counter[str]:
        return Counter(one.message_id or "" for one in self.came)

    @property
    def lateness(self) -> list[timedelta]:
        return [one.received_at - self.due[one.message_id or ""] for one in self.came]

    def check(self) -> None:
        """Everything came, never early, and as it was sent."""
        assert set(self.ids) == set(self.due)
        for one in self.came:
            assert one.received_at >= self.due[one.message_id or ""], one.message_id
            assert one.body == f"body of {one.message_id}".encode()
            assert {name: one.headers.get(name) for name in HEADERS} == HEADERS
            assert not one.headers.keys() & {HEADER_DELAY, "CC", "BCC", "x-death"}
            assert (one.exchange, one.routing_key) in {("", "orders.eu"), ("shop", "order.created")}
            assert (one.priority, one.expiration) == (4, timedelta(hours=1))


async def send(url: str, infrastructure: DelayInfrastructure, number: int, delays: tuple[float, float]) -> Sent:
    """Send messages with delays between two bounds, half to a queue and half to an exchange."""
    sent = Sent()
    lowest, highest = delays
    async with bide.connect(url, infrastructure=infrastructure) as client:
        await client.declare(PLACES)

        async def one(place: int) -> None:
            delay = timedelta(seconds=lowest + (highest - lowest) * place / number)
            target: dict[str, Any] = (
                {"to": "orders.eu"} if place % 2 else {"exchange": "shop", "routing_key": "order.created"}
            )
            receipt = await client.publish(
                f"body of m{place}",
                **target,
                delay=delay,
                message_id=f"m{place}",
                headers=HEADERS,
                priority=4,
                expiration="1h",
            )
            assert receipt.due is not None
            sent.due[receipt.message_id] = receipt.due

        await asyncio.gather(*(one(place) for place in range(number)))
    return sent


@asynccontextmanager
async def receiving(url: str, sent: Sent) -> AsyncIterator[None]:
    """Receive from both targets; at the end wait until every message has come."""
    async with bide.connect(url) as client:

        async def receive(queue: str) -> None:
            async for message in client.consume(queue):
                sent.came.append(message)
                await message.ack()

        tasks = [asyncio.create_task(receive(queue)) for queue in ("orders.eu", "events")]
        yield
        try:

            async def complete() -> bool:
                return set(sent.ids) == set(sent.due)

            await eventually(complete)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def relaying(url: str, *infrastructures: DelayInfrastructure) -> AsyncIterator[None]:
    """Run a relay for each waiting hall."""
    relays = [Relay(url, hall=one, allow=["*"]) for one in infrastructures if isinstance(one, bide.WaitingHall)]
    tasks = [asyncio.create_task(one.run()) for one in relays]
    yield
    for one in relays:
        one.stop()
    await asyncio.gather(*tasks)


def make(vhost: Vhost, source: DelayInfrastructure, target: DelayInfrastructure, **options: Any) -> Migration:
    return Migration(
        vhost.url,
        source,
        target,
        allow=options.pop("allow", ["*"]),
        management_url=vhost.broker.management_url,
        **options,
    )


async def migrated(vhost: Vhost, source: str, target: str) -> None:
    """Move 200 messages while they cross levels."""
    before, after = LAYOUTS[source], LAYOUTS[target]
    # A machine that declares them for seconds would deliver messages before the migration takes them.
    await put(vhost, before, after)
    async with relaying(vhost.url, before, after):
        sent = await send(vhost.url, before, 200, (6, 13))
        async with receiving(vhost.url, sent):
            done = await make(vhost, before, after).run()
            assert done.is_finished
            assert (done.left, dict(done.set_aside), done.redelivered) == ({}, {}, 0)
            # Those that were due before the migration took them came from the old infrastructure.
            assert done.taken.total() == done.moved
            assert done.moved > 100
    sent.check()
    assert set(sent.ids.values()) == {1}
    # A due time does not fit the level of a message that a busy broker keeps there for more than 2 s too long.
    assert done.uncertain == 0 or max(sent.lateness) > timedelta(seconds=2)


@pytest.mark.parametrize(
    "steps",
    [pytest.param((1, 2), id="to the next two"), pytest.param((3, 4), id="to the others", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("source", LAYOUTS)
async def test_messages_keep_their_due_times_between_every_pair_of_layouts(
    source: str, steps: tuple[int, ...], broker: LocalBroker
) -> None:
    """Nothing is lost, early, repeated or changed; short runs have each layout as source and target twice."""
    names = [*LAYOUTS]
    pairs = [(source, names[(names.index(source) + step) % len(names)]) for step in steps]
    vhosts = []
    for one, other in pairs:
        name = f"from-{one}-to-{other}"
        vhosts.append(Vhost(name=name, url=broker.add_vhost(name), broker=broker))
    try:
        await asyncio.gather(*(migrated(vhost, *pair) for vhost, pair in zip(vhosts, pairs, strict=True)))
    finally:
        for vhost in vhosts:
            broker.delete_vhost(vhost.name)


async def publish_raw(
    vhost: Vhost, exchange: str, key: str, headers: Mapping[str, Any], *, body: bytes = b"x", message_id: str = "raw"
) -> None:
    values = {"message_id": message_id, "headers": dict(headers), "delivery_mode": 2}
    async with connected(vhost.url) as connection, await connection.channel(confirms=True) as channel:
        await channel.publish(exchange=exchange, routing_key=key, values=values, body=body)


async def received(vhost: Vhost, queue: str, number: int) -> list[bide.Message]:
    async with bide.connect(vhost.url) as client:
        return await receive(client, queue, number)


async def put(vhost: Vhost, *infrastructures: DelayInfrastructure, queues: Iterable[str] = ()) -> None:
    """Declare infrastructures and queues."""
    async with connected(vhost.url) as connection:
        for one in infrastructures:
            await install(connection, one)
    async with bide.connect(vhost.url) as client:
        await client.declare(Topology(queues=[Queue.quorum(one) for one in queues]))


async def test_a_retry_of_nservicebus_waits_for_its_own_delay(vhost: Vhost) -> None:
    """The .NET tool counts from TimeSent, which a retry copies, and would deliver it at once."""
    v1 = bide.NServiceBus(version=1, routing="direct")
    await put(vhost, v1, SMALL_CLOCK, queues=["Sales"])
    now = datetime.now(UTC)
    long_ago = now - timedelta(hours=1)
    headers = {
        **nservicebus_headers("raw", long_ago, deliver_at=long_ago + timedelta(seconds=5)),
        "NServiceBus.Retries": "1",
        "NServiceBus.Retries.Timestamp": format_timestamp(now),
        HEADER_DELAY: 9,
    }
    route = v1.route(timedelta(seconds=9), QueueTarget("Sales"))
    await publish_raw(vhost, route.exchange, route.routing_key, headers)
    done = await make(vhost, v1, SMALL_CLOCK).run()
    assert (done.moved, done.uncertain, done.longest_uncertainty) == (1, 1, timedelta(seconds=1))
    (message,) = await received(vhost, "Sales", 1)
    assert message.due is not None
    assert now + timedelta(seconds=9) <= message.due <= message.received_at
    assert message.due <= now + timedelta(seconds=10)
    assert message.headers["NServiceBus.TimeSent"] == headers["NServiceBus.TimeSent"]


async def test_a_message_without_a_due_time_is_late_by_its_level_at_most(vhost: Vhost) -> None:
    celery = bide.Celery()
    await put(vhost, celery, SMALL_CLOCK, queues=["mails"])
    delay = timedelta(seconds=16)
    route = celery.route(delay, QueueTarget("mails"))
    await publish_raw(vhost, route.exchange, route.routing_key, {})
    before = datetime.now(UTC)
    done = await make(vhost, celery, SMALL_CLOCK).run()
    after = datetime.now(UTC)
    # The message can have been sent when it was taken, and up to 16 s before.
    assert (done.moved, done.uncertain, done.longest_uncertainty) == (1, 1, delay)
    (message,) = await received(vhost, "mails", 1)
    assert message.due is not None
    assert before + delay <= message.due <= after + delay
    assert message.due <= message.received_at


async def test_a_task_of_celery_goes_to_the_exchange_that_a_worker_bound(vhost: Vhost) -> None:
    """With its own routing key, and as before through the delivery exchange if more than one is bound."""
    celery = bide.Celery()
    await put(vhost, celery, queues=["tasks"])
    bound = Topology(
        [Exchange("tasks", "topic"), Exchange("other", "topic")],
        bindings=[
            Binding(celery.delivery_exchange, "tasks", "#.mail.send", "exchange"),
            Binding(celery.delivery_exchange, "tasks", "#.both", "exchange"),
            Binding(celery.delivery_exchange, "other", "#.both", "exchange"),
            Binding("tasks", "tasks", "#.mail.send"),
            Binding("tasks", "tasks", "#.both"),
        ],
    )
    async with bide.connect(vhost.url) as client:
        await client.declare(bound, external={celery.delivery_exchange, "tasks"})
    for key in ("mail.send", "both"):
        await publish_raw(vhost, "celery_delayed_27", celery.cascade.key(3700, key), {}, message_id=key)
    due = datetime.now(UTC) + timedelta(seconds=2)
    eta = {"eta": due.isoformat(), "task": "send"}
    await publish_raw(vhost, "celery_delayed_27", celery.cascade.key(32, "mail.send"), eta, message_id="eta")
    done = await make(vhost, celery, bide.Clock(prefix="new")).run()
    assert (done.moved, done.left) == (3, {})
    (message,) = await received(vhost, "tasks", 1)
    assert (message.message_id, message.routing_key) == ("eta", "mail.send")
    assert message.received_at >= due
    async with connected(vhost.url) as connection, await connection.channel() as channel:
        await channel.qos(10)
        found: dict[str, str] = {}
        hour = Queue("new.v1.h1", arguments={})
        assert await ready(connection, hour.name) == 2
        for _ in range(2):
            delivery = await channel.get(hour.name)
            assert delivery is not None
            headers = delivery.values["headers"]
            found[delivery.values["message_id"]] = f"{headers['bide-to']} {delivery.routing_key}"
    assert found == {"mail.send": "x:tasks mail.send", "both": "x:celery_delayed_delivery " + "0." * 28 + "both"}


async def test_overdue_messages_go_at_once(vhost: Vhost) -> None:
    """No relay was running, so they still wait in the hall."""
    hall = bide.WaitingHall()
    sent = await send(vhost.url, hall, 20, (0.1, 0.2))
    await asyncio.sleep(0.5)  # longer than all delays
    async with receiving(vhost.url, sent):
        done = await make(vhost, hall, SMALL_CLOCK).run()
    assert (done.moved, done.overdue, done.uncertain) == (20, 20, 0)
    sent.check()


async def test_messages_that_cannot_be_sent_on_are_set_aside_and_taken_again(vhost: Vhost) -> None:
    source = bide.NServiceBus(routing="direct")
    await put(vhost, source, queues=["Sales"])
    due = datetime.now(UTC) + timedelta(seconds=6)
    stamp = {"NServiceBus.DeliverAt": format_timestamp(due)}
    # They wait there for a minute, so that all of them are there when the migration begins.
    key, level = source.cascade.key, source.cascade.level_names[6]
    for name, routing_key, headers in (
        ("good", key(64, "Sales"), stamp),
        ("unreadable", key(64, "Sales"), {"bide-due": "soon"}),
        ("no-target", key(64, "Missing"), stamp),
        ("not-allowed", key(64, "Secret"), stamp),
        ("no-digits", "1.Sales", {}),
        ("carries-cc", key(64, "Sales"), {**stamp, "CC": ["nowhere"]}),
    ):
        exchange, place = ("", level) if name == "no-digits" else (level, routing_key)
        await publish_raw(vhost, exchange, place, headers, message_id=name)
    migration = make(vhost, source, SMALL_CLOCK, allow=["Sales", "Missing"])
    done = await migration.run()
    assert (done.moved, done.set_aside.total(), done.taken.total(), done.left) == (1, 5, 6, {})
    reasons = " | ".join(done.set_aside)
    for text in ("'soon': it must be", "'Missing'", "'q:Secret' matches no allowed", "digits of a delay", "header CC"):
        assert text in reasons
    assert await ready_at(vhost.url, migration.set_aside) == 5
    async with connected(vhost.url) as connection, await connection.channel() as channel:
        first = await channel.get(migration.set_aside)
        assert first is not None
        assert first.values["headers"]["bide-set-aside"] in done.set_aside
    # The queue gives back what was not acknowledged a moment later.
    await until_ready(vhost.url, migration.set_aside, 5)
    # The cause is gone: the next run sends them.
    await put(vhost, queues=["Missing", "Secret"])
    again = await make(vhost, source, SMALL_CLOCK).run()
    assert (again.moved, again.set_aside.total(), dict(again.taken)) == (2, 3, {migration.set_aside: 5})
    for queue, name in (("Sales", "good"), ("Missing", "no-target"), ("Secret", "not-allowed")):
        (message,) = await received(vhost, queue, 1)
        assert message.message_id == name
        assert message.received_at >= due.replace(microsecond=0)


async def test_messages_without_an_id_are_moved_or_set_aside(vhost: Vhost) -> None:
    """NServiceBus sends no message without one."""
    source = bide.NServiceBus(version=1, routing="direct")
    target = bide.NServiceBus(routing="direct")
    await put(vhost, source, queues=["Sales"])
    key, level = source.cascade.key, source.cascade.level_names[12]
    async with connected(vhost.url) as connection, await connection.channel(confirms=True) as channel:
        for name in ("Sales", "Missing"):
            for values in ({}, {"message_id": ""}):
                await channel.publish(
                    exchange=level, routing_key=key(5000, name), values={**values}, body=name.encode()
                )
    migration = make(vhost, source, target)
    done = await migration.run()
    assert (done.moved, done.set_aside.total(), done.left) == (2, 2, {})
    async with connected(vhost.url) as connection, await connection.channel() as channel:
        aside = await channel.get(migration.set_aside)
        assert aside is not None
        # It waits as it was sent, until it is moved.
        assert not [name for name in aside.values["headers"] if name.startswith("NServiceBus.")]
    await until_ready(vhost.url, migration.set_aside, 2)
    await put(vhost, queues=["Missing"])
    assert (await make(vhost, source, target).run()).moved == 2
    back = await make(vhost, target, source).run()
    assert (back.moved, back.set_aside.total()) == (4, 0)


async def test_a_message_is_set_aside_without_a_reason_if_its_headers_leave_no_room_for_one(vhost: Vhost) -> None:
    """The next run takes it again."""
    source = bide.NServiceBus(version=1, routing="direct")
    await put(vhost, source)
    key, level = source.cascade.key, source.cascade.level_names[12]
    await publish_raw(vhost, level, key(5000, "Missing"), {"h": "x" * 130_940})
    migration = make(vhost, source, bide.Celery())
    done = await migration.run()
    assert (done.moved, done.set_aside.total(), done.left) == (0, 1, {})
    async with connected(vhost.url) as connection, await connection.channel() as channel:
        aside = await channel.get(migration.set_aside)
        assert aside is not None
        assert "bide-set-aside" not in aside.values["headers"]
    await until_ready(vhost.url, migration.set_aside, 1)
    done = await make(vhost, source, bide.Celery()).run()
    assert done.taken == {migration.set_aside: 1}


async def test_a_message_that_cannot_be_set_aside_stays_where_it_is(
    vhost: Vhost, caplog: pytest.LogCaptureFixture
) -> None:
    """Its headers leave no room in the frame for its queue and its time."""
    source, target = bide.NServiceBus(version=1, routing="direct"), bide.Celery()
    await put(vhost, source, queues=["Sales"])
    key, level = source.cascade.key, source.cascade.level_names[12]
    await publish_raw(vhost, level, key(5000, "Missing"), {"h": "x" * 130_990})
    await publish_raw(vhost, level, key(5000, "Sales"), {})
    for moved in (1, 0):
        done = await make(vhost, source, target).run()
        assert (done.moved, done.set_aside.total(), done.left, done.is_finished) == (moved, 0, {level: 1}, True)
        assert f"a message of {level} stays there: " in caplog.text
        caplog.clear()


async def test_a_message_for_a_delay_queue_is_set_aside_although_all_targets_are_allowed(vhost: Vhost) -> None:
    source = bide.NServiceBus(routing="direct")
    await put(vhost, source)
    key, (level,) = source.cascade.key, [one.name for one in source.waiting_queues()][-1:]
    await publish_raw(vhost, source.cascade.level_names[6], key(64, level), {}, message_id="m")
    done = await make(vhost, source, SMALL_CLOCK).run()
    assert (done.moved, done.set_aside.total()) == (0, 1)
    assert f"{level!r} belongs to a delay infrastructure" in "".join(done.set_aside)


async def test_two_migrations_of_one_layout_are_refused(vhost: Vhost) -> None:
    """The lock ends with the connection."""
    await put(vhost, LAYOUTS["nservicebus"], SMALL_CLOCK)
    async with connected(vhost.url) as connection, await connection.channel() as channel:
        await channel.declare_queue(Queue("bide.migration.nsb.v2.delay-delivery", durable=False, exclusive=True))
        with pytest.raises(MigrationRunningError, match="runs on this virtual host already"):
            await make(vhost, LAYOUTS["nservicebus"], SMALL_CLOCK).run()
        # Another layout has another lock.
        assert (await make(vhost, SMALL_CLOCK, LAYOUTS["nservicebus"]).run()).is_finished

    async def is_unlocked() -> bool:
        # RabbitMQ deletes the queue of a closed connection a moment later.
        try:
            return (await make(vhost, LAYOUTS["nservicebus"], SMALL_CLOCK).run()).is_finished
        except MigrationRunningError:
            return False

    await eventually(is_unlocked)


async def test_a_target_with_the_names_of_the_source_is_refused(vhost: Vhost) -> None:
    await put(vhost, bide.Clock(lanes=2, max_delay=timedelta(seconds=1)))
    with pytest.raises(InvalidInputError, match="share names"):
        make(vhost, bide.Clock(), bide.Clock(lanes=4))
    with pytest.raises(InvalidInputError, match="both URLs lead to"):
        await make(vhost, bide.Clock(), bide.Clock(), to_url=vhost.url).run()


async def test_a_layout_that_is_not_there_is_an_error(vhost: Vhost) -> None:
    migration = make(vhost, bide.Clock(prefix="typo"), bide.Celery())
    for call in (migration.count, migration.run):
        with pytest.raises(NotAppliedError, match="no queue of the layout 'clock'"):
            await call()


async def test_counting_changes_nothing(vhost: Vhost) -> None:
    clock = bide.Clock(max_delay=timedelta(hours=1), resolution=timedelta(seconds=1))
    sent = await send(vhost.url, clock, 30, (600, 700))
    migration = make(vhost, clock, bide.Celery())
    first = await migration.count()
    assert sum(one.messages for one in first) == len(sent.due)
    waits = [one.wait for one in first]
    assert waits == sorted(waits, reverse=True)
    assert first == await migration.count()
    async with connected(vhost.url) as connection, await connection.channel() as channel:
        queue = next(one.queue for one in first if one.messages)
        delivery = await channel.get(queue)
        assert delivery is not None
        assert not delivery.redelivered


async def test_messages_that_senders_add_during_the_run_are_moved_too(vhost: Vhost) -> None:
    source, target = bide.NServiceBus(routing="direct"), bide.Clock(prefix="new")
    sent = await send(vhost.url, source, 50, (600, 700))
    migration = make(vhost, source, target)
    running = asyncio.create_task(migration.run())
    for _ in range(3):
        await send(vhost.url, source, 50, (600, 700))
    done = await running
    rest = await make(vhost, source, target).run()
    assert done.moved + rest.moved == 4 * len(sent.due)
    assert (rest.left, rest.set_aside.total()) == ({}, 0)


async def test_stop_finishes_what_was_taken_and_leaves_the_rest(vhost: Vhost) -> None:
    source, target = bide.NServiceBus(routing="direct"), bide.Clock(prefix="new")
    sent = await send(vhost.url, source, 400, (600, 700))
    migrations: list[Migration] = []
    migration = make(vhost, source, target, progress=lambda done, _: migrations[0].stop() if done == 10 else None)
    migrations.append(migration)
    done = await migration.run()
    assert not done.is_finished
    assert 10 <= done.moved < 400
    assert done.taken.total() == done.moved
    rest = await make(vhost, source, target).run()
    # Nothing that was moved was put back. What a queue delivers after its answer to the cancellation is.
    assert (done.moved + rest.moved, rest.is_finished) == (len(sent.due), True)
