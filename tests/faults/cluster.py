"""A cluster of the RabbitMQ under test."""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

from bide.local_broker import LocalCluster
from tests.support import Rabbitmq
from tests.timeouts import TIMEOUT


@contextlib.contextmanager
def cluster(
    rabbitmq: Rabbitmq,
    *,
    joined: bool = True,
    namespaces: bool = False,
    polling: int = 5_000,
    environment: Mapping[str, str] | None = None,
) -> Iterator[LocalCluster]:
    """Run a cluster of three nodes; see :meth:`LocalCluster.start`.

    Its nodes do not consider a silent one down, as they do after 45 to 75 seconds by default: Mnesia would then stay
    partitioned in the tests that follow.

    Args:
        rabbitmq: the RabbitMQ under test.
        joined: make them one cluster; otherwise each is one of its own, until :func:`join_cluster`.
        namespaces: run each node in a network namespace of its own.
        polling: milliseconds between two checks of RabbitMQ's failure detector; 5,000 is its default. Leaders of nodes
            that fail are replaced after one to two of them.
        environment: further variables for the nodes.
    """
    with (Path(tempfile.gettempdir()) / "bide-cluster.lock").open("w") as lock:
        # One at a time: three brokers are enough for a machine.
        fcntl.flock(lock, fcntl.LOCK_EX)
        arguments = f"-aten poll_interval {polling} -kernel net_ticktime {2 * int(TIMEOUT)}"
        with LocalCluster.start(
            joined=joined,
            namespaces=namespaces,
            ephemeral=True,
            home=rabbitmq.home,
            chroot=rabbitmq.chroot,
            environment={"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": arguments, **(environment or {})},
            timeout=timedelta(seconds=TIMEOUT),
        ) as made:
            yield made
