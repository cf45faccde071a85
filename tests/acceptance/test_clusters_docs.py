"""The commands for clusters in docs/delays.md and docs/clusters.md, on three nodes."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from bide.admin.schedule_log import declare_schedule_log
from bide.local_broker import LocalBroker, LocalCluster
from tests.broker.receiving import connected
from tests.broker.schedule_log import NAMES
from tests.faults.cluster import cluster
from tests.faults.test_replication import join_cluster
from tests.polling import wait_until
from tests.readme import Shell, blocks, commands_of, shape, without_left_out
from tests.support import Rabbitmq, Vhost

CLUSTERS: Final = "docs/clusters.md"
NEW: Final = "bide3@localhost"
"""The page's node rabbit@c."""


class Operator:
    """Runs commands of the pages on a node."""

    def __init__(self, node: LocalBroker, shell: Shell) -> None:
        self._node, self._shell = node, shell

    def run(self, line: str) -> str:
        tool, *arguments = shlex.split(line.replace("rabbit@c", NEW))
        if tool == "bide":
            # Problems are what these commands show.
            return self._shell.paste(f"{line} || test $? = 1")
        return self._node.rabbitmqctl(*arguments, tool=tool)

    def run_block(self, title: str) -> None:
        (text,) = (text for language, text in blocks(CLUSTERS, title) if language == "sh")
        for line in text.splitlines():
            self.run(line)

    def lines(self, verify: str) -> list[str]:
        return self.run(verify).splitlines()


@pytest.fixture
def made(rabbitmq: Rabbitmq) -> Iterator[LocalCluster]:
    """Three nodes. The time limit of the test does not count the wait for the clusters of other workers."""
    with cluster(rabbitmq, joined=False) as made:
        yield made


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_commands_add_members_and_spread_leaders(made: LocalCluster, rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    (_, session), (_, leaders), (_, after) = blocks("docs/delays.md", "Clusters")
    (verify, problem), (grow, grown) = commands_of(session)
    one, *others = made.nodes
    shell = Shell(tmp_path, rabbitmq, Vhost(name="/", url=one.url, broker=one))
    operator = Operator(one, shell)
    operator.run(verify.replace("verify", "apply"))
    for node in others:
        join_cluster(node, one)

    printed, expected = shape(operator.run(verify)), shape(problem)
    assert without_left_out(printed, expected) == expected
    (other_grow,) = set(re.findall(r"rabbitmq-queues grow [^&\n]+(?= &&|$)", problem, re.MULTILINE)) - {
        grow.replace(" --quiet", "")
    }
    printed, expected = shape(operator.run(grow)), shape(grown)
    assert without_left_out(printed, expected) == expected
    operator.run(other_grow)
    # On a slow machine some leaders move by themselves.
    wait_until(lambda: set(shape(leaders)) <= set(shape(operator.run(verify))), "one node leads most queues")

    def is_well() -> bool:
        operator.run(leaders.partition(" Run ")[2])
        return set(after.splitlines()) <= set(operator.lines(verify))

    wait_until(is_well, "all is well", step=1)
    members = after.splitlines()[0]

    operator.run_block("After a full disk")
    wait_until(lambda: members in operator.lines(verify), "the member is back")

    async def declare() -> None:
        async with connected(one.url) as connection:
            await declare_schedule_log(connection, NAMES)

    asyncio.run(declare())
    operator.run(f"rabbitmq-queues shrink {NEW}")
    operator.run(f"rabbitmq-streams delete_replica bide.v1.schedule.0 {NEW} --vhost /")
    replicated = "✓ schedule replication"

    def replication() -> set[str]:
        return {line for line in operator.lines(verify) if "replication " in line}

    missing = {"✗ replication", "✗ schedule replication"}
    wait_until(lambda: {line.partition("  ")[0] for line in replication()} == missing, "members are missing")
    operator.run_block("Add a node")
    wait_until(
        lambda: members in replication() and any(line.startswith(replicated) for line in replication()),
        "all members are there",
    )
