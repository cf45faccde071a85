"""Policies that change the queues of a delay infrastructure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

import bide
from bide.admin.infrastructure import install
from bide.admin.taps import turn_off, turn_on
from bide.admin.verify import verify
from bide.amqp.connection import Connection
from bide.delay.protocol import DelayInfrastructure
from bide.errors import TargetNotFoundError
from bide.management.api import ManagementApi
from tests.broker.conftest import LONG_CLOCK, SMALL_CLOCK
from tests.broker.receiving import eventually, ready, receive

if TYPE_CHECKING:
    from tests.support import Vhost

NSB = bide.NServiceBus(levels=4)
CLASSIC = bide.NServiceBus(version=1, levels=4)
HALL = bide.WaitingHall(levels=4)
POLICY, OPERATOR = "policies", "operator-policies"

KEYS: Mapping[str, Any] = {
    "message-ttl": 5,
    "expires": 86_400_000,
    "max-length": 1_000_000,
    "max-length-bytes": 1_000_000_000,
    "overflow": "drop-head",
    "delivery-limit": 5,
    "dead-letter-exchange": "amq.fanout",
    "dead-letter-routing-key": "elsewhere",
}
HARMLESS: Mapping[str, set[str]] = {
    "clock": set(),
    "waiting-hall": set(),
    # An argument wins over a policy's dead-letter exchange, and only the undeliverable queue has no such argument.
    "celery": {"dead-letter-exchange"},
    "nservicebus": {"dead-letter-exchange"},
    # RabbitMQ does not apply a policy with a delivery limit to a classic queue, and without a limit none is ever full.
    "nservicebus-v1": {"dead-letter-exchange", "delivery-limit", "overflow"},
}


@pytest.fixture
def connection(vhost_connection: Connection) -> Connection:
    return vhost_connection


async def put(
    api: ManagementApi,
    vhost: str,
    definition: Mapping[str, Any],
    *,
    name: str = "housekeeping",
    kind: str = POLICY,
    pattern: str = ".*",
    apply_to: str = "all",
    priority: int = 0,
) -> None:
    body = {"pattern": pattern, "definition": definition, "apply-to": apply_to, "priority": priority}
    await api.call("PUT", kind, vhost, name, body=body)


async def problems(
    connection: Connection, infrastructure: DelayInfrastructure, api: ManagementApi, *, check: str = "policies"
) -> str:
    """The problems with policies that verify reports."""
    report = await verify(connection, infrastructure, api)
    return "\n".join(one.text for one in report.problems if one.check == check)


@pytest.mark.parametrize("kind", [POLICY, OPERATOR])
async def test_a_policy_that_deletes_confirmed_messages_does_not_pass_verify(
    vhost: Vhost, connection: Connection, api: ManagementApi, kind: str
) -> None:
    async with bide.connect(vhost.url, infrastructure=LONG_CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
        for _ in range(10):
            await client.publish(b"", to="orders", delay="5m")
        assert await ready(connection, "bide.v1.m5") == 10
        # Long enough for the queues to be there when they are checked.
        await put(api, vhost.name, {"expires": 600_000}, kind=kind)
        found = await problems(connection, LONG_CLOCK, api)
        assert "policy 'housekeeping' sets expires to 600000 on 2 of 2 queues ('bide.v1.m5' and " in found
        assert ("protection.protect(" in found) is (kind == POLICY)
        assert ("operator policy" in found) is (kind == OPERATOR)
        await put(api, vhost.name, {"expires": 3000}, kind=kind)

        async def gone() -> bool:
            try:
                await ready(connection, "bide.v1.m5")
            except TargetNotFoundError:
                return True
            return False

        # To ask for the queue is to use it, which starts the time anew.
        await eventually(gone, step=6)


@pytest.mark.parametrize("kind", [POLICY, OPERATOR])
async def test_a_policy_that_hastens_messages_does_not_pass_verify(
    vhost: Vhost, connection: Connection, api: ManagementApi, kind: str
) -> None:
    async with bide.connect(vhost.url, infrastructure=LONG_CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders", {"x-message-ttl": 900_000})]))
        await put(api, vhost.name, {"message-ttl": 1000}, kind=kind, pattern="^bide")
        found = await problems(connection, LONG_CLOCK, api)
        # Those of s2 to s59 and m1 to m5, and the undeliverable queue.
        assert "policy 'housekeeping' sets message-ttl to 1000 on 64 queues that do not exist yet" in found
        for _ in range(10):
            await client.publish(b"", to="orders", delay="5m")
        messages = await receive(client, "orders", 10)
        found = await problems(connection, LONG_CLOCK, api)
        # Those that hold messages for a second at most are as they were.
        assert "policy 'housekeeping' sets message-ttl to 1000 on 2 of 2 queues" in found
    assert all(one.lateness is not None and one.lateness.total_seconds() < -1 for one in messages)


@pytest.mark.parametrize("kind", [POLICY, OPERATOR])
async def test_a_policy_on_queues_of_unused_digits_does_not_pass_verify(
    vhost: Vhost, connection: Connection, api: ManagementApi, kind: str
) -> None:
    """The first message that needs such a queue would be deleted with it."""
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
        await client.publish(b"", to="orders", delay="20s")
        await put(api, vhost.name, {"expires": 3000}, kind=kind, pattern=r"^bide\.v1\.s1")
        found = await problems(connection, SMALL_CLOCK, api)
    # s1 and s10 to s19
    assert "policy 'housekeeping' sets expires to 3000 on 11 queues that do not exist yet" in found
    assert found.count("housekeeping") == 1


@pytest.mark.parametrize("layout", [SMALL_CLOCK, NSB, CLASSIC, bide.Celery(), HALL], ids=lambda one: one.name)
async def test_every_policy_key_that_changes_a_queue_fails_verify(
    vhost: Vhost, connection: Connection, api: ManagementApi, release: tuple[int, ...], layout: DelayInfrastructure
) -> None:
    await install(connection, layout)
    for key, value in KEYS.items():
        for kind in (POLICY, OPERATOR):
            if kind == OPERATOR and (key.startswith("dead") or (key == "overflow" and release < (4, 0))):
                continue  # the broker refuses such an operator policy
            await put(api, vhost.name, {key: value}, kind=kind)
            found = await problems(connection, layout, api)
            await api.call("DELETE", kind, vhost.name, "housekeeping")
            if key in HARMLESS[layout.name]:
                assert found == "", (key, kind)
            else:
                assert f"policy 'housekeeping' sets {key} to {value} on " in found, (key, kind)


@pytest.mark.parametrize(
    "definition",
    [
        {"message-ttl": 20_000},
        {"queue-leader-locator": "client-local"},
        {"overflow": "reject-publish"},
        {"dead-letter-strategy": "at-most-once"},
        {"alternate-exchange": "amq.fanout"},
        {"expires": 3000, "max-age": "7D"},  # which makes it one for streams
    ],
    ids=lambda one: ",".join(one),
)
async def test_a_policy_that_changes_nothing_passes_verify(
    vhost: Vhost, connection: Connection, api: ManagementApi, definition: Mapping[str, Any]
) -> None:
    await install(connection, SMALL_CLOCK)
    await put(api, vhost.name, definition, pattern=r"^bide\.v1\.[sc]")
    await put(api, vhost.name, {"expires": 3000}, name="theirs", pattern="^orders")
    await put(api, vhost.name, {"max-length": 3}, name="limit", pattern="^orders", kind=OPERATOR, apply_to="queues")
    assert await problems(connection, SMALL_CLOCK, api) == ""


async def test_a_raised_delivery_limit_passes_verify(
    vhost: Vhost, connection: Connection, api: ManagementApi, release: tuple[int, ...]
) -> None:
    await install(connection, SMALL_CLOCK)
    await put(api, vhost.name, {"delivery-limit": 50})
    # Below 4.0 a queue has no limit by itself.
    assert bool(await problems(connection, SMALL_CLOCK, api)) is (release < (4, 0))


@pytest.mark.parametrize("layout", [SMALL_CLOCK, NSB], ids=lambda one: one.name)
@pytest.mark.parametrize("bound", [True, False])
async def test_a_policy_that_shortens_the_streams_of_taps_does_not_pass_verify(
    vhost: Vhost, connection: Connection, api: ManagementApi, layout: DelayInfrastructure, bound: bool
) -> None:
    await install(connection, layout)
    await turn_on(connection, layout)
    if not bound:
        await turn_off(connection, layout)
    await put(api, vhost.name, {"max-age": "1h"})
    assert "policy 'housekeeping' sets max-age to 1h on 2 of " in await problems(connection, layout, api)
    await put(api, vhost.name, {"max-age": "1Y"})
    assert await problems(connection, layout, api) == ""
    await put(api, vhost.name, {"max-length-bytes": 10_000_000}, apply_to="queues")
    assert "sets max-length-bytes to 10000000 on " in await problems(connection, layout, api)


async def test_policies_on_release_queues_are_reported(
    vhost: Vhost, connection: Connection, api: ManagementApi
) -> None:
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.declare(bide.Topology([bide.Exchange("shop", "fanout")], [bide.Queue.quorum("orders")]))
        await client.publish(b"", exchange="shop", delay="20s")
    await put(api, vhost.name, {"max-length": 10}, pattern="release")
    found = await problems(connection, SMALL_CLOCK, api)
    assert "sets max-length to 10 on 1 of 3 queues ('bide.v1.release.x:shop')" in found


async def test_an_operator_policy_with_an_unsupported_pattern_is_not_checked(
    vhost: Vhost, connection: Connection, api: ManagementApi
) -> None:
    await install(connection, SMALL_CLOCK)
    await put(api, vhost.name, {"expires": 86_400_000}, kind=OPERATOR, pattern="^[[:alpha:]]+")
    report = await verify(connection, SMALL_CLOCK, api)
    (finding,) = [one for one in report.findings if one.check == "policies"]
    assert (finding.status, "'housekeeping'" in finding.text) == ("not checked", True)
