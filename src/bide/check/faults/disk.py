"""A node whose disk is full."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Final

from bide.check.faults.fault import Fault, FaultSite, insist
from bide.errors import InvalidInputError, LocalBrokerError
from bide.local_broker import LocalBroker

DISK_SIZE: Final = 1 << 30
"""Bytes of a node's disk: twice the largest write-ahead log of RabbitMQ's quorum queues."""

_TOP_UP: Final = 0.02
"""Seconds after which space that the node has freed is taken again."""

_START_SECONDS: Final = 10.0
"""Seconds for the members of quorum queues to start after their node, and to elect leaders."""


@contextmanager
def _fill(site: FaultSite, node: LocalBroker) -> Iterator[str]:
    """Leave no space on the node's disk. The repair restarts the node when there is space again.

    The members of quorum queues on the node end, because they cannot write their log. RabbitMQ does not start them
    again by itself (seen on 3.10), although the node goes on. What does not start with the node either is replaced.
    """
    data = node.folder / "data"
    if not data.is_mount():
        raise InvalidInputError(
            f"{node.name} has no disk of its own that could be full: start the cluster with disk_size"
        )
    path = data / "filler"
    ended = threading.Event()
    with path.open("wb") as file:
        _take_all(file)
        thread = threading.Thread(target=_keep_full, args=(file, ended), name="full disk", daemon=True)
        thread.start()
        try:
            yield node.name
        finally:
            ended.set()
            thread.join()
    path.unlink()
    node.restart()
    _replace_members(site, node)


def _replace_members(site: FaultSite, node: LocalBroker) -> None:
    """Replace the members of quorum queues that have not started with the node.

    A member writes its configuration when it starts. Ra before 2.6.2 empties the old file first: if the disk is full,
    the file stays empty, and the member never starts again. Of the other two members, one that asks for votes and one
    that asks whether it would get them may then refuse each other without end (seen on 3.10), until one is restarted.
    """
    deadline = time.monotonic() + _START_SECONDS
    while (lost := insist(lambda: _offline(site, node))) and time.monotonic() < deadline:
        time.sleep(0.5)  # between two looks at members that start
    for queue in lost:
        _change_member(site, "delete_member", queue, node)
        _change_member(site, "add_member", queue, node)


def _change_member(site: FaultSite, command: str, queue: str, node: LocalBroker) -> None:
    """Delete or add a member. If that fails for the want of a leader, restart the others in turn."""
    arguments = (command, queue, node.name, "--vhost", site.vhost)
    for _, other in site.healthy_nodes():
        try:
            site.running_node().rabbitmqctl(*arguments, tool="rabbitmq-queues")
        except LocalBrokerError:
            other.restart()
        else:
            return
    insist(lambda: site.running_node().rabbitmqctl(*arguments, tool="rabbitmq-queues"))


def _offline(site: FaultSite, node: LocalBroker) -> list[str]:
    """The quorum queues with a member on the node that does not run."""
    queues = json.loads(
        site.running_node().rabbitmqctl(
            "list_queues", "--vhost", site.vhost, "--formatter", "json", "name", "members", "online"
        )
    )
    return [
        one["name"] for one in queues if node.name in (one["members"] or ()) and node.name not in (one["online"] or ())
    ]


def _keep_full(file: IO[bytes], ended: threading.Event) -> None:
    while not ended.wait(_TOP_UP):
        _take_all(file)


def _take_all(file: IO[bytes]) -> None:
    status = os.fstatvfs(file.fileno())
    if free := status.f_bavail * status.f_frsize:
        with suppress(OSError):  # the node took a part of the space first
            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)


FULL = Fault(name="disk-full", what="the disk of a node has no space left", inject=_fill, need="disks")
