"""``bide queue`` as a subprocess, on a real broker."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import bide
from bide.admin.delivery_limit import limited_queues
from bide.admin.locate import management_api
from bide.amqp.url import BrokerUrl
from bide.delay.cascade import Policy
from tests.acceptance.test_cli import SMALL, Program
from tests.broker.receiving import eventually
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from tests.support import Vhost


def set_policy(vhost: Vhost, policy: Policy) -> None:
    async def put() -> None:
        async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:
            await api.set_policy(vhost.name, policy)

    asyncio.run(put())


async def deliveries(client: bide.Client, queue: str, limit: int) -> int:
    """How many times a message is delivered that each consumer returns, up to a limit."""
    seen = 0
    await client.publish(b"x", to=queue)
    await client.publish(b"end", to=queue)
    # One by one, so that the message that is returned comes before the other one.
    async with asyncio.timeout(TIMEOUT), client.consume(queue, prefetch=1) as messages:
        async for message in messages:
            if message.body == b"end":
                await message.ack()
                break
            seen += 1
            await (message.ack() if seen == limit else message.requeue())
    return seen


def check_deliveries(vhost: Vhost, queue: str, wanted: int) -> None:
    """Wait until a message is delivered this many times: a queue follows its policies a moment after their change."""

    async def check() -> None:
        async with bide.connect(vhost.url) as client:

            async def is_so() -> bool:
                return await deliveries(client, queue, 10) == wanted

            await eventually(is_so)

    asyncio.run(check())


def test_a_policy_raises_the_limit_and_keeps_the_settings_of_the_displaced_one(program: Program, vhost: Vhost) -> None:
    queues = [bide.Queue.quorum("orders"), bide.Queue.quorum("mails"), bide.Queue("old")]
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=queues))
    program.ok("delay", "apply", *SMALL)
    assert program.ok("queue", "delivery-limit") == "no quorum queue has too low a delivery limit\n"
    housekeeping = Policy(
        name="housekeeping",
        pattern="^orders",
        definition={"delivery-limit": 3, "max-length": 1000},
        apply_to="all",
        priority=7,
    )
    set_policy(vhost, housekeeping)
    check_deliveries(vhost, "orders", 4)

    shown = program.run("queue", "delivery-limit", "--dry-run")
    assert (shown.returncode, shown.stdout.decode()) == (
        1,
        (
            "! orders: limit 3 (policy housekeeping); policy bide.delivery-limit.orders in place of housekeeping: "
            "delivery-limit 2147483647\n"
        ),
    )
    assert program.run("queue", "delivery-limit", stdin=b"n\n").returncode == 1
    check_deliveries(vhost, "orders", 4)
    done = json.loads(program.ok("queue", "delivery-limit", "--at-least", "50", "--yes", "--json"))
    assert done["set"] is True
    assert done["queues"][0]["policy"] == {
        "name": "bide.delivery-limit.orders",
        "pattern": "^orders$",
        "definition": {"delivery-limit": 50, "max-length": 1000},
        "apply-to": "queues",
        "priority": 8,
    }
    check_deliveries(vhost, "orders", 10)
    assert program.ok("queue", "delivery-limit", "orders", "--at-least", "50", "--dry-run").startswith(
        "no quorum queue"
    )
    assert "no quorum queue 'old'" in program.fails(1, "queue", "delivery-limit", "old")
    # The policy of an earlier run is changed, not displaced.
    assert program.ok("queue", "delivery-limit", "--yes").splitlines() == [
        (
            "! orders: limit 50 (policy bide.delivery-limit.orders); policy bide.delivery-limit.orders: "
            "delivery-limit 2147483647"
        ),
        "1 policy set",
    ]


def test_a_limit_in_the_arguments_is_reported_as_not_raisable(program: Program, vhost: Vhost) -> None:
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("orders", {"x-delivery-limit": 5})]))
    done = program.run("queue", "delivery-limit", "--yes")
    assert (done.returncode, done.stdout.decode()) == (
        1,
        "✗ orders: limit 5 (argument); no policy can raise it: declare the queue without the argument\n",
    )
    assert program.ok("queue", "delivery-limit", "--at-least", "5").startswith("no quorum queue has")


async def test_an_operator_policy_is_reported_as_not_raisable(program: Program, vhost: Vhost) -> None:
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
    async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:
        body = {"pattern": "", "definition": {"delivery-limit": 4}, "apply-to": "queues", "priority": 0}
        await api.call("PUT", "operator-policies", vhost.name, "strict", body=body)
    done = program.run("queue", "delivery-limit", "--yes")
    assert (done.returncode, done.stdout.decode()) == (
        1,
        "✗ orders: limit 4 (operator policy strict); no policy can raise it: change that policy\n",
    )


async def test_from_4_0_on_a_queue_without_a_limit_has_the_default_limit(vhost: Vhost) -> None:
    async with bide.connect(vhost.url) as client:
        queues = [bide.Queue.quorum("orders"), bide.Queue.quorum("free", {"x-delivery-limit": 100})]
        await client.declare(bide.Topology(queues=queues))
    async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:
        found = await limited_queues(api, vhost.name, release=(4, 1, 0), least=30)
        assert [(one.queue, one.limit, one.source) for one in found] == [("orders", 20, "default")]
        assert found[0].policy is not None
        assert found[0].policy.definition == {"delivery-limit": 30}
        found = await limited_queues(api, vhost.name, release=(4, 1, 0), names=["orders"])
        assert found[0].policy is not None
        assert found[0].policy.definition == {"delivery-limit": -1}


def test_the_command_to_run_next_can_be_pasted(program: Program, vhost: Vhost) -> None:
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue("a b")]))
    done = program.run("queue", "to-quorum", "a b", "--yes")
    assert done.stderr.decode() == "see its delivery limit: bide queue delivery-limit 'a b' --dry-run\n"
