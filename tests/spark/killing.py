"""Which processes belong to a Spark on this machine, so that tests can kill them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import bide
from bide.amqp.connection import Connection

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def kill_python_workers(spark: SparkSession) -> int:
    """``kill -9`` every Python worker of a session, and say how many there were."""
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    workers = [pid for daemon in _children(gateway.proc.pid) if _is_daemon(daemon) for pid in _children(daemon)]
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    return len(workers)


def wait_until(is_so: Callable[[], bool], what: str, *, seconds: float = 60) -> None:
    """Look again and again until something is so."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"still not so after {seconds} s: {what}"
        time.sleep(0.02)


class Counter:
    """Counts the messages of a queue, over one connection."""

    def __init__(self, url: str, queue: str) -> None:
        self._client = bide.connect_sync(url)
        self._queue = queue

    def __call__(self) -> int:
        return self._client.wait_for(self._count())

    async def _count(self) -> int:
        connection: Connection = await self._client.client._publisher.connection()
        channel = await connection.channel()
        reply = await channel.declare_queue(bide.Queue(self._queue), passive=True)
        await channel.close()
        return int(reply.message_count)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _children(parent: int) -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _parent(path) == parent]


def _parent(path: Path) -> int | None:
    try:
        # The name of a process, in brackets, may hold anything.
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _is_daemon(pid: int) -> bool:
    return b"pyspark.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes()
