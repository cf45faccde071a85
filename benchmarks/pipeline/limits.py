"""The limits beside the pipeline: the same work with less around it.

``python -m benchmarks.pipeline.limits`` answers jobs. With arguments it does one of them and ends, so that a whole
command can be compared with it: ``rows URL QUEUE PATH``, ``taps URL PORT FOLDER START ...``.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice, pairwise
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Final

import pyarrow.parquet as pq

import bide
from benchmarks.pipeline.answers import Times, answer_to_parent, serve, timed
from benchmarks.suite.raw import RawConnection
from benchmarks.suite.setup import TARGET, WINDOW, delayed_frames, random_minutes
from bide.amqp.url import BrokerUrl
from bide.delay.protocol import DelayInfrastructure
from bide.delay.taps import taps_of
from bide.spark.batches import RecordBatchBuilder
from bide.spark.columns import STREAM_COLUMNS, arrow_schema, table_schema
from bide.streams.log import Address, StreamLogs
from bide.streams.range_reader import OffsetRange, read_range

BODY: Final = b"x" * 200

_FORK: Final = multiprocessing.get_context("fork")


def bulk(url: str, rows: int, kind: str) -> Times:
    """The bulk publisher with one connection.

    Args:
        kind: ``queue`` for delayed messages, ``stream`` for messages into a stream, ``keyed`` for schedules.
    """
    with timed() as times, bide.BulkPublisher(url) as publisher:
        for message in _messages(kind, rows):
            publisher.put(message)
    return times


def _messages(kind: str, rows: int) -> Iterator[bide.OutgoingMessage | bide.OutgoingSchedule]:
    for number, delay in enumerate(islice(cycle(random_minutes()), rows)):
        match kind:
            case "queue":
                yield bide.OutgoingMessage(BODY, to=TARGET, delay=delay)
            case "keyed":
                yield bide.OutgoingSchedule(BODY, key=f"bulk:{number}", to=TARGET, delay=delay)
            case _:
                yield bide.OutgoingMessage(BODY, to=kind)


def raw(url: str, rows: int, connections: int) -> Times:
    """Frames that were encoded before, over several connections, each in a process of its own."""
    frames = delayed_frames(asyncio.run(_infrastructure(url)), random_minutes(), len(BODY))

    def send(ready: Barrier) -> None:
        connection = RawConnection.open(BrokerUrl.parse(url))
        ready.wait()
        connection.publish(frames, window=WINDOW, until=lambda sent: sent >= rows // connections)
        connection.close()

    return _in_processes([send] * connections)


async def _infrastructure(url: str) -> DelayInfrastructure:
    async with bide.connect(url) as client:
        return await client.infrastructure()


def bare(url: str, port: int, stream: str, processes: int) -> Times:
    """Read all chunks of a stream, and decode none of their messages."""
    address = Address.of(url, port)
    with StreamLogs(address) as logs:
        end = logs.end(stream)
    edges = [end * place // processes for place in range(processes + 1)]
    ranges = [OffsetRange(stream=stream, start=start, end=stop) for start, stop in pairwise(edges)]

    def read(one: OffsetRange) -> Callable[[Barrier], None]:
        def count(ready: Barrier) -> None:
            ready.wait()
            found = sum(last - first for _, first, last in read_range(address, one, fail_on_data_loss=True))
            if found != one.end - one.start:
                raise ValueError(f"{found} messages in {one}")

        return count

    return _in_processes([read(one) for one in ranges])


def _in_processes(work: Sequence[Callable[[Barrier], None]]) -> Times:
    """Do it all at once, each in a process. The time counts from the moment at which all are ready."""
    ready = _FORK.Barrier(len(work) + 1)
    processes = [_FORK.Process(target=one, args=(ready,)) for one in work]
    for process in processes:
        process.start()
    ready.wait(timeout=60)
    with timed() as times:
        for process in processes:
            process.join()
    if failed := [process.exitcode for process in processes if process.exitcode]:
        raise ChildProcessError(f"exit codes {failed}")
    return times


def publish_rows(url: str, queue: str, path: str) -> None:
    """Publish a message for each row of Parquet files, as ``bide pipeline schedule`` does, without its checks."""
    table = pq.read_table(path)
    with bide.BulkPublisher(url) as publisher:
        for batch in table.to_batches(max_chunksize=10_000):
            for row in batch.to_pylist():
                due = row.pop("due")
                publisher.put(bide.OutgoingMessage(json.dumps(row), to=queue, deliver_at=due))


def copy_taps(url: str, port: str, folder: str, *starts: str) -> None:
    """Read the taps from these offsets on, and write all columns to Parquet files."""
    address = Address.of(url, int(port))
    schema = arrow_schema(table_schema(STREAM_COLUMNS, include_headers=True), STREAM_COLUMNS)
    Path(folder).mkdir()
    for stream, start in zip(taps_of(bide.Clock()).names, starts, strict=True):
        with StreamLogs(address) as logs:
            wanted = OffsetRange(stream=stream, start=int(start), end=logs.end(stream))
        builder = RecordBatchBuilder(schema, stream, raw=False)
        with pq.ParquetWriter(f"{folder}/{stream}.parquet", schema) as file:
            for chunk, first, last in read_range(address, wanted, fail_on_data_loss=True):
                for batch in builder.add(chunk, first, last):
                    file.write_batch(batch)
            if builder.rows:
                file.write_batch(builder.take())


def main() -> None:
    match sys.argv[1:]:
        case ["rows", *arguments]:
            publish_rows(*arguments)
        case ["taps", *arguments]:
            copy_taps(*arguments)
        case _:
            answers = answer_to_parent()
            serve({"bulk": bulk, "raw": raw, "bare": bare}, answers)


if __name__ == "__main__":
    main()
