"""The cluster of a run, and the cleanup after killed runs."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from bide.check.faults.broker import POLICY, limits_of, set_limits
from bide.check.faults.clock import faketime
from bide.check.faults.disk import DISK_SIZE
from bide.check.faults.fault import Cluster
from bide.check.repair import make_whole
from bide.errors import InvalidInputError, LocalBrokerError, ManagementApiError
from bide.local_broker import LocalBroker, LocalCluster, default_folder
from bide.local_broker.cluster import attach
from bide.local_broker.installation import find_installation, numbers
from bide.local_broker.state import State

VHOST: Final = "bide-check"
"""The virtual host of a run. It is deleted with everything in it."""

_LOCK: Final = "lock"
_CLUSTER: Final = "cluster"
_TARGET: Final = "cluster.json"

_NO_PARTITION_HANDLING: Final = (4, 3)
"""The first release without strategies for partitions, according to its release notes. It accepts the setting."""

_TICK_SECONDS: Final = 5
"""The ``net_ticktime`` of nodes with a chosen ``cluster_partition_handling``, which acts after about this time. With
the default of 60 s, a partition of the default length would end before."""


class OneNode:
    """A single node in place of a cluster."""

    has_namespaces = False

    def __init__(self, node: LocalBroker) -> None:
        self.nodes = (node,)
        self.folder, self.release, self.management_url = node.folder, node.release, node.management_url
        self.vhost_url = node.vhost_url


def _root() -> Path:
    return default_folder().parent / "check"


@contextmanager
def working_folder() -> Iterator[Path]:
    """A folder for the cluster and the processes of a run. Leftovers of killed runs are removed first."""
    root = _root()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    clean_up()
    folder = root / secrets.token_hex(4)
    folder.mkdir(mode=0o700)
    with _locked(folder):
        try:
            yield folder
        finally:
            _remove(folder)


def clean_up() -> list[Path]:
    """Clean up after killed runs: stop their clusters, and undo what they did to clusters of the user.

    Returns:
        The folders of these runs.
    """
    left: list[Path] = []
    for folder in sorted(_root().iterdir()) if _root().exists() else ():
        if folder.is_dir():
            with suppress(BlockingIOError), _locked(folder):
                _remove(folder)
                left.append(folder)
    return left


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Stop the cluster of a run, or repair the user's cluster, and remove the working folder."""
    own, target = folder / _CLUSTER, folder / _TARGET
    if State.load(own) is not None:
        attach(own).stop()
    if target.exists():
        noted = json.loads(target.read_text())
        users_folder = Path(noted["folder"])
        # If the cluster was stopped meanwhile, its next start is without the faults.
        if State.load(users_folder) is not None and LocalCluster(users_folder).running:
            _restore(LocalCluster(users_folder), noted["limits"])
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def own_cluster(
    folder: Path,
    *,
    nodes: int,
    namespaces: bool,
    clocks: bool,
    disks: bool,
    partition_handling: str | None,
    home: Path | None,
    chroot: Path | None,
) -> Iterator[Cluster]:
    """A cluster, or a single node, that exists for the run only.

    Args:
        folder: the working folder of the run.
        namespaces: whether each node gets a network namespace, for partitions.
        clocks: whether faults can change the clocks of the nodes.
        disks: whether each node gets a disk of its own, which faults can fill.
        partition_handling: the value of ``cluster_partition_handling``; None for RabbitMQ's default. With a value, the
            nodes notice a partition after 4 to 6 s.
        home: see :meth:`LocalBroker.start`.
        chroot: see :meth:`LocalBroker.start`.

    Raises:
        InvalidInputError: a single node was to have partitions or a full disk, libfaketime is not installed, or the
            RabbitMQ has no ``cluster_partition_handling``.
        LocalBrokerError: the cluster did not start.
    """
    environment = faketime(folder / "faketime") if clocks else {}
    handling = ""
    if partition_handling:
        release = find_installation(home=home, chroot=chroot).release
        if numbers(release) >= _NO_PARTITION_HANDLING:
            raise InvalidInputError(
                f"RabbitMQ {release} has no choice of --partition-handling, which was removed in 4.3: omit it, or "
                "give the folder of an older RabbitMQ with --home or --root"
            )
        handling = f"cluster_partition_handling = {partition_handling}"
        environment["RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS"] = f"-kernel net_ticktime {_TICK_SECONDS}"
    if nodes == 1:
        if namespaces:
            raise InvalidInputError("partitions need several nodes: give --nodes 3")
        if disks:
            raise InvalidInputError("a full disk needs several nodes: give --nodes 3")
        with LocalBroker.start(
            folder / _CLUSTER, ephemeral=True, home=home, chroot=chroot, environment=environment
        ) as node:
            yield OneNode(node)
        return
    with LocalCluster.start(
        folder / _CLUSTER,
        nodes=nodes,
        namespaces=namespaces,
        disk_size=DISK_SIZE if disks else None,
        ephemeral=True,
        home=home,
        chroot=chroot,
        extra_config=handling,
        environment=environment,
    ) as cluster:
        yield cluster


@contextmanager
def users_cluster(folder: Path, users_folder: Path) -> Iterator[LocalCluster]:
    """A running cluster that ``bide broker start`` started. At the end, all its nodes run without faults.

    Args:
        folder: the working folder of the run.
        users_folder: the folder of the cluster.

    Raises:
        LocalBrokerError: no cluster that bide started is running in *users_folder*.
    """
    state = State.load(users_folder)
    if state is None or not state.nodes or not LocalCluster(users_folder).running:
        raise LocalBrokerError(
            f"no cluster of bide is running in {users_folder}: start one with 'bide broker start --nodes 3', or omit "
            "the folder"
        )
    cluster = LocalCluster(users_folder)
    make_whole(cluster)
    limits = {node.name: limits_of(node) for node in cluster.nodes}
    (folder / _TARGET).write_text(json.dumps({"folder": str(cluster.folder), "limits": limits}))
    try:
        yield cluster
    finally:
        _restore(cluster, limits)
        (folder / _TARGET).unlink()


def _restore(cluster: LocalCluster, limits: Mapping[str, Sequence[str]]) -> None:
    """Repair all faults, and delete the policy and the virtual host of the run."""
    for node in cluster.nodes:
        if cluster.has_namespaces:
            cluster.reconnect(node, *(one for one in cluster.nodes if one.name != node.name))
        node.resume()
        if not node.running:
            node.restart()
    make_whole(cluster)
    for node in cluster.nodes:
        set_limits(node, *limits[node.name])
    node = cluster.nodes[0]
    with suppress(ManagementApiError):
        node.management.call("DELETE", "policies", VHOST, POLICY)
    with suppress(ManagementApiError):
        node.delete_vhost(VHOST)
