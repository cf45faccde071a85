"""``bide delay apply --protect``: the policy that overrides others on delay queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import bide
from bide.admin.infrastructure import install, install_guard, remove
from bide.admin.protection import protect, protection_name, queue_pattern
from bide.admin.taps import turn_on
from bide.amqp.connection import Connection
from bide.delay.protocol import DelayInfrastructure
from bide.errors import TargetNotFoundError
from bide.management.api import ManagementApi
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.receiving import eventually, ready, receive
from tests.broker.test_policies import CLASSIC, HALL, NSB, OPERATOR, problems, put

if TYPE_CHECKING:
    from tests.support import Vhost

LAYOUTS = [SMALL_CLOCK, bide.Clock(prefix="a.b+c"), NSB, CLASSIC, bide.Celery(), bide.Celery(prefix="mine"), HALL]


@pytest.fixture
def connection(vhost_connection: Connection) -> Connection:
    return vhost_connection


async def test_protected_messages_are_neither_deleted_nor_hastened(
    vhost: Vhost, connection: Connection, api: ManagementApi, release: tuple[int, ...]
) -> None:
    await put(api, vhost.name, {"expires": 2000, "message-ttl": 1000}, priority=7)
    protection = await protect(api, vhost.name, SMALL_CLOCK, release)
    assert (protection.policy.priority, protection.displaced) == (8, ("housekeeping",))
    await install(connection, SMALL_CLOCK)
    assert await problems(connection, SMALL_CLOCK, api) == ""
    channel = await connection.channel()
    # Before the queue is declared: under the first policy alone it would expire after 2 s.
    await put(api, vhost.name, {"expires": 600_000}, name="targets", pattern="^orders$", priority=9)
    await channel.declare_queue(bide.Queue.quorum("orders", {"x-expires": 600_000}))
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        for _ in range(10):
            await client.publish(b"", to="orders", delay="15s")
        for _ in range(2):
            # A queue that is declared after those of the infrastructure, and used later, has expired before the
            # messages are due.
            await channel.declare_queue(bide.Queue.quorum("expiring"))
            await eventually(lambda: expired(connection, "expiring"), step=4)
        messages = await receive(client, "orders", 10)
    assert all(one.lateness is not None and one.lateness.total_seconds() >= 0 for one in messages)


async def expired(connection: Connection, queue: str) -> bool:
    try:
        await ready(connection, queue)
    except TargetNotFoundError:
        return True
    return False


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: f"{one.name}-{getattr(one, 'prefix', '')}")
async def test_every_queue_of_every_layout_is_protected(
    vhost: Vhost, connection: Connection, api: ManagementApi, release: tuple[int, ...], layout: DelayInfrastructure
) -> None:
    if isinstance(layout, bide.Clock) and layout != SMALL_CLOCK:
        layout = bide.Clock(prefix=layout.prefix, max_delay=SMALL_CLOCK.max_delay, resolution=SMALL_CLOCK.resolution)
    await put(api, vhost.name, {"expires": 86_400_000}, name="queues", apply_to="queues", priority=3)
    await put(api, vhost.name, {"max-age": "1h"}, name="streams", apply_to="queues", priority=4)
    await install(connection, layout)
    if isinstance(layout, bide.NServiceBus | bide.Celery):
        await install_guard(connection, api, layout)
    if not isinstance(layout, bide.WaitingHall):
        await turn_on(connection, layout)
    assert await problems(connection, layout, api) != ""
    protection = await protect(api, vhost.name, layout, release)
    assert await problems(connection, layout, api) == ""
    assert await problems(connection, layout, api, check="protection") == ""
    assert protection.left_out == (("expires",) if layout is HALL else ("expires", "max-age"))
    # A second run finds its own policy, which is not a reason for a higher priority.
    again = await protect(api, vhost.name, layout, release)
    assert again == protection
    stranger = await api.call("GET", "policies", vhost.name, protection.policy.name)
    assert stranger["apply-to"] == "queues"
    channel = await connection.channel()
    name = protection.policy.pattern.replace("\\", "").strip("^($)").partition("|")[0].removesuffix("d*")
    await channel.declare_queue(bide.Queue.quorum(f"x{name}1"))
    found = await api.queues(vhost.name, f"x{name}1")
    assert found[0].policy == "queues"
    removed = await remove(connection, layout, api)
    assert removed.complete
    assert set(await api.policies(vhost.name)) == {"queues", "streams"}


async def test_harmless_keys_of_a_displaced_policy_are_kept(
    vhost: Vhost, connection: Connection, api: ManagementApi, release: tuple[int, ...]
) -> None:
    await install(connection, SMALL_CLOCK)
    good = {"queue-leader-locator": "balanced", "delivery-limit": 100 if release >= (4, 0) else 7}
    await put(api, vhost.name, {"expires": 86_400_000, **good})
    protection = await protect(api, vhost.name, SMALL_CLOCK, release)
    # Below 4.0 a queue has no delivery limit by itself.
    kept = {"delivery-limit", "queue-leader-locator"} if release >= (4, 0) else {"queue-leader-locator"}
    assert set(protection.policy.definition) == {"alternate-exchange", *kept}
    assert set(protection.left_out) == {"expires", "delivery-limit"} - kept
    assert await problems(connection, SMALL_CLOCK, api) == ""


async def test_a_policy_above_the_protection_does_not_pass_verify(
    vhost: Vhost, connection: Connection, api: ManagementApi, release: tuple[int, ...]
) -> None:
    await install(connection, SMALL_CLOCK)
    await protect(api, vhost.name, SMALL_CLOCK, release)
    assert await problems(connection, SMALL_CLOCK, api, check="protection") == ""
    await put(api, vhost.name, {"queue-leader-locator": "balanced"}, name="newer", pattern="s1", priority=50)
    found = await problems(connection, SMALL_CLOCK, api, check="protection")
    assert "the policy 'bide.protect.bide.v1' of priority 1 does not apply to 11 of 40 queues ('bide.v1.s1', " in found
    assert "the policy 'newer' of priority 50 does" in found
    assert (await protect(api, vhost.name, SMALL_CLOCK, release)).policy.priority == 51
    assert await problems(connection, SMALL_CLOCK, api, check="protection") == ""


async def test_an_operator_policy_is_still_reported(
    vhost: Vhost, connection: Connection, api: ManagementApi, release: tuple[int, ...]
) -> None:
    await install(connection, SMALL_CLOCK)
    await put(api, vhost.name, {"expires": 86_400_000}, kind=OPERATOR)
    await protect(api, vhost.name, SMALL_CLOCK, release)
    found = await problems(connection, SMALL_CLOCK, api)
    assert "the operator policy 'housekeeping' sets expires to 86400000 on 40 of 40 queues" in found
    assert "no other policy can override it" in found


def test_a_prefix_is_not_read_as_a_regular_expression() -> None:
    assert queue_pattern(bide.Clock(prefix="a.b+c")) == r"^a\.b\+c\.v1\."
    assert protection_name(bide.Celery()) == "bide.protect.celery"
    assert protection_name(HALL) == "bide.protect.bide.hall.v1"
    assert queue_pattern(bide.NServiceBus()).startswith(r"^(nsb\.v2\.delay\-level\-\d*|bide\.undeliverable\.nsb")
