"""Every pattern of the catalogue: declared, found on the broker, and deleted."""

from __future__ import annotations

import asyncio

import bide
from bide.admin.apply import apply
from bide.admin.live_topology import compare, read_topology
from bide.admin.locate import management_api
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.patterns.building import references
from bide.patterns.catalogue import PATTERNS
from tests.broker.receiving import eventually
from tests.support import Vhost

ELSEWHERE = {
    "delayed-message-exchange": "needs a plugin that is not here",
    "delayed-delivery-cascade": "370 queues take seconds; the cascade of no. 13 and the clock have tests of their own",
    "exclusive-queue": "other connections cannot see it",
}


async def test_an_applied_pattern_is_found_and_removed(client: bide.Client, vhost: Vhost) -> None:
    async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:
        for pattern in PATTERNS:
            if pattern.name in ELSEWHERE:
                continue
            topology = pattern.sample_topology()
            external = references(topology)
            # What a pattern leads to without holding it is there already, as the pattern says.
            there = bide.Topology(bide.Exchange(name, "topic") for name in external)
            await client.declare(there)
            assert compare(await read_topology(api, vhost.name), topology), pattern.name
            await client.declare(topology, external=external)
            assert not compare(await read_topology(api, vhost.name), topology), pattern.name
            await client.destroy(topology | there, external=external)
            left = await read_topology(api, vhost.name)
            assert not left.queues, pattern.name
            assert {one.name for one in left.exchanges if not one.name.startswith("amq.")} == set(), pattern.name
            assert not left.bindings, pattern.name


async def test_policies_are_included_on_request(client: bide.Client, vhost: Vhost) -> None:
    await client.declare(bide.Topology(queues=[bide.Queue("q", arguments={"x-max-length": 10})]))
    vhost.broker.management.call(
        "PUT",
        *("policies", vhost.name, "limits"),
        body={"pattern": "^q$", "apply-to": "queues", "definition": {"max-length": 5, "message-ttl": 60_000}},
    )
    async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:

        async def counted() -> bool:
            (queue,) = (await read_topology(api, vhost.name, policies=True)).queues
            return dict(queue.arguments) == {"x-max-length": 5, "x-message-ttl": 60_000}

        await eventually(counted)
        (queue,) = (await read_topology(api, vhost.name)).queues
        assert dict(queue.arguments) == {"x-max-length": 10}


async def test_the_overflow_policy_of_a_quorum_queue_overrides_its_argument(client: bide.Client, vhost: Vhost) -> None:
    overflow: dict[str, str | int] = {"x-overflow": "reject-publish", "x-max-length": 10}
    await client.declare(
        bide.Topology(queues=[bide.Queue.quorum("quorum", overflow), bide.Queue("classic", arguments=overflow)])
    )
    vhost.broker.management.call(
        "PUT",
        *("policies", vhost.name, "drop"),
        body={"pattern": ".*", "apply-to": "queues", "definition": {"overflow": "drop-head"}},
    )
    async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:

        async def counted() -> bool:
            queues = (await read_topology(api, vhost.name, policies=True)).queues
            return {one.name: one.arguments["x-overflow"] for one in queues} == {
                "quorum": "drop-head",
                "classic": "reject-publish",
            }

        await eventually(counted)


async def test_concurrent_declarations_of_one_topology_succeed(vhost: Vhost) -> None:
    topology = next(one for one in PATTERNS if one.number == 8).sample_topology()
    connections = [await Connection.open(BrokerUrl.parse(vhost.url)) for _ in range(3)]
    applied = await asyncio.gather(*(apply(one, topology) for one in connections))
    assert len(set(applied)) == 1
    for connection in connections:
        await connection.close()
