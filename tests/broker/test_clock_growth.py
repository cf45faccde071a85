"""``Clock`` that declares its queues on first use, and failures of these declarations."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

import bide
from bide.admin.apply import apply, exists
from bide.admin.infrastructure import install, remove
from bide.admin.verify import verify
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.error_queues.undeliverable import resend
from bide.errors import DeclarationMismatchError, NotAppliedError, NotEmptyError
from bide.management.api import ManagementApi
from tests.broker.conftest import LONG_CLOCK, SMALL_CLOCK
from tests.broker.receiving import connection_of, eventually, ready, receive, state_of
from tests.support import Vhost

TARGET = bide.Topology(queues=[bide.Queue.quorum("q")])


@pytest.fixture
def connection(vhost_connection: Connection) -> Connection:
    """These tests have a virtual host each."""
    return vhost_connection


@pytest.fixture
async def client(vhost: Vhost) -> AsyncIterator[bide.Client]:
    async with bide.connect(vhost.url) as client:
        await client.declare(TARGET)
        yield client


def queues_of(vhost: Vhost) -> set[str]:
    """All queues except those of the test, and those that are about to be deleted."""
    names = {str(one["name"]) for one in vhost.broker.management.call("GET", "queues", vhost.name)}
    return {name for name in names if name.startswith("bide.v1.") and ".settle." not in name}


async def test_only_the_queues_of_used_digits_are_declared(vhost: Vhost, client: bide.Client) -> None:
    for delay in ("5m", "1h", "1d", "5m"):
        await client.publish(b"", to="q", delay=delay)
    assert queues_of(vhost) == {"bide.v1.undeliverable", "bide.v1.m5", "bide.v1.h1", "bide.v1.d1"}


async def test_binding_a_target_does_not_declare_digit_queues(vhost: Vhost, client: bide.Client) -> None:
    await client.bind("q")
    assert queues_of(vhost) == {"bide.v1.undeliverable"}


async def test_binding_again_binds_a_queue_that_was_declared_again(
    vhost: Vhost, client: bide.Client, api: ManagementApi
) -> None:
    await client.bind("q")
    await client.destroy(TARGET, force=True)
    await client.declare(TARGET)
    await client.bind("q")
    assert "bide.v1.delivery" in {one.source for one in await api.bindings(vhost.name, to_queue="q")}


@pytest.mark.parametrize("key", ["one", "one.two.three.four.five.six"])
async def test_concurrent_first_uses_neither_lose_nor_hasten_messages(
    vhost: Vhost, key: str, connection: Connection
) -> None:
    shop = bide.Topology(
        [bide.Exchange("shop", "topic")], [bide.Queue.quorum("q")], [bide.Binding("shop", "q", f"{key[:3]}.#")]
    )
    chosen = random.Random(7)
    delays = [timedelta(milliseconds=chosen.randrange(10, 2500, 10)) for _ in range(240)]
    clock = bide.Clock(lanes=2)

    async def publish(number: int) -> None:
        async with bide.connect(vhost.url, infrastructure=clock) as client:
            await client.declare(shop)
            mine = list(enumerate(delays))[number::4]
            await asyncio.gather(
                *(
                    client.publish(str(index), exchange="shop", routing_key=key, delay=delay)
                    if index % 2
                    else client.publish(
                        str(index), exchange="shop", routing_key=key, deliver_at=datetime.now(UTC) + delay
                    )
                    for index, delay in mine
                )
            )

    await asyncio.gather(*(publish(number) for number in range(4)))
    async with bide.connect(vhost.url, infrastructure=clock) as client:
        messages = await receive(client, "q", len(delays))
        assert {message.body for message in messages} == {str(number).encode() for number in range(len(delays))}
        assert all(message.lateness is not None and message.lateness >= timedelta(0) for message in messages)
        assert await ready(connection, clock.undeliverable) == 0


async def test_a_bulk_of_due_times_on_an_empty_virtual_host_arrives_completely(
    vhost: Vhost, client: bide.Client
) -> None:
    begin = datetime.now(UTC)
    outgoing = [
        bide.OutgoingMessage(str(number), to="q", deliver_at=begin + timedelta(milliseconds=1500 + 7 * number))
        for number in range(300)
    ]
    result = await client.publish_many(outgoing)
    assert result.confirmed == 300
    messages = await receive(client, "q", 300)
    assert {message.body for message in messages} == {str(number).encode() for number in range(300)}
    assert all(message.lateness is not None and message.lateness >= timedelta(0) for message in messages)


async def test_a_queue_deleted_under_a_client_does_not_lose_or_hasten_its_messages(
    vhost: Vhost, client: bide.Client, monkeypatch: pytest.MonkeyPatch, connection: Connection
) -> None:
    await client.publish(b"", to="q", delay="1s")
    await receive(client, "q", 1)
    async with await connection.channel() as channel:
        await channel.delete_queue("bide.v1.s1")
    # The client remembers the queue: the message is set aside, with its target and its due time.
    await client.publish(b"aside", to="q", delay="1s")

    async def set_aside() -> bool:
        return await ready(connection, "bide.v1.undeliverable") == 1

    await eventually(set_aside)
    assert await ready(connection, "q") == 0
    # After half a minute it looks again. Here that is over at once.
    state = await state_of(client)
    monkeypatch.setattr(state.declared, "recheck_at", 0.0)
    receipt = await client.publish(b"again", to="q", delay="1s")
    (message,) = await receive(client, "q", 1)
    assert (message.body, receipt.attempts) == (b"again", 1)
    assert message.lateness is not None
    assert message.lateness >= timedelta(0)


@pytest.mark.parametrize("delay", ["10ms", "20ms"])
async def test_an_infrastructure_deleted_under_a_client_is_declared_again(
    vhost: Vhost, client: bide.Client, delay: str
) -> None:
    await client.publish(b"", to="q", delay="10ms")
    connection = await Connection.open(BrokerUrl.parse(vhost.url))
    await receive(client, "q", 1)
    await remove(connection, bide.Clock(), None)
    assert queues_of(vhost) == set()
    await client.publish(b"again", to="q", delay=delay)
    (message,) = await receive(client, "q", 1)
    assert message.body == b"again"
    await connection.close()


@pytest.mark.parametrize(
    ("exchange", "is_marked"),
    [
        pytest.param(exchange, is_marked, marks=() if is_marked is in_short_runs else pytest.mark.long)
        for exchange, in_short_runs in (
            ("in.c", False),
            ("c", True),
            ("undeliverable", False),
            ("delivery", False),
            ("released", True),
        )
        for is_marked in (False, True)
    ],
)
async def test_an_exchange_deleted_under_a_client_does_not_stop_its_messages(
    client: bide.Client, monkeypatch: pytest.MonkeyPatch, exchange: str, *, is_marked: bool
) -> None:
    connection = await connection_of(client)
    if is_marked:
        await install(connection, SMALL_CLOCK)
    await client.publish(b"", to="q", delay="10ms")
    await receive(client, "q", 1)
    async with await connection.channel() as channel:
        await channel.delete_exchange(f"bide.v1.{exchange}")
    await client.publish(b"soon", to="q", delay="10ms")
    # Every half a minute the client looks at what it uses. Here that is over at once.
    state = await state_of(client)
    monkeypatch.setattr(state.declared, "recheck_at", 0.0)
    await client.publish(b"later", to="q", delay="10ms")
    # What had no way waits for the broker to try again.
    receiving = asyncio.create_task(receive(client, "q", 2))
    while exchange == "delivery" and not receiving.done():
        # But what reaches the new delivery exchange before its target is bound there is set aside.
        await resend(client, allow=["q"])
        await asyncio.sleep(0.1)  # before the next attempt
    assert {message.body for message in await receiving} == {b"soon", b"later"}
    assert await exists(connection, bide.Topology([bide.Exchange(f"bide.v1.{exchange}")]))


@pytest.mark.parametrize("source", ["in.c", "c", "released"])
async def test_a_mark_does_not_stand_for_bindings_that_were_deleted(
    client: bide.Client, connection: Connection, source: str
) -> None:
    await install(connection, SMALL_CLOCK)
    async with await connection.channel() as channel:
        for one in SMALL_CLOCK.topology().bindings:
            if one.source == f"bide.v1.{source}":
                await channel.unbind(one)
    await client.publish(b"", to="q", delay="10ms")
    assert len(await receive(client, "q", 1)) == 1


@pytest.mark.parametrize("declare", [True, False])
@pytest.mark.parametrize("exchange", ["in.c", "c", "delivery"])
async def test_who_may_not_declare_is_not_in_doubt_where_an_exchange_was_deleted(
    client: bide.Client, modest_url: str, connection: Connection, exchange: str, *, declare: bool
) -> None:
    await install(connection, SMALL_CLOCK)
    async with bide.connect(modest_url, declare=declare) as modest:
        await modest.publish(b"", to="q", delay="50ms")
        await receive(client, "q", 1)
        async with await connection.channel() as channel:
            await channel.delete_exchange(f"bide.v1.{exchange}")
        state = await state_of(modest)
        state.forget("bide.v1.delivery")
        missing = r"every delay needs are missing|is not complete"
        with pytest.raises(NotAppliedError, match=missing):
            await modest.publish(b"", to="q", delay="50ms")
        with pytest.raises(NotAppliedError, match=missing):
            await modest.publish_many([bide.OutgoingMessage(b"", to="q", delay="50ms")])
    # A client that may declare it does so.
    await client.publish(b"again", to="q", delay="50ms")
    (message,) = await receive(client, "q", 1)
    assert message.body == b"again"


async def test_a_message_that_came_back_is_not_in_doubt(
    client: bide.Client, modest_url: str, connection: Connection
) -> None:
    await install(connection, SMALL_CLOCK)
    messages = [bide.OutgoingMessage(b"", to="q", delay="50ms")]
    # Not due when it has come back: a message that is due needs no delay queue.
    late = [bide.OutgoingMessage(b"", to="q", delay="19s")]
    async with bide.connect(modest_url) as modest:
        await modest.publish_many(messages)
        await modest.publish(b"", to="q", delay="50ms")
        await receive(client, "q", 2)
        async with await connection.channel() as channel:
            await channel.delete_exchange("bide.v1.s")
        with pytest.raises(NotAppliedError, match="every delay needs are missing"):
            await modest.publish(b"", to="q", delay="19s")
    async with bide.connect(modest_url) as modest:
        await client.publish(b"", to="q", delay="50ms")
        await modest.publish_many(messages)
        await receive(client, "q", 2)
        async with await connection.channel() as channel:
            await channel.delete_exchange("bide.v1.s")
        with pytest.raises(NotAppliedError, match="every delay needs are missing"):
            await modest.publish_many(late)
    assert await ready(connection, "q") == await ready(connection, "bide.v1.undeliverable") == 0


@pytest.mark.parametrize("source", ["in.c", "c"])
async def test_a_bulk_publish_does_not_give_up_where_publish_looks_after_the_infrastructure(
    client: bide.Client, connection: Connection, source: str
) -> None:
    messages = [bide.OutgoingMessage(str(number), to="q", delay="10ms") for number in range(500)]
    await client.publish_many(messages)
    await receive(client, "q", 500)
    async with await connection.channel() as channel:
        await channel.delete_exchange(f"bide.v1.{source}")
    results = [one async for one in client.publish_many(messages)]
    assert {one.status for one in results} == {"confirmed"}
    assert 2 in {one.attempts for one in results}
    assert len(await receive(client, "q", 500)) == 500


async def test_a_mismatched_digit_queue_fails_only_its_own_delays(
    vhost: Vhost, client: bide.Client, connection: Connection
) -> None:
    async with await connection.channel() as channel:
        await channel.declare_queue(bide.Queue("bide.v1.s7", arguments={"x-message-ttl": 1}))
    results = await asyncio.gather(
        *(client.publish(b"", to="q", delay=f"{seconds}s") for seconds in range(1, 10)), return_exceptions=True
    )
    (error,) = (one for one in results if isinstance(one, BaseException))
    assert isinstance(error, DeclarationMismatchError)
    assert "bide.v1.s7" in str(error)
    messages = await receive(client, "q", 8)
    assert all(message.lateness is not None and message.lateness >= timedelta(0) for message in messages)


async def test_a_mismatched_digit_queue_does_not_fail_other_delays_of_a_bulk(
    client: bide.Client, connection: Connection
) -> None:
    async with await connection.channel() as channel:
        await channel.declare_queue(bide.Queue("bide.v1.s7", arguments={"x-message-ttl": 1}))
    failed = asyncio.Event()

    async def messages() -> AsyncIterator[bide.OutgoingMessage]:
        for delay in ["7s"] * 10 + ["1s"] * 10:
            if delay == "1s":
                await failed.wait()
            yield bide.OutgoingMessage(b"", to="q", delay=delay)

    statuses = {}
    async for one in client.publish_many(messages()):
        statuses[one.position] = one.status
        failed.set()
    assert [statuses[position] for position in range(20)] == ["failed"] * 10 + ["confirmed"] * 10
    assert len(await receive(client, "q", 10)) == 10


# -- who may not declare


@pytest.fixture
async def modest_url(vhost: Vhost) -> AsyncIterator[str]:
    """The URL of a user who may publish and bind, but not declare."""
    name = f"modest-{vhost.name}"
    vhost.broker.add_user(name, "secret")
    vhost.broker.set_permissions(vhost.name, name, configure="^$")
    yield vhost.broker.vhost_url(vhost.name, user=name, password="secret")
    vhost.broker.delete_user(name)


@pytest.mark.parametrize("declare", [True, False])
async def test_without_the_right_to_declare_the_error_names_the_command_to_run(
    vhost: Vhost, client: bide.Client, modest_url: str, *, declare: bool, connection: Connection
) -> None:
    # It has grown the very queue that is needed, but without the mark there is no telling what else is there.
    await client.publish(b"", to="q", delay="10ms")
    await receive(client, "q", 1)
    async with bide.connect(modest_url, declare=declare) as modest:
        with pytest.raises(NotAppliedError, match=r"call bide\.admin\.infrastructure\.install"):
            await modest.publish(b"", to="q", delay="10ms")
        await install(connection, SMALL_CLOCK)
        await modest.publish(b"marked", to="q", delay="1.05s")
        (message,) = await receive(client, "q", 1)
        assert message.body == b"marked"


async def test_the_complete_mark_does_not_hide_a_deleted_queue(
    client: bide.Client, vhost: Vhost, modest_url: str, connection: Connection
) -> None:
    await install(connection, SMALL_CLOCK)
    async with await connection.channel() as channel:
        await channel.delete_queue("bide.v1.s3")
    async with bide.connect(modest_url) as modest:
        with pytest.raises(NotAppliedError, match=r"bide\.v1\.s3.*call bide\.admin\.infrastructure\.install"):
            await modest.publish(b"", to="q", delay="3s")
        await modest.publish(b"", to="q", delay="2s")
    # A client that may declare it does so.
    await client.publish(b"", to="q", delay="3s")
    assert len(await receive(client, "q", 2)) == 2


async def test_a_queue_limit_fails_the_publish_instead_of_losing_it(vhost: Vhost, client: bide.Client) -> None:
    await client.publish(b"", to="q", delay="1s")
    await asyncio.to_thread(vhost.broker.rabbitmqctl, "set_vhost_limits", "-p", vhost.name, '{"max-queues": 0}')
    with pytest.raises(bide.errors.BrokerError, match=r"(?s)limit") as caught:
        await client.publish(b"", to="q", delay="2s")
    assert not isinstance(caught.value, bide.errors.PublishInDoubtError)
    await client.publish(b"", to="q", delay="1s")
    await asyncio.to_thread(vhost.broker.rabbitmqctl, "clear_vhost_limits", "-p", vhost.name)
    await client.publish(b"", to="q", delay="2s")
    assert len(await receive(client, "q", 3)) == 3


# -- all of it ahead


async def test_install_declares_the_complete_mark_and_destroy_removes_it(
    vhost: Vhost, client: bide.Client, connection: Connection
) -> None:
    mark = bide.Topology([LONG_CLOCK.complete_mark])
    await apply(connection, LONG_CLOCK.topology())
    assert not await exists(connection, mark)
    await install(connection, LONG_CLOCK)
    assert await exists(connection, mark)
    await client.publish(b"", to="q", delay="5m")
    with pytest.raises(NotEmptyError):
        await remove(connection, LONG_CLOCK, None)
    assert await exists(connection, mark), "nothing was removed"
    await remove(connection, LONG_CLOCK, None, force=True)
    assert not await exists(connection, mark)
    assert queues_of(vhost) == set()


async def test_a_refused_destroy_declares_no_missing_queues(
    vhost: Vhost, client: bide.Client, api: ManagementApi, connection: Connection
) -> None:
    await client.publish(b"", to="q", delay="1h")
    for known in (api, None):
        with pytest.raises(NotEmptyError):
            await remove(connection, bide.Clock(), known)
        assert queues_of(vhost) == {"bide.v1.undeliverable", "bide.v1.h1"}


# -- verify


async def test_verify_accepts_missing_queues_that_were_never_used(
    client: bide.Client, api: ManagementApi, connection: Connection
) -> None:
    await client.publish(b"", to="q", delay="5m")
    await client.publish(b"", to="q", delay="1h1m1s10ms")
    report = await verify(connection, bide.Clock(), api)
    assert report.problems == ()
    (queues,) = (one.text for one in report.findings if one.check == "queues")
    assert queues == "6 as they should be; the others of 371 are declared when they are first used"


async def test_a_grown_clock_with_a_wrong_queue_does_not_pass_verify(
    client: bide.Client, api: ManagementApi, connection: Connection
) -> None:
    await client.publish(b"", to="q", delay="5m")
    async with await connection.channel() as channel:
        await channel.declare_queue(bide.Queue.quorum("bide.v1.s7", {"x-message-ttl": 1}))
        await channel.unbind(bide.Binding("bide.v1.m", "bide.v1.s", "~m0", "exchange"))
        await channel.delete_queue("bide.v1.undeliverable")
    problems = [f"{one.check}: {one.text}" for one in (await verify(connection, bide.Clock(), api)).problems]
    missing, wrong, unbound, alone = problems
    assert missing.startswith("queues: 1 of 3 queues do not exist, 'bide.v1.undeliverable'")
    assert wrong.startswith("queues: the queue 'bide.v1.s7' is declared with ")
    assert unbound.startswith("bindings: 2 of 33 bindings are missing")
    assert "bide.v1.m -> bide.v1.s (~m0)" in unbound
    assert alone.startswith("bindings: 1 of the queues have no binding, 'bide.v1.s7'")


async def test_a_grown_queue_that_has_lost_its_bindings_does_not_pass_verify(
    client: bide.Client, api: ManagementApi, connection: Connection
) -> None:
    await client.publish(b"", to="q", delay="5m")
    await client.publish(b"", to="q", delay="7s")
    assert (await verify(connection, bide.Clock(), api)).problems == ()
    async with await connection.channel() as channel:
        await channel.unbind(bide.Binding("bide.v1.m", "bide.v1.m5", "~m5"))
    (problem,) = (await verify(connection, bide.Clock(), api)).problems
    assert problem.check == "bindings"
    assert problem.text.startswith("1 of the queues have no binding, 'bide.v1.m5'")


async def test_a_marked_clock_with_a_missing_queue_does_not_pass_verify(
    client: bide.Client, api: ManagementApi, connection: Connection
) -> None:
    clock = replace(SMALL_CLOCK, max_delay=timedelta(seconds=2))
    await install(connection, clock)
    assert (await verify(connection, clock, api)).problems == ()
    async with await connection.channel() as channel:
        await channel.delete_queue("bide.v1.s2")
    problems = {one.check for one in (await verify(connection, clock, api)).problems}
    assert problems == {"queues", "bindings"}
