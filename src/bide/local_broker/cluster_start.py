"""Start and end of the processes of a private RabbitMQ cluster."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final, TypeVar

from bide.errors import LocalBrokerError, ManagementApiError
from bide.local_broker import disks
from bide.local_broker import namespaces as networks
from bide.local_broker.configuration import LOOPBACK, BrokerNode, Ports
from bide.local_broker.launch import kill, launch
from bide.local_broker.local import LocalBroker
from bide.local_broker.processes import FOLDER_MARK
from bide.local_broker.settings import LocalBrokerSettings
from bide.local_broker.state import (
    COOKIE_FILE,
    PASSWORD_FILE,
    State,
    create_folder,
    create_subfolders,
    password_of,
    write_private,
)

_POLL_SECONDS: Final = 0.2
"""Seconds between two checks whether all nodes have joined."""

_PORT_TRIES: Final = 3

_T = TypeVar("_T")


class ClusterStart:
    """The start of the nodes of a cluster. If this process is killed meanwhile, all nodes end."""

    def __init__(
        self,
        folder: Path,
        settings: LocalBrokerSettings,
        broker_nodes: Sequence[BrokerNode],
        *,
        ephemeral: bool,
        disk_size: int | None,
        seconds: float,
    ) -> None:
        self._settings = settings
        self._broker_nodes = broker_nodes
        self._folders = node_folders(folder, len(broker_nodes))
        self._disk_size = disk_size
        self._seconds = seconds
        self._whole = State(
            folder=folder,
            ephemeral=ephemeral,
            release=settings.installation.release,
            ports=networks.PORTS,
            plugins=settings.plugins,
            commands={"server": ["sleep", "infinity"]},
            environment={FOLDER_MARK: str(folder), "PATH": settings.installation.path},
            stop_seconds=settings.stop_seconds,
            nodes=len(broker_nodes),
            cleanup=(
                *(networks.cleanup(broker_nodes) if broker_nodes[0].namespace else ()),
                *(disks.cleanup(self._folders) if disk_size is not None else ()),
            ),
        )

    def run(self, *, joined: bool) -> list[int]:
        """Start the nodes; return a file descriptor for the whole cluster, then one for each node.

        A node ends when its descriptor is closed. If another program takes a port before a node does, all nodes are
        started again with other ports.
        """
        self._share_secrets()
        tries = _PORT_TRIES
        while True:
            tries -= 1
            states = self._write()
            try:
                return self._launch(states, joined=joined)
            except LocalBrokerError:
                if tries == 0 or not any(state.taken_ports() for state in states):
                    raise

    def _share_secrets(self) -> None:
        """Give all nodes the cookie and the password of the first one."""
        first, *others = self._folders
        for folder in self._folders:
            create_folder(folder)
            create_subfolders(folder)
        password = password_of(first)
        for folder in others:
            write_private(folder / PASSWORD_FILE, password + "\n")
            write_private(folder / COOKIE_FILE, (first / COOKIE_FILE).read_text(encoding="ascii"))

    def _write(self) -> list[State]:
        """Choose ports and write the configuration of each node."""
        states: list[State] = []
        used: set[int] = set()
        for folder, broker_node in zip(self._folders, self._broker_nodes, strict=True):
            if broker_node.namespace:
                ports = networks.PORTS
            else:
                before = State.load(folder)
                ports = Ports.choose(before=before.ports if before else None, exclude=used)
                used |= set(asdict(ports).values())
                ports = replace(ports, epmd=states[0].ports.epmd) if states else ports
            states.append(self._settings.write(folder, ports=ports, node=broker_node, cluster=self._broker_nodes))
        if not self._broker_nodes[0].namespace:
            epmd = self._settings.epmd_command(LOOPBACK, states[0].ports.epmd)
            self._whole = replace(self._whole, commands={"server": epmd})
        return states

    def _launch(self, states: Sequence[State], *, joined: bool) -> list[int]:
        owner_fds: dict[Path, int] = {}
        errors: list[LocalBrokerError] = []

        def start(state: State) -> None:
            try:
                owner_fds[state.folder] = self._start(state)
            except LocalBrokerError as error:
                errors.append(error)
                kill_all(self._whole)  # the other nodes would wait for this one

        try:
            owner_fds[self._whole.folder] = self._start(self._whole)
            if self._broker_nodes[0].namespace:
                networks.create(self._broker_nodes)
            if self._disk_size is not None:
                disks.create(self._folders, self._disk_size)
            in_parallel(start, states)
            if errors:
                raise errors[0]
            if joined:
                self._wait_until_joined()
        except BaseException:
            kill_all(self._whole)
            for owner_fd in owner_fds.values():
                os.close(owner_fd)
            raise
        return [owner_fds[state.folder] for state in (self._whole, *states)]

    def _start(self, state: State) -> int:
        owner_fd = launch(state, seconds=self._seconds, outlive=False)
        assert owner_fd is not None
        return owner_fd

    def _wait_until_joined(self) -> None:
        deadline = time.monotonic() + self._seconds
        while not all(self._sees_all(LocalBroker(folder)) for folder in self._folders):
            if time.monotonic() >= deadline:
                raise LocalBrokerError(
                    f"the nodes in {self._whole.folder} did not become one cluster within {self._seconds:g} s: read "
                    "the logs in n1/log"
                )
            time.sleep(_POLL_SECONDS)  # no event reports that a node has joined

    def _sees_all(self, node: LocalBroker) -> bool:
        with suppress(ManagementApiError):
            return [one["running"] for one in node.management.call("GET", "nodes")] == [True] * len(self._folders)
        return False


def on_loopback(count: int) -> list[BrokerNode]:
    """Return nodes on this machine's loopback address."""
    return [BrokerNode(f"bide{number}@localhost") for number in range(1, count + 1)]


def formation(nodes: Sequence[BrokerNode]) -> list[str]:
    """Return the lines of ``rabbitmq.conf`` with which these nodes join each other at their first start."""
    names = [f"cluster_formation.classic_config.nodes.{number} = {node.name}" for number, node in enumerate(nodes, 1)]
    return ["cluster_formation.peer_discovery_backend = classic_config", *names]


def node_folders(folder: Path, count: int) -> list[Path]:
    return [folder / f"n{number}" for number in range(1, count + 1)]


def kill_all(whole: State) -> None:
    """Kill all processes of a cluster, and remove its network and the disks of its nodes."""
    in_parallel(kill, node_folders(whole.folder, whole.nodes))
    kill(whole.folder)
    for command in whole.cleanup:
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def in_parallel(action: Callable[[_T], None], items: Collection[_T]) -> None:
    """Call a function with each of the items in a thread of its own; raise the first error when all have ended."""
    with ThreadPoolExecutor(len(items)) as threads:
        calls = [threads.submit(action, item) for item in items]
    for call in calls:
        call.result()
