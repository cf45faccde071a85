"""Source and sink of Spark: rows per second of the data source ``rabbitmq``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

import bide
from benchmarks.pipeline.figures import LIMIT, NOW, Measured
from benchmarks.pipeline.limits import BODY
from benchmarks.pipeline.running import Bench, Part, Rounds, Step, Worker
from benchmarks.suite.setup import TARGET, random_minutes

READ: Final = 500_000
WRITTEN: Final = 100_000
WRITING_TASKS: Final = (1, 2, 4)
CONNECTIONS: Final = (1, 4)
STREAM: Final = "stream"
_SLOTS: Final = 4
"""Tasks of a session that run at the same time."""


@contextmanager
def _sessions(bench: Bench) -> Iterator[tuple[dict[str, Worker], Worker]]:
    """A Spark session of each side, and the process of the limits."""
    with ExitStack() as stack:
        slots = str(max(_SLOTS, bench.tasks))
        sessions = {side: stack.enter_context(bench.worker(side, "spark_process", slots)) for side in bench.sides}
        yield sessions, stack.enter_context(bench.worker(NOW, "limits"))


def _each(
    sessions: dict[str, Worker],
    name: str,
    rows: int,
    limits: Sequence[str],
    run: Callable[[Worker, int], Measured],
) -> list[Step]:
    return [
        Step(name=name, side=side, rows=rows, limits=tuple(limits), run=partial(run, one))
        for side, one in sessions.items()
    ]


@contextmanager
def source(bench: Bench) -> Iterator[Rounds]:
    """Read a stream, which is filled once."""
    rows = bench.rows(READ)
    port = bench.broker.stream_port
    with bench.vhost("source") as url, _sessions(bench) as (sessions, limits):
        for size in bench.sizes(rows):
            asyncio.run(_fill(url, f"{STREAM}-{size}", size))

        def read(tasks: int, **columns: str) -> Callable[[Worker, int], Measured]:
            def run(session: Worker, rows: int) -> Measured:
                options = {"url": url, "streamPort": str(port), "stream": f"{STREAM}-{rows}"}
                options["minPartitions"] = str(tasks)
                if "columns" in columns:
                    options["columns"] = columns["columns"]
                return session.ask("read", options=options, schema=columns.get("schema"))

            return run

        def bare(processes: int) -> Step:
            def run(rows: int) -> Measured:
                return limits.ask("bare", url=url, port=port, stream=f"{STREAM}-{rows}", processes=processes)

            return Step(name=_bare(processes), side=LIMIT, rows=rows, run=run)

        many = bench.tasks
        cases = [
            ("all columns, 1 task", 1, {}),
            (f"all columns, {many} tasks", many, {}),
            (f"`value` by a schema, {many} tasks", many, {"schema": "value binary"}),
            (f"`offset`, `value` by `columns`, {many} tasks", many, {"columns": "offset,value"}),
        ]
        steps = [_each(sessions, name, rows, [_bare(tasks)], read(tasks, **some)) for name, tasks, some in cases]
        flat = [*(one for some in steps for one in some), *(bare(number) for number in sorted({1, many}))]
        yield lambda _: [flat]


def _bare(processes: int) -> str:
    return f"chunks without decoding, {_counted(processes, 'process')}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


async def _fill(url: str, stream: str, count: int) -> None:
    async with bide.connect(url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue(stream, arguments={"x-queue-type": "stream"})]))
        messages = (
            bide.OutgoingMessage(BODY, to=stream, type="OrderPlaced", headers={"tenant": "shop"}) for _ in range(count)
        )
        await client.publish_many(messages)


@contextmanager
def sink(bench: Bench) -> Iterator[Rounds]:
    """Write a table into a delayed queue, into a stream once per row, and as schedules with keys."""
    rows = bench.rows(WRITTEN)
    for size in (*bench.sizes(rows), 1):
        for tasks in WRITING_TASKS if size > 1 else (1,):
            _write_table(bench.folder / f"rows-{size}-{tasks}", size, tasks)
    with _sessions(bench) as (sessions, limits):

        def rounds(_: int) -> Iterator[list[Step]]:
            with bench.vhost("sink") as url:
                asyncio.run(_prepare_targets(url))
                yield [*_writes(bench, sessions, url, rows), *_limits(limits, url, rows)]

        yield rounds


def _writes(bench: Bench, sessions: dict[str, Worker], url: str, rows: int) -> Iterator[Step]:
    def write(tasks: int, columns: Sequence[str], **options: Any) -> Callable[[Worker, int], Measured]:
        def run(session: Worker, rows: int) -> Measured:
            chosen = {"url": url, "queue": TARGET, **options}
            if "producerName" in options:
                chosen["producerName"] = bench.new_name("producer")
            path = bench.folder / f"rows-{rows or 1}-{tasks}"
            return session.ask("write", path=str(path), tasks=tasks, columns=columns, options=chosen)

        return run

    yield from _each(sessions, "1 row into a queue", 1, [], write(1, ["value", "delay"]))
    for tasks in WRITING_TASKS:
        several = _raw(CONNECTIONS[0] if tasks == 1 else CONNECTIONS[-1])
        run = write(tasks, ["value", "delay"])
        yield from _each(sessions, f"delayed queue, {_counted(tasks, 'task')}", rows, [_bulk("queue"), several], run)
    into = {"queue": STREAM, "streamPort": str(bench.broker.stream_port), "producerName": ""}
    for tasks in WRITING_TASKS[:2]:
        run = write(tasks, ["value", "publishing_id"], **into)
        name = f"stream with `producerName`, {_counted(tasks, 'task')}"
        yield from _each(sessions, name, rows, [_bulk(STREAM)], run)
    for tasks in WRITING_TASKS[:2]:
        run = write(tasks, ["value", "delay", "key"])
        yield from _each(sessions, f"rows with keys, {_counted(tasks, 'task')}", rows, [_bulk("keyed")], run)


def _limits(limits: Worker, url: str, rows: int) -> Iterator[Step]:
    def bulk(kind: str, rows: int) -> Measured:
        return limits.ask("bulk", url=url, rows=rows, kind=kind)

    def raw(connections: int, rows: int) -> Measured:
        return limits.ask("raw", url=url, rows=rows, connections=connections)

    for kind in ("queue", STREAM, "keyed"):
        yield Step(name=_bulk(kind), side=LIMIT, rows=rows, run=partial(bulk, kind))
    for connections in CONNECTIONS:
        yield Step(name=_raw(connections), side=LIMIT, rows=rows, run=partial(raw, connections))


def _bulk(kind: str) -> str:
    return {"queue": "bulk publisher", STREAM: "bulk publisher into a stream", "keyed": "bulk publisher with keys"}[
        kind
    ]


def _raw(connections: int) -> str:
    return f"encoded frames, {_counted(connections, 'connection')}"


async def _prepare_targets(url: str) -> None:
    async with bide.connect(url) as client:
        stream = bide.Queue(STREAM, arguments={"x-queue-type": "stream"})
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(TARGET), stream]))
        # The first message with a delay declares the queues of that delay.
        await client.publish_many(bide.OutgoingMessage(b"", to=TARGET, delay=one) for one in set(random_minutes()))
        # The first schedule declares the schedule log.
        await client.schedule(b"", key="first", to=TARGET, delay="1h")


def _write_table(folder: Path, rows: int, tasks: int) -> None:
    """Write a Parquet file for each task."""
    folder.mkdir()
    delays = [delay // timedelta(milliseconds=1) for delay in islice(cycle(random_minutes()), rows)]
    table = pa.table(
        {
            "value": pa.repeat(BODY.decode(), rows),
            "delay": pa.array(delays, pa.int64()),
            "publishing_id": pa.array(range(rows), pa.int64()),
            "key": [f"order:{number}" for number in range(rows)],
        }
    )
    for place in range(tasks):
        start, end = rows * place // tasks, rows * (place + 1) // tasks
        pq.write_table(table.slice(start, end - start), folder / f"{place}.parquet")


SOURCE: Final = Part(name="source", prepare=source, warms_up=True)
SINK: Final = Part(name="sink", prepare=sink, warms_up=True)
