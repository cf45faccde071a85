"""Taps: the content of their streams, and unchanged routing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import pytest

import bide
from bide.admin.apply import message_counts
from bide.admin.infrastructure import install, install_guard, remove
from bide.admin.locate import management_api
from bide.admin.report import listed
from bide.admin.taps import read_status, turn_off, turn_on
from bide.admin.verify import verify
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.delay.taps import Retention, taps_of
from bide.errors import DeclarationMismatchError, NotAppliedError, NotEmptyError, QueueBusyError
from bide.management.api import ManagementApi
from bide.topology import Binding, Exchange, Queue, Topology
from tests.broker import celery_app
from tests.broker.conftest import LONG_CLOCK, SMALL_CLOCK
from tests.broker.receiving import eventually, ready, receive
from tests.cascade_keys import split_key
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from bide.client.message import Message
    from bide.delay.protocol import DelayInfrastructure
    from tests.support import Vhost

NSB = bide.NServiceBus(routing="direct")
NSB1 = bide.NServiceBus(version=1, routing="direct")
CASCADES: list[bide.NServiceBus | bide.Celery] = [
    NSB,
    NSB1,
    bide.Celery(),
    bide.Celery(prefix="shop", queue_type="classic"),
]
QUEUES = Topology(queues=[Queue.quorum("orders")])
CONTENT = {"mine": "1"}


@pytest.fixture
def connection(vhost_connection: Connection) -> Connection:
    return vhost_connection


async def read(client: bide.Client, stream: str, number: int) -> list[Message]:
    """The first ``number`` messages of a stream; later ones are not read."""
    await client.publish(b"the end", to=stream, message_id="end")
    found: list[Message] = []
    ended = False
    with suppress(TimeoutError):
        async with (
            asyncio.timeout(TIMEOUT),
            client.consume(stream, arguments={"x-stream-offset": "first"}) as messages,
        ):
            async for message in messages:
                await message.ack()
                if message.message_id == "end":
                    ended = True
                else:
                    found.append(message)
                if ended and len(found) >= number:
                    break
    assert ended
    assert len(found) == number, Counter(one.message_id for one in found)
    return found


def raw(message: Message) -> Mapping[str, Any]:
    """The headers as they are in the stream."""
    headers: Mapping[str, Any] = message.raw.values["headers"]
    return headers


def milliseconds(moment: datetime | None) -> int:
    assert moment is not None
    return -(-(moment - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1))


async def states(connection: Connection, infrastructure: DelayInfrastructure, api: ManagementApi | None) -> str:
    return (await read_status(connection, infrastructure, api)).state


# -- Clock


async def test_a_tapped_clock_copies_every_message_to_both_streams(vhost: Vhost, connection: Connection) -> None:
    await asyncio.gather(one_clock(vhost, connection, "CC"), one_clock(vhost, connection, "BCC"))


async def one_clock(vhost: Vhost, connection: Connection, carrier: Literal["CC", "BCC"]) -> None:
    clock = replace(SMALL_CLOCK, prefix=carrier, carrier=carrier)
    orders, bills, others = (f"{carrier}-{name}" for name in ("orders", "bills", "others"))
    await install(connection, clock)
    assert (await turn_on(connection, clock)).bindings == 7
    queues = [Queue.quorum(name) for name in (orders, bills, others)]
    shop = Topology([Exchange(f"{carrier}-shop", "topic")], queues, [Binding(f"{carrier}-shop", bills, "order.*")])
    async with bide.connect(vhost.url, infrastructure=clock) as client:
        await client.declare(shop)
        receipts = {
            one.message_id: one
            for one in [
                await client.publish(b"1", to=orders, delay="1.1s", headers=CONTENT),
                await client.publish(b"2", to=orders, delay="50ms", headers=CONTENT),
                await client.publish(b"3", to=others, isolated=True, delay="1s", headers=CONTENT),
                await client.publish(
                    b"4", exchange=f"{carrier}-shop", routing_key="order.new", delay="1.5s", headers=CONTENT
                ),
            ]
        }
        await client.publish(b"at once", to=orders)
        assert len(await receive(client, orders, 3)) == 3
        (billed,), (other,) = await receive(client, bills, 1), await receive(client, others, 1)
        assert (billed.body, billed.routing_key, billed.exchange) == (b"4", "order.new", f"{carrier}-shop")
        assert (other.body, other.routing_key, other.exchange) == (b"3", others, "")
        taps = taps_of(clock)
        for stream in taps.names:
            seen = await read(client, stream, 4)
            assert {one.message_id for one in seen} == set(receipts)
            for message in seen:
                receipt = receipts[message.message_id or ""]
                # Scalars, which streams keep on every release.
                assert raw(message)["bide-to"] == {b"3": f"q:{others}", b"4": f"x:{carrier}-shop"}.get(
                    message.body, f"q:{orders}"
                )
                assert raw(message)["bide-due"] == milliseconds(receipt.due)
                assert raw(message)["mine"] == "1"
                assert message.routing_key == {b"3": others, b"4": "order.new"}.get(message.body, orders)
        for queue in (orders, bills, others, clock.undeliverable):
            assert await ready(connection, queue) == 0


async def test_taps_see_digits_that_are_first_used_later(
    vhost: Vhost, connection: Connection, api: ManagementApi
) -> None:
    """On a ``Clock`` that grew with use, where no digit of these messages had a queue when the taps were turned on."""
    clock = bide.Clock()
    async with bide.connect(vhost.url) as client:
        await client.declare(QUEUES)
        await client.publish(b"", to="orders", delay="10ms")
        await receive(client, "orders", 1)
        await turn_on(connection, clock)
        assert await states(connection, clock, api) == "on"
        sent = {(await client.publish(b"", to="orders", delay=delay)).message_id for delay in ("20ms", "1s", "1.3s")}
        await receive(client, "orders", 3)
        for stream in taps_of(clock).names:
            assert {one.message_id for one in await read(client, stream, 3)} == sent
    assert await states(connection, clock, api) == "on"


async def test_a_tapped_clock_still_sets_messages_without_a_target_aside(vhost: Vhost, connection: Connection) -> None:
    await install(connection, SMALL_CLOCK)
    await turn_on(connection, SMALL_CLOCK)
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.declare(QUEUES)
        await client.bind("orders")
        # The client knows the target from now on, so it sends the message although the queue is gone.
        await (await connection.channel()).delete_queue("orders")
        sent = await client.publish(b"unrouted", to="orders", delay="1s")
        (aside,) = await receive(client, SMALL_CLOCK.undeliverable, 1)
        assert aside.message_id == sent.message_id
        for stream in taps_of(SMALL_CLOCK).names:
            (seen,) = await read(client, stream, 1)
            assert (seen.message_id, raw(seen)["bide-to"]) == (sent.message_id, "q:orders")


# -- cascades


async def test_tapped_cascades_copy_every_message_to_both_streams(vhost: Vhost, connection: Connection) -> None:
    """All at once, because each takes its seconds."""
    await asyncio.gather(
        *(one_cascade(vhost, connection, one, f"orders-{number}") for number, one in enumerate(CASCADES))
    )


async def one_cascade(
    vhost: Vhost, connection: Connection, infrastructure: bide.NServiceBus | bide.Celery, queue: str
) -> None:
    await install(connection, infrastructure)
    assert (await turn_on(connection, infrastructure)).bindings == 30
    async with bide.connect(vhost.url, infrastructure=infrastructure) as client:
        await client.declare(Topology(queues=[Queue.quorum(queue)]))
        sent = {}
        for seconds in (1, 2, 3):
            receipt = await client.publish(b"ours", to=queue, delay=timedelta(seconds=seconds), headers=CONTENT)
            sent[receipt.message_id] = (seconds, milliseconds(receipt.due))
        # As Celery itself does: in at the highest level, whatever the delay.
        route = infrastructure.route(timedelta(seconds=1), bide.QueueTarget(queue))
        await client.publish(
            b"theirs",
            exchange=infrastructure.cascade.level_names[27],
            routing_key=route.routing_key,
            message_id="theirs",
        )
        received = await receive(client, queue, 4)
        assert {one.message_id for one in received} == {"theirs", *sent}
        for stream in taps_of(infrastructure).names:
            seen = {str(one.message_id): one for one in await read(client, stream, 4)}
            assert set(seen) == {"theirs", *sent}
            assert split_key(seen.pop("theirs").raw.routing_key)[0] == 1
            for name, message in seen.items():
                seconds, due = sent[name]
                assert split_key(message.raw.routing_key)[0] == seconds
                assert raw(message)["mine"] == "1"
                assert (raw(message)["bide-to"], raw(message)["bide-due"]) == (f"q:{queue}", due)
    assert await ready(connection, queue) == 0


async def test_a_task_delayed_by_celery_is_copied_to_both_streams(vhost: Vhost, connection: Connection) -> None:
    """Neither the sender nor its worker is changed."""
    celery = bide.Celery()
    await install(connection, celery)
    await turn_on(connection, celery)
    app = celery_app.create(vhost.url)
    async with bide.connect(vhost.url, infrastructure=celery) as client:
        # What a worker declares.
        await client.declare(
            Topology(
                [Exchange(celery_app.EXCHANGE, "topic"), Exchange(celery.delivery_exchange, "topic")],
                [Queue.quorum(celery_app.WORK)],
                [
                    Binding(celery.delivery_exchange, celery_app.EXCHANGE, f"#.{celery_app.ROUTING_KEY}", "exchange"),
                    Binding(celery_app.EXCHANGE, celery_app.WORK, f"#.{celery_app.ROUTING_KEY}"),
                    Binding(celery_app.EXCHANGE, celery_app.WORK, celery_app.ROUTING_KEY),
                ],
            )
        )
        send = app.tasks[celery_app.TASK].apply_async
        result = await asyncio.to_thread(send, ("delayed",), queue=celery_app.WORK, countdown=2)
        (task,) = await receive(client, celery_app.WORK, 1)
        assert task.json()[0] == ["delayed"]
        for stream in taps_of(celery).names:
            (seen,) = await read(client, stream, 1)
            assert (seen.correlation_id, seen.body) == (result.id, task.body)
            assert split_key(seen.raw.routing_key) == (2, celery_app.ROUTING_KEY)
    await asyncio.to_thread(app.close)


@pytest.mark.parametrize("tapped", [False, True])
async def test_a_tapped_cascade_keeps_messages_without_a_target_only_in_the_tap(
    tapped: bool, vhost: Vhost, connection: Connection, api: ManagementApi
) -> None:
    """A message for a deleted endpoint: the guard sets it aside, or the tap alone has it. ``verify`` says so."""
    await install(connection, NSB)
    await install_guard(connection, api, NSB)
    if tapped:
        await turn_on(connection, NSB)
    async with bide.connect(vhost.url, infrastructure=NSB) as client:
        await client.declare(QUEUES)
        await client.bind("orders")
        # The client knows the target from now on, so it sends the message although the queue is gone.
        await (await connection.channel()).delete_queue("orders")
        await client.publish(b"unrouted", to="orders", delay="1s", message_id="lost")
        (one,) = (
            await read(client, "bide.tap.nsb.v2.delivered", 1)
            if tapped
            else await receive(client, NSB.undeliverable, 1)
        )
        assert one.message_id == "lost"
    assert await ready(connection, NSB.undeliverable) == 0
    texts = {one.check: one.text for one in (await verify(connection, NSB, api)).findings}
    assert ("only in 'bide.tap.nsb.v2.delivered'" in texts.get("taps", "")) is tapped
    assert ("but not while a tap is bound to nsb.v2.delay-delivery" in texts["guard"]) is tapped
    assert texts["targets"].startswith("0 bound queues")


# -- on, off, status


async def test_taps_can_be_switched_while_messages_flow(
    vhost: Vhost, connection: Connection, api: ManagementApi
) -> None:
    scheduled, delivered = taps_of(SMALL_CLOCK).names
    await install(connection, SMALL_CLOCK)
    assert await states(connection, SMALL_CLOCK, api) == "off"
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.declare(QUEUES)
        for delay in ("8s", "14s", "19s"):
            before = await client.publish(b"", to="orders", delay=delay, message_id="before")
            first = await turn_on(connection, SMALL_CLOCK)
            assert (first.created, first.kept) == ((scheduled, delivered), ())
            assert before.due is not None
            if client.now() < before.due:
                break
            # On a busy machine, it was perhaps delivered before the taps were on.
            await receive(client, "orders", 1)
            await turn_off(connection, SMALL_CLOCK, delete=True)
        else:
            pytest.fail("the machine was too slow each time")
        await client.publish(b"", to="orders", delay="1s", message_id="during")
        assert {one.message_id for one in await receive(client, "orders", 2)} == {"before", "during"}
        assert await states(connection, SMALL_CLOCK, api) == "on"

        off = await turn_off(connection, SMALL_CLOCK)
        assert (off.kept, off.deleted) == ((scheduled, delivered), ())
        assert await states(connection, SMALL_CLOCK, api) == "off"
        await client.publish(b"", to="orders", delay="50ms", message_id="after")
        await receive(client, "orders", 1)

        again = await turn_on(connection, SMALL_CLOCK)
        assert (again.created, again.kept) == ((), (scheduled, delivered))
        await client.publish(b"", to="orders", delay="50ms", message_id="again")
        await receive(client, "orders", 1)
        assert {one.message_id for one in await read(client, scheduled, 2)} == {"during", "again"}
        assert {one.message_id for one in await read(client, delivered, 3)} == {"before", "during", "again"}


@pytest.mark.parametrize("infrastructure", [SMALL_CLOCK, NSB1], ids=repr)
async def test_the_status_shows_bindings_limits_and_counts(
    infrastructure: DelayInfrastructure, vhost: Vhost, connection: Connection, api: ManagementApi
) -> None:
    taps = taps_of(infrastructure)
    await install(connection, infrastructure)
    assert await states(connection, infrastructure, None) == "off"
    await turn_on(connection, infrastructure, retention=Retention(max_age=timedelta(hours=12), max_bytes=10**7))
    async with bide.connect(vhost.url) as client:
        await client.publish(b"", to=taps.scheduled)

        async def counted() -> bool:
            return (await read_status(connection, infrastructure, api)).streams["scheduled"].messages == 1

        if infrastructure is SMALL_CLOCK:
            # After up to five seconds.
            await eventually(counted)
    found = await read_status(connection, infrastructure, api)
    assert (found.state, found.why, found.layout, found.vhost) == ("on", "", infrastructure.name, vhost.name)
    assert found.port == BrokerUrl.parse(str(vhost.broker.stream_url).replace("rabbitmq-stream", "amqp")).hosts[0][1]
    for which, name, wanted in zip(
        ("scheduled", "delivered"),
        taps.names,
        (len(taps.to_scheduled), len(taps.to_delivered) + len(taps.passage.bindings)),
        strict=True,
    ):
        stream = found.streams[which]
        assert (stream.name, stream.exists, stream.bindings, stream.wanted) == (name, True, wanted, wanted)
        assert stream.arguments["x-max-age"] == "12h"
        assert stream.arguments["x-max-length-bytes"] == 10**7

    channel = await connection.channel()
    for binding in (taps.to_scheduled[3], taps.to_delivered[0]):
        await channel.unbind(binding)
        found = await read_status(connection, infrastructure, api)
        assert found.state == "incomplete"
    (problem,) = [one for one in (await verify(connection, infrastructure, api)).problems if one.check == "taps"]
    assert f"2 of the {len(taps.bindings)} bindings of the taps are missing" in problem.text
    await turn_on(connection, infrastructure)
    assert await states(connection, infrastructure, api) == "on"
    assert {one.status for one in (await verify(connection, infrastructure, api)).findings if one.check == "taps"} == {
        "ok"
    }

    unreachable = management_api(connection.url, "http://127.0.0.1:1")
    unknown = await read_status(connection, infrastructure, unreachable)
    assert (unknown.state, unknown.port) == ("unknown", None)
    assert "127.0.0.1:1" in unknown.why
    assert {one.bindings for one in unknown.streams.values()} == {None}
    (finding,) = [
        one for one in (await verify(connection, infrastructure, unreachable)).findings if one.check == "taps"
    ]
    assert (finding.status, finding.text.partition(";")[0]) == ("not checked", f"{listed(taps.names)} exist")


async def test_turning_taps_off_with_delete_removes_everything(connection: Connection, api: ManagementApi) -> None:
    await install(connection, NSB1)
    await turn_on(connection, NSB1)
    assert len(await api.queues(connection.url.vhost, "bide.tap.")) == 3
    await turn_off(connection, NSB1)
    assert await states(connection, NSB1, api) == "off"
    await turn_off(connection, NSB1, delete=True)
    assert await api.queues(connection.url.vhost, "bide.tap.") == []
    assert await api.exchanges(connection.url.vhost, "bide.tap.") == []


async def test_streams_with_other_limits_are_a_mismatch(connection: Connection, api: ManagementApi) -> None:
    await install(connection, SMALL_CLOCK)
    await turn_on(connection, SMALL_CLOCK, retention=Retention(max_age=timedelta(days=30)))
    await turn_on(connection, SMALL_CLOCK)
    with pytest.raises(
        DeclarationMismatchError, match=r"bide\.v1\.tap\.scheduled' exists .*turn_off\(delete=True\)"
    ) as caught:
        await turn_on(connection, SMALL_CLOCK, retention=Retention())
    assert caught.value.argument == "x-max-age"
    off = await turn_off(connection, SMALL_CLOCK, delete=True)
    assert (off.kept, off.deleted) == ((), taps_of(SMALL_CLOCK).names)
    assert await api.queues(connection.url.vhost, ".tap.") == []
    await turn_on(connection, SMALL_CLOCK, retention=Retention())
    found = await read_status(connection, SMALL_CLOCK, api)
    assert {one.arguments["x-max-age"] for one in found.streams.values()} == {"7D"}


@pytest.mark.parametrize("infrastructure", [SMALL_CLOCK, bide.Celery()], ids=repr)
async def test_turning_taps_on_without_the_infrastructure_is_refused(
    infrastructure: DelayInfrastructure, connection: Connection, api: ManagementApi
) -> None:
    with pytest.raises(
        NotAppliedError,
        match=rf"the {infrastructure.name} infrastructure is not on .* call bide\.admin\.infrastructure",
    ):
        await turn_on(connection, infrastructure)
    assert await api.queues(connection.url.vhost, "tap") == []
    assert (await turn_off(connection, infrastructure, delete=True)).deleted == ()


# -- the infrastructure taken away


@pytest.mark.parametrize(("infrastructure", "with_api"), [(LONG_CLOCK, True), (NSB, False)], ids=str)
async def test_the_streams_survive_removal_of_the_infrastructure(
    infrastructure: DelayInfrastructure, with_api: bool, vhost: Vhost, connection: Connection, api: ManagementApi
) -> None:
    taps = taps_of(infrastructure)
    await install(connection, infrastructure)
    async with bide.connect(vhost.url, infrastructure=infrastructure) as client:
        await client.declare(QUEUES)
        # Before the taps are on. It makes the first removal fail, and is purged before the second.
        await client.publish(b"", to="orders", delay="5m")
        await turn_on(connection, infrastructure)
        with pytest.raises(NotEmptyError):
            await remove(connection, infrastructure, None)
        assert await states(connection, infrastructure, api) == "on"
        await client.publish(b"", to="orders", delay="1s", message_id="one")
        await receive(client, "orders", 1)
        async with await connection.channel() as channel:
            for queue in infrastructure.waiting_queues():
                await channel.purge_queue(queue.name)

        async def removed() -> bool:
            # The API counts every five seconds, and until then says that the message waits.
            try:
                result = await remove(connection, infrastructure, api if with_api else None)
            except NotEmptyError:
                return False
            assert (result.kept, result.complete) == (taps.names, with_api)
            return True

        await eventually(removed, step=0.5)
        found = await read_status(connection, infrastructure, api)
        assert (found.state, {one.exists for one in found.streams.values()}) == ("off", {True})
        for stream in taps.names:
            assert {one.message_id for one in await read(client, stream, 1)} == {"one"}
    await install(connection, infrastructure)
    texts = {one.check: one.text for one in (await verify(connection, infrastructure, api)).findings}
    if infrastructure is LONG_CLOCK:
        assert texts["taps"].startswith("off; 'bide.v1.tap.scheduled' and")
    assert (await turn_on(connection, infrastructure)).kept == taps.names


@pytest.mark.parametrize("is_busy", [False, True], ids=["a message comes", "a queue is busy"])
async def test_an_aborted_removal_restores_the_taps(
    vhost: Vhost, connection: Connection, api: ManagementApi, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    """It happens while the ways in are being deleted: it would take luck to hit that moment from outside."""
    await install(connection, SMALL_CLOCK)
    await turn_on(connection, SMALL_CLOCK)
    counting = 0

    async def count(connection: Connection, queues: Sequence[Queue], *, exact: bool) -> dict[str, int]:
        nonlocal counting
        counting += 1
        if counting == 2 and is_busy:
            raise QueueBusyError
        if counting == 2:
            async with bide.connect(vhost.url) as client:
                await client.publish(b"", to="bide.v1.s20")
            assert await states(connection, SMALL_CLOCK, api) == "incomplete"
        return await message_counts(connection, queues, exact=exact)

    monkeypatch.setattr("bide.admin.destroy.message_counts", count)
    with pytest.raises(QueueBusyError if is_busy else NotEmptyError):
        await remove(connection, SMALL_CLOCK, api)
    assert counting == 2
    assert await states(connection, SMALL_CLOCK, api) == "on"
