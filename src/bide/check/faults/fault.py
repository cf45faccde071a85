"""A fault as a value: what it does, what it may do to messages, and what it needs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

from bide.errors import BideError

if TYPE_CHECKING:
    from bide.check.processes import CommandProcess
    from bide.local_broker import LocalBroker

_Result = TypeVar("_Result")

Need = Literal["namespaces", "faketime", "processes"]


class Cluster(Protocol):
    """What a run needs of a :class:`bide.local_broker.LocalCluster`, or of a single node."""

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

    def cut_off(self, node: LocalBroker, *others: LocalBroker, one_way: bool) -> None: ...

    def reconnect(self, node: LocalBroker, *others: LocalBroker) -> None: ...


@dataclass(slots=True, kw_only=True)
class FaultSite:
    """Where faults happen.

    Attributes:
        processes: gates and relays.
        busy: nodes that have a fault.
    """

    cluster: Cluster
    vhost: str
    rng: random.Random
    processes: Sequence[CommandProcess] = ()
    busy: set[int] = field(default_factory=set)

    def healthy_nodes(self) -> list[tuple[int, LocalBroker]]:
        """The nodes without a fault, with their numbers."""
        return [(number, node) for number, node in enumerate(self.cluster.nodes, 1) if number not in self.busy]

    def contact(self) -> LocalBroker:
        """A node that answers."""
        return next((node for _, node in self.healthy_nodes() if node.running and not node.paused))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A kind of fault.

    Attributes:
        what: for the help.
        inject: a context manager that begins the fault and repairs it, in a thread. It gives a text, such as the node.
        hits_node: whether it takes a node, which then has no other fault.
        late: whether messages may be late.
        twice: whether messages may arrive twice; see docs/guarantees.md.
        clock_step: by how many seconds the clock of a node is wrong, at most.
        clock_rate: by how many seconds it gets wrong per second.
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
_PAUSE: Final = 1.0
"""Seconds until a busy node is asked again."""


def insist(action: Callable[[], _Result]) -> _Result:
    """Do something on a node that may be too busy to answer, until it succeeds.

    Raises:
        BideError: it did not succeed within three minutes.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return action()
        except BideError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE)
