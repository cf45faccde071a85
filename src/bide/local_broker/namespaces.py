"""Network namespaces of the nodes of a cluster, and partitions between them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Final

from bide.errors import LocalBrokerError
from bide.local_broker.configuration import BrokerNode, Ports
from bide.local_broker.root_commands import RootCommands

PORTS = Ports(amqp=5672, management=15672, stream=5552, distribution=25672, epmd=4369)
"""RabbitMQ's defaults, the same for each node, because each has a network of its own."""

_COMMANDS: Final = RootCommands(
    feature="nodes in network namespaces", option="the network namespaces", package="iproute2"
)


def choose_nodes(count: int) -> list[BrokerNode]:
    """Return nodes in namespaces with new names, in a network with a random address.

    Raises:
        LocalBrokerError: this system or user cannot make network namespaces.
    """
    _COMMANDS.check("ip")
    one, two = random.SystemRandom().choices(range(1, 255), k=2)
    tag = f"b{one:02x}{two:02x}"
    return [BrokerNode(f"bide{n}@n{n}", f"10.{one}.{two}.{n}", f"{tag}n{n}") for n in range(1, count + 1)]


def create(nodes: Sequence[BrokerNode]) -> None:
    """Create the namespaces, and a bridge that connects them with each other and with this machine."""
    bridge = _bridge(nodes)
    _ip("link", "add", bridge, "type", "bridge")
    _ip("link", "set", bridge, "up")
    _ip("addr", "add", f"{nodes[0].address.rpartition('.')[0]}.254/24", "dev", bridge)
    for node in nodes:
        name = _namespace(node)
        _ip("netns", "add", name)
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", name, "master", bridge, "up")
        _ip("-n", name, "addr", "add", f"{node.address}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")


def cleanup(nodes: Sequence[BrokerNode]) -> tuple[list[str], ...]:
    """Return the commands that undo :func:`create`; a command fails if its link or namespace does not exist."""
    ip = _COMMANDS.find("ip")
    each = [[ip, *words, _namespace(node)] for node in nodes for words in (("link", "del"), ("netns", "del"))]
    return (*each, [ip, "link", "del", _bridge(nodes)])


def cut_off(node: BrokerNode, others: Iterable[BrokerNode], *, one_way: bool) -> None:
    """Drop all packets between a node and others, or only those from the node; clients still reach all of them."""
    for other in others:
        _block(node, other)
        if not one_way:
            _block(other, node)


def reconnect(node: BrokerNode, others: Iterable[BrokerNode]) -> None:
    """Undo :func:`cut_off`."""
    for other in others:
        _unblock(node, other)
        _unblock(other, node)


def unplug(node: BrokerNode) -> None:
    """Drop all packets of a node in both directions."""
    _ip("link", "set", _namespace(node), "down")


def plug(node: BrokerNode) -> None:
    """Undo :func:`unplug`."""
    _ip("link", "set", _namespace(node), "up")


def _block(sender: BrokerNode, receiver: BrokerNode) -> None:
    _ip("-n", _namespace(sender), "route", "replace", "blackhole", f"{receiver.address}/32")


def _unblock(sender: BrokerNode, receiver: BrokerNode) -> None:
    # Unlike "del", "flush" does not fail if there is no such route.
    _ip("-n", _namespace(sender), "route", "flush", "exact", f"{receiver.address}/32", "type", "blackhole")


def _bridge(nodes: Sequence[BrokerNode]) -> str:
    return f"{_namespace(nodes[0]).removesuffix('n1')}br"


def _namespace(node: BrokerNode) -> str:
    """Return the name of the namespace, which is also the name of the link into it."""
    if node.namespace is None:
        raise LocalBrokerError(f"{node.name} has no network namespace: start the cluster with namespaces=True")
    return node.namespace


def _ip(*arguments: str) -> None:
    _COMMANDS.run("ip", *arguments)
