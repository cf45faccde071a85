"""A private RabbitMQ cluster, on loopback or in network namespaces."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, final

from bide.errors import LocalBrokerError
from bide.local_broker import disks
from bide.local_broker import namespaces as networks
from bide.local_broker.cluster_start import (
    ClusterStart,
    formation,
    in_parallel,
    kill_all,
    node_folders,
    on_loopback,
)
from bide.local_broker.configuration import PLUGINS, USER, BrokerNode, amqp_url
from bide.local_broker.launch import halt, let_outlive
from bide.local_broker.local import LocalBroker
from bide.local_broker.management import Management
from bide.local_broker.settings import START_TIMEOUT, STOP_TIMEOUT, make_settings
from bide.local_broker.state import State, choose_folder, create_folder, find_folder, locked, remove_folder
from bide.runtime.wording import quantity

MAX_NODES: Final = 9


@final
class LocalCluster:
    """RabbitMQ nodes on this machine that are one cluster. Create it with :meth:`start` or :func:`find_running`.

    Attributes:
        nodes: the nodes. Stop, kill, pause or restart each of them like a broker on its own.
    """

    def __init__(self, folder: Path, *, owner_fds: Sequence[int] = ()) -> None:
        """Attach to the cluster in *folder*; use :meth:`start` or :func:`find_running` instead."""
        self._folder = folder
        folders = node_folders(folder, self._state().nodes)
        fds: Sequence[int | None] = owner_fds or [None] * (1 + len(folders))
        self._owner_fd, *node_fds = fds
        self.nodes = tuple(LocalBroker(one, owner_fd=fd) for one, fd in zip(folders, node_fds, strict=True))

    @classmethod
    def start(
        cls,
        folder: Path | None = None,
        *,
        nodes: int = 3,
        joined: bool = True,
        namespaces: bool = False,
        disk_size: int | None = None,
        ephemeral: bool = False,
        detached: bool | None = None,
        home: Path | None = None,
        chroot: Path | None = None,
        plugins: Sequence[str] = PLUGINS,
        extra_config: str = "",
        environment: Mapping[str, str] | None = None,
        timeout: timedelta = START_TIMEOUT,
    ) -> Self:
        """Start a cluster, and wait until each node sees all others. A running cluster in *folder* is not changed.

        A cluster also counts as running if some of its nodes are stopped.

        Args:
            folder: where the cluster keeps its files; by default as for :meth:`LocalBroker.start`.
            nodes: the number of nodes, 2 to 9.
            joined: make the nodes one cluster. Otherwise each is a cluster of its own, until ``rabbitmqctl
                join_cluster``.
            namespaces: run each node in a network namespace of its own, for :meth:`cut_off` and :meth:`unplug`. This
                needs root on Linux, and iproute2. The nodes have addresses that only this machine reaches.
            disk_size: keep the data of each node on a file system of its own, in memory, with this many bytes. It
                needs root on Linux, and is empty whenever the cluster as a whole has been stopped.
            ephemeral: see :meth:`LocalBroker.start`, like the remaining arguments.
            detached: see above.
            home: see above.
            chroot: see above.
            plugins: see above.
            extra_config: see above.
            environment: see above.
            timeout: how long the start may take.

        Raises:
            BrokerNotFoundError: no RabbitMQ is installed.
            LocalBrokerError: a node did not start, or the nodes did not become one cluster; or the folder cannot be
                used, for example because it has another number of nodes.
            ValueError: the number of nodes is out of range, or rabbitmq_management is not in *plugins*.
        """
        if not 2 <= nodes <= MAX_NODES:
            raise ValueError(f"a cluster cannot have {nodes} nodes: give 2 to {MAX_NODES}")
        if disk_size is not None:
            disks.check()
        broker_nodes = networks.choose_nodes(nodes) if namespaces else on_loopback(nodes)
        settings = make_settings(
            home=home,
            chroot=chroot,
            ephemeral=False,  # the supervisor of the cluster removes its folder, with those of the nodes
            dead_letter_prefetch=1_000,
            plugins=plugins,
            extra_config="\n".join([*formation(broker_nodes if joined else ()), extra_config]),
            environment=environment,
        )
        outlive = not ephemeral if detached is None else detached
        seconds = timeout.total_seconds()
        folder = choose_folder(folder, ephemeral=ephemeral)
        create_folder(folder)
        with locked(folder, seconds=seconds):
            before = State.load(folder)
            if before is not None:
                if before.nodes != nodes:
                    raise LocalBrokerError(
                        f"the broker in {folder} has {quantity(before.nodes or 1, 'node')}, not {nodes}: "
                        "give another folder"
                    )
                if (had_namespaces := _has_namespaces(folder)) != namespaces:
                    raise LocalBrokerError(
                        f"the nodes in {folder} were {'' if had_namespaces else 'not '}started in network namespaces: "
                        "start them the same way, or give another folder"
                    )
                if (found := cls(folder)).running:
                    return found
                found._end(before, seconds=seconds)
            (folder / "log").mkdir(exist_ok=True)
            starting = ClusterStart(
                folder, settings, broker_nodes, ephemeral=ephemeral, disk_size=disk_size, seconds=seconds
            )
            try:
                owner_fds = starting.run(joined=joined)
            except BaseException:
                if ephemeral:
                    remove_folder(folder, keep="log")
                raise
            if outlive:
                for owner_fd in owner_fds:
                    let_outlive(owner_fd)
        return cls(folder, owner_fds=() if outlive else owner_fds)

    @property
    def folder(self) -> Path:
        """The folder with all files of the cluster, a subfolder for each node."""
        return self._folder

    @property
    def running(self) -> bool:
        """Whether a node is running."""
        return any(node.running for node in self.nodes)

    @property
    def release(self) -> str:
        """The release of RabbitMQ, for example ``"3.10.8"``."""
        return self._state().release

    @property
    def url(self) -> str:
        """The AMQP URL of the virtual host ``/`` with all nodes, and the password."""
        return self.vhost_url("/")

    @property
    def management_url(self) -> str:
        """The base URL of the management API and UI of the first node that answers, with the password."""
        return self._contact.management_url

    @property
    def stream_url(self) -> str | None:
        """The URL of the stream protocol of the first node that answers; None without its plugin."""
        return self._contact.stream_url

    @property
    def stream_port(self) -> int | None:
        """The port of the stream protocol of the first node that answers; None without its plugin."""
        return self._contact.stream_port

    @property
    def management(self) -> Management:
        """The management API of the first node that answers, for calls as the administrator."""
        return self._contact.management

    def rabbitmqctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl --quiet`` on the first node that answers; see :meth:`LocalBroker.rabbitmqctl`."""
        return self._contact.rabbitmqctl(*arguments)

    def vhost_url(self, vhost: str) -> str:
        """Return the AMQP URL of a virtual host, with all nodes in their order."""
        return amqp_url([node.host for node in self.nodes], vhost, user=USER, password=self.nodes[0].password)

    def node(self, number: int) -> LocalBroker:
        """Return a node by its number, from 1 on.

        Raises:
            LocalBrokerError: there is no such node.
        """
        if not 1 <= number <= len(self.nodes):
            raise LocalBrokerError(
                f"the cluster in {self._folder} has no node {number}: give a number from 1 to {len(self.nodes)}"
            )
        return self.nodes[number - 1]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``bide broker status --json``, including passwords in URLs."""
        return {
            "url": self.url,
            "management_url": self.management_url,
            "stream_url": self.stream_url,
            "release": self.release,
            "folder": str(self._folder),
            "running": self.running,
            "nodes": [
                {
                    "number": number,
                    "name": node.name,
                    "status": "paused" if node.paused else "running" if node.running else "stopped",
                    **node.to_dict(),
                }
                for number, node in enumerate(self.nodes, 1)
            ],
        }

    def stop(self, *, timeout: timedelta = STOP_TIMEOUT) -> None:
        """Stop all nodes gracefully, and kill them after *timeout*. Kill an ephemeral cluster and remove its folder.

        Raises:
            LocalBrokerError: another process holds the cluster's lock, or a process does not end.
        """
        if self._folder.exists():
            with locked(self._folder, seconds=timeout.total_seconds()):
                self._end(self._state(), seconds=timeout.total_seconds())
        if self._owner_fd is not None:
            os.close(self._owner_fd)
            self._owner_fd = None

    @property
    def has_namespaces(self) -> bool:
        """Whether each node has a network namespace of its own, which the following methods require."""
        return _has_namespaces(self._folder)

    def cut_off(self, node: LocalBroker, *others: LocalBroker, one_way: bool = False) -> None:
        """Drop all packets between a node and others; clients still reach all of them.

        Args:
            one_way: drop only the packets from the node to the others, not those from the others to the node.
        """
        networks.cut_off(_place(node), map(_place, others), one_way=one_way)

    def reconnect(self, node: LocalBroker, *others: LocalBroker) -> None:
        """Undo :meth:`cut_off`."""
        networks.reconnect(_place(node), map(_place, others))

    def unplug(self, node: LocalBroker) -> None:
        """Drop all packets to and from a node, including those of clients."""
        networks.unplug(_place(node))

    def plug(self, node: LocalBroker) -> None:
        """Undo :meth:`unplug`."""
        networks.plug(_place(node))

    @property
    def _contact(self) -> LocalBroker:
        return next((node for node in self.nodes if node.running and not node.paused), self.nodes[0])

    def _state(self) -> State:
        state = State.load(self._folder)
        if state is None or not state.nodes:
            raise LocalBrokerError(f"there is no cluster in {self._folder}: start one with several nodes")
        return state

    def _end(self, state: State, *, seconds: float) -> None:
        if state.ephemeral:
            kill_all(state)
        in_parallel(lambda node: node.stop(timeout=timedelta(seconds=seconds)), self.nodes)
        halt(state, seconds=seconds)
        kill_all(state)
        if state.ephemeral:
            remove_folder(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"LocalCluster({str(self._folder)!r})"


def find_running(folder: Path | None = None) -> LocalBroker | LocalCluster | None:
    """Return the broker or cluster that is running in *folder* (by default :func:`default_folder`), or None."""
    broker = attach(find_folder(folder))
    return broker if broker.running else None


def attach(folder: Path) -> LocalBroker | LocalCluster:
    """Return the broker or cluster in *folder*, which may be stopped."""
    state = State.load(folder)
    return LocalCluster(folder) if state is not None and state.nodes else LocalBroker(folder)


def _has_namespaces(folder: Path) -> bool:
    first = State.load(node_folders(folder, 1)[0])
    return first is not None and first.node.namespace is not None


def _place(node: LocalBroker) -> BrokerNode:
    state = State.load(node.folder)
    if state is None:
        raise LocalBrokerError(f"there is no node in {node.folder} any more: start the cluster again")
    return state.node
