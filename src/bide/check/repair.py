"""What operators of a cluster do after faults."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Final

from bide.check.faults.fault import Cluster, insist
from bide.errors import LocalBrokerError, ManagementApiError
from bide.local_broker import LocalBroker

_POLL_SECONDS: Final = 0.5
"""Seconds between two checks of the nodes."""

_RESTART_AFTER: Final = 60.0
"""Seconds after which a node that does not see the others is restarted."""

_REPLACE_WORKERS: Final = """
    S = rabbit_fifo_dlx_sup,
    [begin
         Queue = element(2, sys:get_state(P)),
         ok = supervisor:terminate_child(S, P),
         {ok, _} = supervisor:start_child(S, [Queue])
     end || {_, P, _, _} <- supervisor:which_children(S), is_pid(P)], ok.
"""
"""Erlang code that replaces the dead-letter workers of a node. The same is in docs/delays.md."""


def make_whole(
    cluster: Cluster, *, timeout: timedelta = timedelta(minutes=5), give_up: Callable[[], bool] = lambda: False
) -> None:
    """Wait until each node sees all others. Restart nodes that do not, as an operator does after a partition.

    Args:
        give_up: asked again and again whether to return although the nodes do not see each other.

    Raises:
        LocalBrokerError: the nodes did not become one cluster in time.
    """
    begun = time.monotonic()
    restart_at = begun + _RESTART_AFTER
    while apart := [node for node in cluster.nodes if not _sees(node, len(cluster.nodes))]:
        if give_up():
            return
        now = time.monotonic()
        if now >= begun + timeout.total_seconds():
            raise LocalBrokerError(
                f"the nodes of the cluster in {cluster.folder} did not find each other within "
                f"{timeout.total_seconds():g} s: read their logs"
            )
        if now >= restart_at:
            apart[-1].restart()
            restart_at = time.monotonic() + _RESTART_AFTER
        time.sleep(_POLL_SECONDS)  # no event reports that a node sees the others


def replace_dead_letter_workers(cluster: Cluster) -> None:
    """Have the dead-letter workers of all nodes register with the leaders of their queues.

    If two leaders follow each other quickly, the worker of the first may register with the second, in place of the
    second's own worker (rabbitmq-server, pull request 16203). Then nothing leaves the queue after its delay.
    """
    for node in cluster.nodes:
        insist(partial(node.rabbitmqctl, "eval", _REPLACE_WORKERS))


def _sees(node: LocalBroker, count: int) -> bool:
    with suppress(ManagementApiError):
        found = node.management.call("GET", "nodes")
        return [one["running"] for one in found] == [True] * count and not any(one.get("partitions") for one in found)
    return False
