"""The findings of ``verify``, protected declarations, and removal."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import bide
from bide.admin.infrastructure import install, install_guard, remove
from bide.admin.locate import management_api
from bide.admin.verify import verify
from bide.amqp.connection import Connection
from bide.delay.cascade import Policy
from bide.delay.protocol import DelayInfrastructure
from bide.errors import InvalidInputError, NotEmptyError
from bide.management.api import ManagementApi
from tests.broker.conftest import LONG_CLOCK, SMALL_CLOCK
from tests.broker.receiving import eventually, ready, receive
from tests.timeouts import MAX_LATENESS

if TYPE_CHECKING:
    from tests.support import Vhost

NSB = bide.NServiceBus(routing="direct")


@pytest.fixture
def connection(vhost_connection: Connection) -> Connection:
    return vhost_connection


async def found(
    connection: Connection, infrastructure: DelayInfrastructure, api: ManagementApi | None
) -> dict[str, str]:
    """The problems, by check."""
    report = await verify(connection, infrastructure, api)
    assert report.ok is not bool(report.problems)
    return {one.check: one.text for one in report.problems}


async def test_a_healthy_infrastructure_has_no_problems(connection: Connection, api: ManagementApi) -> None:
    await install(connection, SMALL_CLOCK)
    report = await verify(connection, SMALL_CLOCK, api)
    assert report.problems == ()
    statuses = {one.check: one.status for one in report.findings}
    assert {check for check, status in statuses.items() if status != "ok"} == {"dead-letter prefetch"}


async def test_missing_and_different_queues_are_named(connection: Connection, api: ManagementApi) -> None:
    await install(connection, SMALL_CLOCK)
    channel = await connection.channel()
    await channel.delete_queue("bide.v1.s7")
    await channel.delete_queue("bide.v1.s8")
    wrong: dict[str, str | int] = {"x-message-ttl": 1, "x-dead-letter-exchange": "bide.v1.c"}
    await channel.declare_queue(bide.Queue.quorum("bide.v1.s8", wrong))
    await channel.unbind(bide.Binding("bide.v1.s", "bide.v1.s9", "~s9"))
    await channel.delete_exchange("bide.v1.in.h")
    problems = await found(connection, SMALL_CLOCK, api)
    assert "1 of 15 exchanges do not exist, 'bide.v1.in.h'" in problems["exchanges"]
    report = await verify(connection, SMALL_CLOCK, api)
    texts = [one.text for one in report.problems if one.check == "queues"]
    assert any("'bide.v1.s7'" in text for text in texts)
    assert any("'bide.v1.s8' is declared with" in text for text in texts)
    assert "bide.v1.s -> bide.v1.s9 (~s9)" in problems["bindings"] or "are missing" in problems["bindings"]


async def test_without_the_management_api_some_checks_are_not_made(connection: Connection) -> None:
    await install(connection, SMALL_CLOCK)
    unreachable = management_api(connection.url, "http://127.0.0.1:1")
    report = await verify(connection, SMALL_CLOCK, unreachable)
    await unreachable.close()
    assert report.ok
    unchecked = {one.check for one in report.findings if one.status == "not checked"}
    assert unchecked >= {"management API", "bindings", "targets", "delivery limits", "stuck messages"}
    assert connection.url.password not in str(report.to_dict())


async def test_a_policy_that_makes_a_quorum_queue_refuse_is_reported(
    vhost: Vhost, connection: Connection, api: ManagementApi
) -> None:
    """Of a quorum queue's argument and its policy's overflow, the policy holds; of a classic queue's the argument."""
    limits: dict[str, str | int] = {"x-max-length": 9, "x-overflow": "drop-head"}
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("q", limits), bide.Queue("c", arguments=limits)]))
        await client.bind("q")
        await client.bind("c")
        body = {"pattern": "^[qc]$", "definition": {"overflow": "reject-publish"}, "apply-to": "queues"}
        await api.call("PUT", "policies", vhost.name, "refuse", body=body)
        (problem,) = (await verify(connection, SMALL_CLOCK, api)).problems
    assert (problem.check, "'q' refuses messages once it is full (max-length 9)" in problem.text) == ("targets", True)


async def test_a_target_that_refuses_messages_when_full_is_reported(
    vhost: Vhost, connection: Connection, api: ManagementApi
) -> None:
    limits: dict[str, str | int] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("full", limits)]))
        await client.publish(b"", to="full", delay="50ms")
        await receive(client, "full", 1)
    assert (
        "'full' refuses messages once it is full (max-length 1)"
        in (await found(connection, SMALL_CLOCK, api))["targets"]
    )


async def test_a_target_with_a_low_delivery_limit_is_reported(
    vhost: Vhost, connection: Connection, api: ManagementApi
) -> None:
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("low", {"x-delivery-limit": 3})]))
        await client.bind("low")
    assert "'low' drops a message after 3 deliveries" in (await found(connection, SMALL_CLOCK, api))["delivery limits"]


async def test_undeliverable_messages_are_reported(vhost: Vhost, connection: Connection, api: ManagementApi) -> None:
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        await client.bind("q")
        # The client knows the target from now on, so it sends the message although the queue is gone.
        await (await connection.channel()).delete_queue("q")
        await client.publish(b"", to="q", delay="50ms")

    async def was_set_aside() -> bool:
        return await ready(connection, SMALL_CLOCK.undeliverable) == 1

    await eventually(was_set_aside)
    assert (
        "1 message in 'bide.v1.undeliverable'" in (await found(connection, SMALL_CLOCK, api))["undeliverable messages"]
    )


async def test_stuck_messages_and_foreign_bindings_are_reported(
    vhost: Vhost, connection: Connection, api: ManagementApi
) -> None:
    async with bide.connect(vhost.url, infrastructure=NSB) as client:
        queues = [bide.Queue.quorum(name) for name in ("orders", "billing.orders", "gone")]
        await client.declare(bide.Topology(queues=queues))
        await client.bind("gone")
        channel = await connection.channel()
        # The client knows the target from now on, so it sends the message although the queue is gone.
        await channel.delete_queue("gone")
        for name in ("gone", "billing.orders"):
            await client.publish(b"", to=name, delay="1s")
        await channel.bind(bide.Binding(NSB.delivery_exchange, "orders", "#.orders"))
        await receive(client, "billing.orders", 1)

    async def stuck() -> bool:
        problems = await found(connection, NSB, api)
        return "nsb.v2.delay-level-00" in problems.get("stuck messages", "")

    await eventually(stuck, step=1)
    problems = await found(connection, NSB, api)
    assert "install_guard(" in problems["guard"]
    assert "'orders' also receives the delayed messages for 'billing.orders'" in problems["cross-delivery"]


@pytest.mark.usefixtures("stock_dead_lettering")
async def test_the_guard_sets_messages_aside_that_would_block_a_level(
    vhost: Vhost, connection: Connection, api: ManagementApi
) -> None:
    await install(connection, NSB)
    policy = await install_guard(connection, api, NSB)
    assert await install_guard(connection, api, NSB) == policy
    # NServiceBus declares its exchanges without that argument, and is not refused.
    await install(connection, NSB)
    async with bide.connect(vhost.url, infrastructure=NSB) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("gone"), bide.Queue.quorum("good")]))
        await client.bind("gone")
        # The client knows the target from now on, so it sends the messages although the queue is gone.
        await (await connection.channel()).delete_queue("gone")
        for _ in range(40):
            await client.publish(b"bad", to="gone", delay="1s")
        await asyncio.gather(*(client.publish(b"good", to="good", delay="2s") for _ in range(100)))
        messages = await receive(client, "good", 100)
        assert all(one.lateness is not None and one.lateness < MAX_LATENESS for one in messages)

        async def was_set_aside() -> bool:
            return await ready(connection, NSB.undeliverable) == 40

        await eventually(was_set_aside)
    assert "guard" not in await found(connection, NSB, api)


async def test_a_guard_does_not_replace_a_foreign_policy(
    vhost: Vhost, connection: Connection, api: ManagementApi
) -> None:
    await install(connection, NSB)
    await asyncio.to_thread(
        vhost.broker.rabbitmqctl,
        "set_policy",
        "-p",
        vhost.name,
        "--apply-to",
        "exchanges",
        "theirs",
        "^nsb",
        '{"alternate-exchange":"amq.fanout"}',
    )

    async def applied() -> bool:
        found_exchange = await api.exchange(vhost.name, NSB.delivery_exchange)
        return found_exchange is not None and found_exchange.policy == "theirs"

    await eventually(applied)
    with pytest.raises(InvalidInputError, match="the policy 'theirs' applies"):
        await install_guard(connection, api, NSB)
    with pytest.raises(InvalidInputError, match="needs no guard"):
        await install_guard(connection, api, SMALL_CLOCK)


async def test_a_policy_with_another_alternate_exchange_is_reported(
    vhost: Vhost, connection: Connection, api: ManagementApi
) -> None:
    """And the policy that the error of the guard asks for does, once the guard has declared what it leads to."""
    await install(connection, NSB)

    async def problem(alternate: str) -> str:
        leading = {"alternate-exchange": alternate}
        await api.set_policy(vhost.name, Policy(name="theirs", pattern=".*", definition=leading, apply_to="exchanges"))

        async def applied() -> bool:
            found_exchange = await api.exchange(vhost.name, NSB.delivery_exchange)
            return found_exchange is not None and found_exchange.policy == "theirs"

        await eventually(applied)
        return (await found(connection, NSB, api)).get("guard", "")

    text = await problem("amq.fanout")
    assert "29 of 29 exchanges have another alternate exchange, 'amq.fanout'" in text
    assert f"Set '{NSB.undeliverable}' in the policy" in text
    assert f"'{NSB.undeliverable}' does not exist: call bide.admin.infrastructure.install_guard(...)" in await problem(
        NSB.undeliverable
    )
    policy = await install_guard(connection, api, NSB)
    assert policy.name == "theirs"
    assert list(await api.policies(vhost.name)) == ["theirs"]
    assert "guard" not in await found(connection, NSB, api)


async def test_removal_includes_release_queues_and_the_guard(
    vhost: Vhost, connection: Connection, api: ManagementApi
) -> None:
    await install(connection, NSB)
    await install_guard(connection, api, NSB)
    removed = await remove(connection, NSB, api)
    assert (removed.complete, removed.removed.queues) == (True, 29)
    assert await api.policies(vhost.name) == {}
    async with bide.connect(vhost.url, infrastructure=LONG_CLOCK) as client:
        await client.declare(bide.Topology([bide.Exchange("shop", "fanout")], [bide.Queue.quorum("q")]))
        await client.publish(b"", to="q", delay="5m")
        await client.publish(b"", exchange="shop", delay="1s")
    with pytest.raises(NotEmptyError):
        await remove(connection, LONG_CLOCK, api)
    removed = await remove(connection, LONG_CLOCK, api, force=True)
    # Those of the digits m5 and s1, the release queue, and the undeliverable queue.
    assert removed.removed.queues == 4
    assert await api.queues(vhost.name, "bide.v1") == []
    assert [one.queue.name for one in await api.queues(vhost.name, "")] == ["q"]
