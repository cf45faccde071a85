"""The program that the soak kills: four streaming queries, which resume from checkpoints.

``read`` takes a stream of RabbitMQ into Parquet files, ``write`` a growing folder of files into a queue, ``once`` the
same folder into a stream, which stores each row once, and ``keyed`` the same folder into schedules, which are applied
once. A query that ends, for whatever reason, is started again.
What to do comes as lines on standard input (the first is a :class:`Task` as JSON, then ``stop NAME``, ``cancel NAME``
and ``finish``), what happens goes as lines of JSON to standard output. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any, Final, Self

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # py4j has no types
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from tests.spark.spark_processes import QUICK_JAVA

QUERIES: Final = ("read", "write", "once", "keyed")
STREAM: Final = "soak-stream"
QUEUE: Final = "soak-queue"
COPY: Final = "soak-copy"
"""The stream that ``once`` writes into."""
SCHEDULED: Final = "soak-scheduled"
"""The queue that gets the schedules of ``keyed``."""

OFFSETS_PER_BATCH: Final = 400
FILES_PER_BATCH: Final = 2

_LOOK_EVERY: Final = 0.05
"""Seconds between checks of the queries: Spark has no callback for their end."""
_JOB_WITHIN: Final = 30.0
_LONGEST_TEXT: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the job is to do.

    Attributes:
        url: the broker.
        stream_port: its port for the stream protocol.
        folder: where files and checkpoints are.
        master: of Spark.
    """

    url: str
    stream_port: int
    folder: str
    master: str

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, line: str) -> Self:
        """Read it back."""
        return cls(**json.loads(line))


def checkpoint_of(folder: Path, query: str) -> Path:
    """Where a query keeps how far it is."""
    return folder / f"{query}.checkpoint"


class Job:
    """The four queries."""

    def __init__(self, spark: SparkSession, task: Task, events: IO[str]) -> None:
        self._spark = spark
        self._task = task
        self._folder = Path(task.folder)
        self._events = events
        self._queries: dict[str, StreamingQuery | None] = {}
        self._finishing = False

    def run(self, commands: SimpleQueue[str]) -> None:
        """Keep the queries going until they are to finish, and have."""
        for name in QUERIES:
            self._start(name)
        while self._queries:
            try:
                command = commands.get(timeout=_LOOK_EVERY)
            except Empty:
                self._look()
            else:
                self._obey(*command.split())

    def _obey(self, command: str, name: str = "") -> None:
        match command:
            case "stop":
                self._stop(name)
            case "cancel":
                self._cancel(name)
            case "finish":
                self._look()
                self._finishing = True
                for one in QUERIES:
                    if (query := self._queries[one]) is not None:
                        query.stop()
                    self._start(one)
            case _:
                raise ValueError(f"no command: {command}")

    def _stop(self, name: str) -> None:
        # A query that has ended is reported as ended, not stopped.
        self._look()
        query = self._queries[name]
        active = query is not None and query.isActive
        if query is not None:
            query.stop()
            active = active and query.exception() is None
        self._say("stopped", name, active=active)
        self._start(name)

    def _cancel(self, name: str) -> None:
        """Cancel the job that a query runs at the moment, or the next one."""
        query = self._queries[name]
        found = False
        deadline = time.monotonic() + _JOB_WITHIN
        while query is not None and query.isActive and not found and time.monotonic() < deadline:
            tracker = self._spark.sparkContext.statusTracker()
            group = str(query.runId)
            found = bool(set(tracker.getActiveJobsIds()) & set(tracker.getJobIdsForGroup(group)))
            if found:
                self._spark.sparkContext.cancelJobGroup(group)
            else:
                time.sleep(0.005)  # Spark has no event for a job that begins
        self._say("cancelled", name, active=found)

    def _look(self) -> None:
        for name, query in list(self._queries.items()):
            if query is not None and query.isActive:
                continue
            failure = None if query is None else query.exception()
            if query is not None and failure is None and self._finishing:
                self._say("done", name)
                del self._queries[name]
                continue
            if query is not None:
                self._say("ended", name, text=str(failure)[:_LONGEST_TEXT])
            self._start(name)

    def _start(self, name: str) -> None:
        try:
            start = {"read": self._read, "write": self._write, "once": self._once, "keyed": self._keyed}[name]
            self._queries[name] = start()
        except (PySparkException, Py4JError) as error:
            # A worker that was killed while the query was being planned.
            self._queries[name] = None
            self._say("ended", name, text=str(error)[:_LONGEST_TEXT])
        else:
            self._say("started", name)

    def _read(self) -> StreamingQuery:
        frame = (
            self._spark.readStream.format("rabbitmq")
            .options(url=self._task.url, streamPort=self._task.stream_port, stream=STREAM)
            .options(startingOffsets="earliest", maxOffsetsPerTrigger=OFFSETS_PER_BATCH, minPartitions=2)
            .load()
        )
        writer = frame.writeStream.format("parquet").option("checkpointLocation", self._checkpoint("read"))
        return self._triggered(writer).start(str(self._folder / "read"))

    def _write(self) -> StreamingQuery:
        frame = self._rows("value string, delay string")
        writer = (
            frame.writeStream.format("rabbitmq")
            # A small window makes the moments last in which some messages are confirmed and others are not.
            .options(url=self._task.url, queue=QUEUE, window=20)
            .option("checkpointLocation", self._checkpoint("write"))
        )
        return self._triggered(writer).start()

    def _once(self) -> StreamingQuery:
        frame = (
            self._rows("value string, id long")
            .selectExpr("value", "id as publishing_id")
            # The rows of a partition come in the order in which they arrive.
            .repartition(2, "publishing_id")
        )
        writer = (
            frame.writeStream.format("rabbitmq")
            .options(url=self._task.url, streamPort=self._task.stream_port, queue=COPY, producerName="soak")
            .option("checkpointLocation", self._checkpoint("once"))
        )
        return self._triggered(writer).start()

    def _keyed(self) -> StreamingQuery:
        frame = (
            self._rows("value string, delay string, id long")
            # Most rows are delivered before a broken micro-batch is repeated.
            .selectExpr("value", "concat('row:', id) as key", "coalesce(delay, '1s') as delay")
        )
        writer = (
            frame.writeStream.format("rabbitmq")
            .options(url=self._task.url, queue=SCHEDULED, window=20)
            .option("checkpointLocation", self._checkpoint("keyed"))
        )
        return self._triggered(writer).start()

    def _rows(self, schema: str) -> DataFrame:
        """The rows of the growing folder of files."""
        files = self._spark.readStream.schema(schema).option("maxFilesPerTrigger", FILES_PER_BATCH)
        return files.parquet(str(self._folder / "write"))

    def _triggered(self, writer: DataStreamWriter) -> DataStreamWriter:
        return writer.trigger(availableNow=True) if self._finishing else writer

    def _checkpoint(self, name: str) -> str:
        return str(checkpoint_of(self._folder, name))

    def _say(self, event: str, query: str, **more: Any) -> None:
        print(json.dumps({"event": event, "query": query, **more}), file=self._events, flush=True)


def session(task: Task) -> SparkSession:
    """A Spark of its own, on loopback, whose files are in the task's folder."""
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": QUICK_JAVA,
        "spark.local.dir": f"{task.folder}/local",
        "spark.log.level": "OFF",
        "spark.sql.session.timeZone": "UTC",
        # Two small files, two tasks.
        "spark.sql.files.openCostInBytes": str(1 << 30),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": f"{task.folder}/warehouse",
        "spark.ui.enabled": "false",
    }
    builder = SparkSession.builder.master(task.master).appName("bide soak")
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def listen(lines: IO[str], commands: SimpleQueue[str]) -> None:
    """Hand on what comes on standard input; end this process when that ends."""
    for line in lines:
        commands.put(line)
    os._exit(1)


def main() -> None:
    """Run the job until it is killed or stopped."""
    # Nothing that Spark prints is to come between the events.
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task = Task.of_json(sys.stdin.readline())
    commands: SimpleQueue[str] = SimpleQueue()
    Thread(target=listen, args=(sys.stdin, commands), daemon=True).start()
    spark = session(task)
    Job(spark, task, events).run(commands)
    spark.stop()


if __name__ == "__main__":
    main()
