"""What ``bide delay verify`` says of replicas, on a cluster of three."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bide.admin.infrastructure import install
from bide.admin.management import ManagementApi
from bide.admin.report import Finding
from bide.admin.taps import turn_on
from bide.admin.verify import verify
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.broker import LocalBroker
from bide.broker.state import State
from tests.broker.receiving import eventually
from tests.faults.conftest import CLOCK
from tests.patience import PATIENCE
from tests.support import Rabbitmq

VHOST = "the shop"


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a cluster, or a node that is going to be one.

    Attributes:
        first: the node that owns the epmd and the cookie, and whose user the others take over.
    """

    name: str
    broker: LocalBroker
    first: LocalBroker

    @property
    def url(self) -> BrokerUrl:
        """The AMQP URL of this node alone."""
        return BrokerUrl.parse(self.broker.vhost_url(VHOST, password=self.first.password))

    def run(self, tool: str, *arguments: str) -> str:
        """Run one of RabbitMQ's command line tools on this node."""
        state = State.load(self.broker.folder)
        assert state is not None
        *before, rabbitmqctl = state.commands["rabbitmqctl"]
        done = subprocess.run(
            [*before, rabbitmqctl.removesuffix("rabbitmqctl") + tool, "--node", self.name, "--quiet", *arguments],
            env=state.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"{tool} {arguments}: {done.stdout} {done.stderr}"
        return done.stdout

    def join(self, other: Node) -> None:
        """Join the cluster of another node."""
        for arguments in (["stop_app"], ["join_cluster", other.name], ["start_app"]):
            self.run("rabbitmqctl", *arguments)


@pytest.fixture
def nodes(rabbitmq: Rabbitmq) -> Iterator[list[Node]]:
    """Three nodes that could be one cluster."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bide-nodes-")))
        first = stack.enter_context(rabbitmq.start(folder / "1"))
        state = State.load(first.folder)
        assert state is not None
        nodes = [Node("bide@localhost", first, first)]
        for name in ("two@localhost", "three@localhost"):
            shared = {key: state.environment[key] for key in ("HOME", "ERL_EPMD_PORT")}
            environment = {**shared, "RABBITMQ_NODENAME": name}
            nodes.append(Node(name, stack.enter_context(rabbitmq.start(folder / name, environment=environment)), first))
        yield nodes


def commands(finding: Finding) -> list[list[str]]:
    """The commands that a finding names."""
    return [shlex.split(one) for one in finding.text.partition("Run ")[2].split(" && ")]


@pytest.mark.long
async def test_queues_that_stay_on_one_node_do_not_pass_verify(nodes: list[Node]) -> None:
    one, two, three = nodes
    one.broker.add_vhost(VHOST)
    connection = await Connection.open(one.url)
    await install(connection, CLOCK)
    await turn_on(connection, CLOCK)
    async with ManagementApi.of(one.url, one.broker.management_url) as api:

        async def findings(check: str) -> list[Finding]:
            report = await verify(connection, CLOCK, api)
            return [finding for finding in report.findings if finding.check == check]

        async def is_fine(check: str) -> bool:
            return {finding.status for finding in await findings(check)} == {"ok"}

        assert await is_fine("replication")
        for node in (two, three):
            node.join(one)
        (finding,) = await findings("replication")
        assert finding.status == "problem", finding.text
        assert "23 of 23 queues have fewer than 3 members ('bide.v1.s1', 'bide.v1.s10' and 21 more)" in finding.text
        # The only member of a queue is its leader, and to spread leaders would be no help.
        assert await findings("leaders") == []
        for tool, *arguments in commands(finding):
            one.run(tool, *arguments)
        await eventually(lambda: is_fine("replication"), step=1)

        (finding,) = await findings("leaders")
        assert finding.status == "warning"
        assert "bide@localhost leads 21 of 21 quorum queues" in finding.text
        assert (await verify(connection, CLOCK, api)).ok
        for tool, *arguments in commands(finding):
            one.run(tool, *arguments)
        await eventually(lambda: is_fine("leaders"), step=1)

        for name in (one.name, two.name):
            one.run("rabbitmq-queues", "delete_member", "--vhost", VHOST, "bide.v1.s5", name)
        (finding,) = await findings("replication")
        assert "1 of 23 queues have fewer than 3 members ('bide.v1.s5')" in finding.text
        three.broker.kill()

        async def has_noticed() -> bool:
            texts = [f"{finding.status}: {finding.text}" for finding in await findings("replication")]
            return len(texts) == 3 and texts[2].startswith(
                "warning: 22 of 23 queues lack a member on 'three@localhost'"
            )

        await eventually(has_noticed, step=1)
        _, stopped, degraded = await findings("replication")
        assert stopped.status == "problem"
        assert "1 of 23 queues have no majority of their members online ('bide.v1.s5')" in stopped.text
        assert degraded.text.endswith("start 'three@localhost'")
        await connection.close()
