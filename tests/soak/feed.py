"""The input of the queries, always some micro-batches ahead."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

import bide
from bide.admin.infrastructure import install
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.bulk.sync import BulkPublisher
from bide.schedules.names import ScheduleNames
from tests.soak.job import COPY, FILES_PER_BATCH, OFFSETS_PER_BATCH, QUEUE, SCHEDULED, STREAM, checkpoint_of

AHEAD: Final = 5
"""Micro-batches that are there for a query to do."""
ROWS_PER_FILE: Final = 150
LONGEST_DELAY: Final = 2.0
"""Seconds."""

_FILLER: Final = "0123456789abcdef" * 40


def batches(folder: Path, query: str) -> tuple[int, int]:
    """How many micro-batches a query has begun, and how many it has done."""
    checkpoint = checkpoint_of(folder, query)
    return _next(checkpoint / "offsets"), _next(checkpoint / "commits")


def _next(log: Path) -> int:
    if not log.is_dir():
        return 0
    return max((int(entry.name) + 1 for entry in log.iterdir() if entry.name.isdigit()), default=0)


class Feed:
    """Feeds the queries of the job in a folder."""

    def __init__(self, url: str, folder: Path, chance: random.Random) -> None:
        self._folder = folder
        self._chance = chance
        self._name = uuid4().hex
        self._published = 0
        # What an earlier run published is more than that; how much, the stream knows.
        self._streamed = batches(folder, "read")[1] * OFFSETS_PER_BATCH
        (folder / "write").mkdir(exist_ok=True)
        self._files = len(list((folder / "write").glob("*.parquet")))
        self._publisher = BulkPublisher(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._publisher.close()

    def top_up(self) -> None:
        """Add input until enough micro-batches are ahead."""
        while self._streamed < (batches(self._folder, "read")[1] + AHEAD) * OFFSETS_PER_BATCH:
            self._publisher.publish_many(self._letters(OFFSETS_PER_BATCH))
            self._streamed += OFFSETS_PER_BATCH
        foremost = max(batches(self._folder, one)[1] for one in ("write", "once", "keyed"))
        while self._files < (foremost + AHEAD) * FILES_PER_BATCH:
            self._add_file()

    def _letters(self, count: int) -> Iterator[bide.OutgoingMessage]:
        for _ in range(count):
            body = f"{self._name}-{self._published}-{self._filler()}".encode()
            self._published += 1
            yield bide.OutgoingMessage(body, to=STREAM, message_id=f"m-{self._published}")

    def _add_file(self) -> None:
        """A file appears at once, and whole; its rows are in no other."""
        values = [f"{self._files}-{row}-{self._filler()}" for row in range(ROWS_PER_FILE)]
        delays = [
            f"{self._chance.uniform(0.1, LONGEST_DELAY):.1f}s" if row % 3 == 0 else None for row in range(ROWS_PER_FILE)
        ]
        ids = range(self._files * ROWS_PER_FILE, (self._files + 1) * ROWS_PER_FILE)
        table = pa.table({"value": values, "delay": pa.array(delays, pa.string()), "id": pa.array(ids, pa.int64())})
        name = f"{self._files:06}.parquet"
        # Spark passes over what begins with a dot.
        unfinished = self._folder / "write" / f".{name}"
        pq.write_table(table, unfinished)
        unfinished.rename(self._folder / "write" / name)
        self._files += 1

    def _filler(self) -> str:
        return _FILLER[: self._chance.randrange(len(_FILLER))]


def declare(url: str) -> None:
    """The streams, the queues, the schedule log, and the infrastructure that delays.

    All queues of the infrastructure: one that is declared in the second before the broker is killed may be without a
    leader from then on.
    """
    streams = [bide.Queue(name, arguments={"x-queue-type": "stream"}) for name in (STREAM, COPY)]
    queues = [bide.Queue.quorum(name) for name in (QUEUE, SCHEDULED)]
    topology = bide.Topology(queues=[*queues, *streams]) | ScheduleNames().topology()
    asyncio.run(_install(url))
    with bide.connect_sync(url) as client:
        client.declare(topology)
        # Binds the queue to the infrastructure.
        client.publish(FIRST, to=QUEUE, delay="100ms", message_id="first")


async def _install(url: str) -> None:
    connection = await Connection.open(BrokerUrl.parse(url))
    try:
        await install(connection, bide.Clock())
    finally:
        await connection.close()


FIRST: Final = b"first"
"""The body of a message that is in the queue before all others."""
