"""Partitions between nodes in network namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

from bide.check.faults.fault import Fault, FaultSite
from bide.local_broker import LocalBroker, LocalCluster


@contextmanager
def _partition(site: FaultSite, node: LocalBroker, *, one_way: bool) -> Iterator[str]:
    cluster = cast("LocalCluster", site.cluster)  # run_check refuses partitions of others
    others = [one for one in cluster.nodes if one.name != node.name]
    cluster.cut_off(node, *others, one_way=one_way)
    yield node.name
    cluster.reconnect(node, *others)


PARTITION = Fault(
    name="partition",
    what="no packets between a node and the others",
    inject=partial(_partition, one_way=False),
    need="namespaces",
)
ONE_WAY = Fault(
    name="one-way",
    what="no packets from a node to the others",
    inject=partial(_partition, one_way=True),
    need="namespaces",
)
