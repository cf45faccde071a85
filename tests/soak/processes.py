"""The processes of a job, found by a mark in their environment."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MARK: Final = "BIDE_SOAK_FOLDER"

_ESTABLISHED: Final = "01"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A Python process of Spark that has a connection to the broker.

    Attributes:
        daemon: the process that forked it.
        queries: whose it may be, by the port that it is connected to.
    """

    pid: int
    daemon: int
    queries: tuple[str, ...]


def marked(folder: Path) -> list[int]:
    """The processes of the job in *folder*, from whichever run, zombies excepted."""
    mark = f"{MARK}={folder}".encode()
    return sorted(pid for pid in map(int, _numbers(Path("/proc"))) if mark in _read(pid, "environ").split(b"\0"))


def kill(pids: Iterable[int]) -> int:
    """``kill -9``; how many were still there to get it."""
    hit = 0
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        hit += 1
    return hit


def of_session(pids: Iterable[int], session: int) -> list[int]:
    """Those of a session: PySpark's daemon makes itself a process group, and stays in the session."""
    return [pid for pid in pids if _stat(pid)[3:4] == [b"%d" % session]]


def jvms(pids: Iterable[int]) -> list[int]:
    """Those that run Java."""
    return [pid for pid in pids if _read(pid, "comm").strip() == b"java"]


def busy_workers(pids: Iterable[int], ports: dict[int, tuple[str, ...]]) -> list[Worker]:
    """Those forked by a daemon of PySpark that have a connection to one of the broker's ports.

    Args:
        ports: the names of the queries that use a port.
    """
    connections = _connections(ports)
    found = []
    for pid in pids:
        daemon = parent(pid)
        if daemon is None or not is_daemon(pid) or not is_daemon(daemon):
            continue
        used = {connections[inode] for inode in _sockets(pid) if inode in connections}
        if used:
            queries = sorted({query for port in used for query in ports[port]})
            found.append(Worker(pid=pid, daemon=daemon, queries=tuple(queries)))
    return found


def _connections(ports: Collection[int]) -> dict[str, int]:
    """The ports that sockets, by their inodes, are connected to."""
    found = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        port = int(fields[2].rpartition(":")[2], 16)
        if fields[3] == _ESTABLISHED and port in ports:
            found[fields[9]] = port
    return found


def _sockets(pid: int) -> list[str]:
    found = []
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found.append(target[len("socket:[") : -1])
    except OSError:  # it has ended
        return []
    return found


def is_daemon(pid: int) -> bool:
    """Whether it runs PySpark's daemon: a worker is a fork of one, under the same command line."""
    return b"pyspark.daemon" in _read(pid, "cmdline")


def parent(pid: int) -> int | None:
    """The process that started a process, None when that has ended."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def children(parent_pid: int) -> list[int]:
    """The processes that a process has started, and that have not been adopted by another."""
    return [pid for pid in map(int, _numbers(Path("/proc"))) if parent(pid) == parent_pid]


def _stat(pid: int) -> list[bytes]:
    """State, parent, process group, session, and more."""
    # The name of a process, in brackets before them, may hold anything.
    return _read(pid, "stat").rpartition(b")")[2].split()


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended
        return b""


def _numbers(folder: Path) -> Iterable[str]:
    return [entry.name for entry in folder.iterdir() if entry.name.isdigit()]
