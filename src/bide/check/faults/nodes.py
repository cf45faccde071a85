"""Killed, paused and replaced nodes, and killed gates and relays."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from bide.check.faults.fault import Fault, FaultSite, insist
from bide.local_broker import LocalBroker


@contextmanager
def _kill(site: FaultSite, node: LocalBroker) -> Iterator[str]:
    node.kill()
    yield node.name
    node.restart()


@contextmanager
def _pause(site: FaultSite, node: LocalBroker) -> Iterator[str]:
    node.pause()
    yield node.name
    node.resume()


@contextmanager
def _replace(site: FaultSite, node: LocalBroker) -> Iterator[str]:
    """Remove a node from the cluster. The repair adds an empty node of the same name, with members of all queues."""
    insist(lambda: site.running_node().rabbitmqctl("shrink", node.name, tool="rabbitmq-queues"))
    node.stop()
    insist(lambda: site.running_node().rabbitmqctl("forget_cluster_node", node.name))
    yield node.name
    for entry in (node.folder / "data").iterdir():  # the folder itself may be a file system
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    node.restart()
    insist(lambda: _join(site.running_node(), node))
    insist(lambda: site.running_node().rabbitmqctl("grow", node.name, "all", tool="rabbitmq-queues"))


def _join(member: LocalBroker, node: LocalBroker) -> None:
    """Join the cluster, unless the node has found it by itself."""
    members = [one["name"] for one in member.management.call("GET", "nodes")]
    if node.name not in members:
        node.rabbitmqctl("stop_app")
        node.rabbitmqctl("join_cluster", member.name)
        node.rabbitmqctl("start_app")


@contextmanager
def _kill_process(site: FaultSite, node: LocalBroker) -> Iterator[str]:
    process = site.rng.choice(site.processes)
    process.kill()
    yield process.name


KILL = Fault(name="kill", what="kill -9 of a node", inject=_kill)
PAUSE = Fault(name="pause", what="SIGSTOP of a node", inject=_pause)
REPLACE = Fault(name="replace", what="an empty node takes the place of another", inject=_replace)
KILL_PROCESS = Fault(
    name="kill-process", what="kill -9 of a gate or relay", inject=_kill_process, hits_node=False, need="processes"
)
