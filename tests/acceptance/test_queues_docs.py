"""The commands of docs/queues.md."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

import bide
from bide.admin.locate import management_api
from bide.amqp.url import BrokerUrl
from bide.client.bulk.sync import BulkPublisher
from bide.delay.cascade import Policy
from tests.acceptance.test_cli import Program
from tests.support import Vhost

PAGE = (Path(__file__).parents[2] / "docs" / "queues.md").read_text(encoding="utf-8")


def commands(title: str) -> list[tuple[str, str]]:
    """The commands of a section and their output."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    shown = [one.partition("\n") for block in blocks for one in re.split(r"^\$ bide ", block, flags=re.MULTILINE)[1:]]
    assert shown
    return [(command, output) for command, _, output in shown]


def test_the_page_shows_the_output_of_to_quorum(vhost: Vhost) -> None:
    queue = bide.Queue("jobs", arguments={"x-max-length": 100_000, "x-queue-mode": "lazy"})
    with bide.connect_sync(vhost.url) as client:
        client.declare(
            bide.Topology([bide.Exchange("shop", "topic")], [queue], [bide.Binding("shop", "jobs", "job.*")])
        )
    with BulkPublisher(vhost.url) as publisher:
        publisher.publish_many(bide.OutgoingMessage("{}", to="jobs") for _ in range(1000))
    for command, output in commands("Turn a classic queue into a quorum queue"):
        done = Program(vhost).run(*command.split())
        assert (done.stdout + done.stderr).decode() == output, command


def test_the_page_shows_the_output_of_delivery_limit(vhost: Vhost) -> None:
    with bide.connect_sync(vhost.url) as client:
        if client.release() >= (4, 0):
            pytest.skip("the page shows the output on RabbitMQ 3.10")
        client.declare(bide.Topology(queues=[bide.Queue.quorum("orders"), bide.Queue.quorum("jobs")]))

    async def limit() -> None:
        policy = Policy(name="housekeeping", pattern="^orders$", definition={"delivery-limit": 3}, apply_to="queues")
        async with management_api(BrokerUrl.parse(vhost.url), vhost.broker.management_url) as api:
            await api.set_policy(vhost.name, policy)

    asyncio.run(limit())
    for command, output in commands("Raise the delivery limit"):
        done = Program(vhost).run(*command.split())
        assert (done.stdout + done.stderr).decode() == output, command
