"""A node whose disk is full."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Final

from bide.check.faults.fault import Fault, FaultSite
from bide.errors import InvalidInputError
from bide.local_broker import LocalBroker

DISK_SIZE: Final = 1 << 30
"""Bytes of a node's disk: twice the largest write-ahead log of RabbitMQ's quorum queues."""

_TOP_UP: Final = 0.02
"""Seconds after which space that the node has freed is taken again."""


@contextmanager
def _fill(site: FaultSite, node: LocalBroker) -> Iterator[str]:
    """Leave no space on the node's disk. The repair restarts the node when there is space again.

    The members of quorum queues on the node end, because they cannot write their log. RabbitMQ does not start them
    again by itself (seen on 3.10), although the node goes on.
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


def _keep_full(file: IO[bytes], ended: threading.Event) -> None:
    while not ended.wait(_TOP_UP):
        _take_all(file)


def _take_all(file: IO[bytes]) -> None:
    status = os.fstatvfs(file.fileno())
    if free := status.f_bavail * status.f_frsize:
        with suppress(OSError):  # the node took a part of the space first
            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)


FULL = Fault(name="disk-full", what="the disk of a node has no space left", inject=_fill, need="disks")
