"""A publish that cannot be confirmed, because two of three nodes are down."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest

import bide
from bide.errors import PublishError
from bide.local_broker import LocalCluster
from bide.messages.outgoing import OutgoingMessage
from tests.broker.receiving import eventually, fresh
from tests.faults.cluster import cluster
from tests.faults.conftest import CLOCK
from tests.support import Rabbitmq


@pytest.fixture
def nodes(rabbitmq: Rabbitmq) -> Iterator[LocalCluster]:
    with cluster(rabbitmq) as made:
        yield made


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_lost_majority_is_named_in_every_error(nodes: LocalCluster) -> None:
    one, *others = nodes.nodes
    queue = fresh("q")
    async with (
        bide.connect(one.url, infrastructure=CLOCK) as single,
        bide.connect(nodes.url, infrastructure=CLOCK) as several,
    ):
        await single.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        for client in (single, several):
            await client.publish(b"", to=queue)
            await client.publish(b"", to=queue, delay="1s")
        for node in others:
            await asyncio.to_thread(node.kill)
        async with bide.connect(one.url, infrastructure=CLOCK) as late:
            publishing = [
                publish
                for client in (single, several, late)
                for publish in (
                    client.publish(b"", to=queue),
                    client.publish(b"", to=queue, delay="1s"),
                    client.publish_many([OutgoingMessage(b"", to=queue)]),
                    client.publish_many([OutgoingMessage(b"", to=queue, delay="1s")]),
                )
            ]
            results = await asyncio.gather(*publishing, return_exceptions=True)
        for result in results:
            assert isinstance(result, bide.BideError), result
            # RabbitMQ 3.10 may refuse a message for a queue of which this connection has never seen a leader.
            assert re.search(r"the majority of (the cluster's|its) nodes is lost", str(result))
        # If the node answers and the client knows of other hosts, it also says that these do not let it in. A busy node
        # may be silent for a while.
        for result in results[4:6]:
            if "answers, but confirms and declares nothing" in str(result):
                assert all(node.host in str(result) for node in others), result
        for node in others:
            await asyncio.to_thread(node.restart)

        async def goes_on() -> bool:
            try:
                for client in (single, several):
                    await client.publish(b"", to=queue)
                    await client.publish(b"", to=queue, delay="1s")
            except PublishError:
                return False
            return True

        await eventually(goes_on)
