"""A fault as a value: its action and repair, its effect on messages, and its needs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

from bide.errors import BideError, LocalBrokerError

if TYPE_CHECKING:
    from bide.check.processes import CommandProcess
    from bide.local_broker import LocalBroker

_Result = TypeVar("_Result")

Need = Literal["namespaces", "faketime", "processes", "disks"]


class Cluster(Protocol):
    """The parts of :class:`bide.local_broker.LocalCluster` that a run uses; a single node can have them too."""

    @property
    def nodes(self) -> Sequence[LocalBroker]: ...

    @property
    def folder(self) -> Path: ...

    @property
    def release(self) -> str: ...

    @property
    def has_namespaces(self) -> bool: ...

    @property
    def management_url(self) -> str: ...

    def vhost_url(self, vhost: str) -> str: ...


@dataclass(slots=True, kw_only=True)
class FaultSite:
    """The cluster, virtual host and processes that faults affect.

    Attributes:
        processes: gates and relays that a fault may kill.
        busy: the numbers of the nodes that have a fault, from 1.
    """

    cluster: Cluster
    vhost: str
    rng: random.Random
    processes: Sequence[CommandProcess] = ()
    busy: set[int] = field(default_factory=set)

    def healthy_nodes(self) -> list[tuple[int, LocalBroker]]:
        """The nodes without a fault, with their numbers."""
        return [(number, node) for number, node in enumerate(self.cluster.nodes, 1) if number not in self.busy]

    def running_node(self) -> LocalBroker:
        """A node that answers.

        Raises:
            LocalBrokerError: there is none at the moment.
        """
        for _, node in self.healthy_nodes():
            if node.running and not node.paused:
                return node
        raise LocalBrokerError("each node has a fault: wait for the end of one, or use more nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A kind of fault.

    Attributes:
        what: a description in one line.
        inject: a blocking context manager that begins the fault when it is entered and repairs it at its exit. It
            yields the target of the fault as text, such as the name of a node.
        hits_node: whether the fault affects one node, which gets no other fault meanwhile.
        late: whether the fault may delay messages.
        twice: whether messages may arrive twice because of the fault; see docs/guarantees.md.
        clock_step: the error of a node's clock, in seconds.
        clock_rate: the error that a node's clock gains, in seconds per second.
        need: a requirement on the run; None if there is none.
    """

    name: str
    what: str
    inject: Callable[[FaultSite, LocalBroker], AbstractContextManager[str]]
    hits_node: bool = True
    late: bool = True
    twice: bool = True
    clock_step: float = 0.0
    clock_rate: float = 0.0
    need: Need | None = None


_PATIENCE: Final = 180.0
"""Seconds after which :func:`insist` gives up."""

_PAUSE: Final = 1.0
"""Seconds between two attempts."""


def insist(action: Callable[[], _Result]) -> _Result:
    """Repeat an action on a node that may be too busy to answer, until the action succeeds.

    Raises:
        BideError: the action still failed after three minutes.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return action()
        except BideError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE)  # before the next attempt
