"""Whole commands of the pipeline, from start to exit: schedule, audit and plan."""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

import bide
from benchmarks.audit_scale import LATER, messages_of
from benchmarks.audit_scale import prepare as turn_on_taps
from benchmarks.audit_scale import write as write_stream
from benchmarks.pipeline.figures import LIMIT, NOW, Measured
from benchmarks.pipeline.running import Bench, Part, Rounds, Step
from benchmarks.suite.setup import TARGET, prepare
from bide.admin.taps import turn_off
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.delay.taps import taps_of

FEW: Final = 300
"""Rows of the small tables. They are as many at each scale."""
SCHEDULED: Final = 200_000
AUDITED: Final = 40_000
_FILES: Final = 4
_AUDITS: Final = 2

_START: Final = "Python with bide and Arrow"
_BULK: Final = "Arrow and the bulk publisher"
_NUMPY: Final = "Python with numpy"


@contextmanager
def schedule(bench: Bench) -> Iterator[Rounds]:
    """``bide pipeline schedule`` of a small CSV file, and of a larger table in Parquet files."""
    rows = bench.rows(SCHEDULED)
    few, many = bench.folder / "few.csv", bench.folder / "many.parquet"
    first = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=2)
    _write_csv(few, first)
    _write_parquet(many, first, rows)

    with bench.vhost("schedule") as url:
        asyncio.run(prepare(url, bide.Clock()))

        def run(side: str, path: Path, options: Sequence[str], rows: int) -> Measured:
            return bench.bide(
                side,
                *("pipeline", "schedule", str(path), "--to", TARGET, "--at-column", "due", *options),
                expect=f"scheduled {rows:,} messages",
                BIDE_URL=url,
                # A ledger of its own: these rows were not sent before.
                XDG_STATE_HOME=str(bench.folder / bench.new_name("state")),
            )

        def step(name: str, side: str, path: Path, rows: int, limit: str, *options: str) -> Step:
            return Step(name=name, side=side, rows=rows, run=partial(run, side, path, options), limits=(limit,))

        def publish(_: int) -> Measured:
            return bench.command(LIMIT, *_LIMITS, "rows", url, TARGET, str(many))[0]

        steps = [
            *(step(f"{FEW} rows of CSV", side, few, FEW, _START) for side in bench.sides),
            *(step(f"{rows:,} rows of Parquet", side, many, rows, _BULK) for side in bench.sides),
            step(f"{rows:,} rows of Parquet, `--engine spark`", NOW, many, rows, _BULK, "--engine", "spark"),
            _start(bench, _START, "import pyarrow.csv; from bide import connect"),
            Step(name=_BULK, side=LIMIT, rows=rows, run=publish),
        ]
        yield lambda _: [steps]


_LIMITS: Final = ("-m", "benchmarks.pipeline.limits")


def _start(bench: Bench, name: str, program: str) -> Step:
    return Step(name=name, side=LIMIT, run=lambda _: bench.command(LIMIT, "-c", program)[0])


def _write_csv(path: Path, first: datetime) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["order_id", "email", "due"])
        for number in range(FEW):
            due = first + timedelta(hours=number)
            table.writerow([f"o-{number}", "ana@shop.example", due.isoformat(timespec="seconds")])


def _write_parquet(folder: Path, first: datetime, rows: int) -> None:
    """Write rows with due times that are spread over a day."""
    folder.mkdir()
    table = pa.table(
        {
            "order_id": [f"o-{number}" for number in range(rows)],
            "email": [f"customer-{number}@shop.example" for number in range(rows)],
            "due": pa.array(
                [first + timedelta(seconds=int(number * 86_400 / rows)) for number in range(rows)],
                pa.timestamp("us", "UTC"),
            ),
        }
    )
    for place in range(_FILES):
        start, end = rows * place // _FILES, rows * (place + 1) // _FILES
        pq.write_table(table.slice(start, end - start), folder / f"{place}.parquet")


@contextmanager
def audit(bench: Bench) -> Iterator[Rounds]:
    """``bide pipeline audit --once``, of a small set of messages and of a larger one, twice each.

    The streams of the taps get what they would get of the messages, before each of the two.
    """

    with bench.vhost("audit") as url:

        def rounds(_: int) -> Iterator[Sequence[Step]]:
            for messages in (FEW, bench.rows(AUDITED)):
                yield from _audits(bench, url, messages)

        yield rounds


async def _empty_taps(url: str) -> None:
    """Declare the streams of the taps anew."""
    connection = await Connection.open(BrokerUrl.parse(url))
    try:
        await turn_off(connection, bide.Clock(), delete=True)
    finally:
        await connection.close()
    await turn_on_taps(url)


def _audits(bench: Bench, url: str, messages: int) -> Iterator[list[Step]]:
    taps = taps_of(bide.Clock())
    asyncio.run(_empty_taps(url))
    tables = {side: bench.folder / bench.new_name("audit") for side in bench.sides}
    written, last = [0, 0], list[Any]()
    for number in range(_AUDITS):
        rows = messages_of(number, count=messages, rounds=_AUDITS)
        delivered = [*last[::LATER], *(row for place, row in enumerate(rows) if place % LATER)]
        asyncio.run(write_stream(url, taps.scheduled, rows))
        asyncio.run(write_stream(url, taps.delivered, delivered))
        yield _audit(
            bench, url, tables, f"{messages:,} messages, {('first', 'second')[number]} round", messages, written
        )
        written = [written[0] + len(rows), written[1] + len(delivered)]
        last = rows


def _audit(
    bench: Bench, url: str, tables: Mapping[str, Path], name: str, messages: int, starts: Sequence[int]
) -> list[Step]:
    """A round of each side into its own tables, and its limit."""
    port, limit = str(bench.broker.stream_port), f"taps to Parquet, {name}"

    def run(side: str, rows: int) -> Measured:
        arguments = ("pipeline", "audit", "--into", str(tables[side]), "--once")
        return bench.bide(side, *arguments, expect=f"{rows:,} scheduled", BIDE_URL=url, BIDE_STREAM_PORT=port)

    def copy(_: int) -> Measured:
        folder = bench.folder / bench.new_name("taps")
        return bench.command(LIMIT, *_LIMITS, "taps", url, port, str(folder), *map(str, starts))[0]

    return [
        *(Step(name=name, side=side, rows=messages, run=partial(run, side), limits=(limit,)) for side in tables),
        Step(name=limit, side=LIMIT, rows=messages, run=copy),
    ]


_FLOWS: Final = """
[[flow]]
rate = "600e6/d"
delay = { "5m" = 3, "1h..2h" = 2, "1d" = 1 }
size = 2000
profile = [1, 1, 1, 1, 1, 2, 4, 7, 9, 10, 10, 9, 8, 8, 9, 9, 9, 8, 7, 6, 5, 4, 2, 1]

[[flow]]
rate = "400e6/d"
delay = { "10s" = 6, "1m" = 2, "30s..31s" = 1 }
size = 500
"""
"""A billion messages a day, as on the page of the plan."""


@contextmanager
def plan(bench: Bench) -> Iterator[Rounds]:
    """``bide pipeline plan`` of rates.

    The flows are planned by this checkout alone: before the plan in one process, they took minutes.
    """
    flows = bench.folder / "flows.toml"
    flows.write_text(_FLOWS, encoding="utf-8")
    rates = ("--rate", "1e6/d", "--delay", "5m=3", "--delay", "2h=1", "--layout", "clock", "--every", "1d")

    def step(name: str, side: str, *options: str) -> Step:
        def run(_: int) -> Measured:
            return bench.bide(side, "pipeline", "plan", *options, expect="most held")

        return Step(name=name, side=side, run=run, limits=(_NUMPY,))

    steps = [
        *(step("a rate of 1,000,000 messages a day", side, *rates) for side in bench.sides),
        step("two flows of 1,000,000,000 messages a day", NOW, "--flows", str(flows)),
        _start(bench, _NUMPY, "import numpy"),
    ]
    yield lambda _: [steps]


SCHEDULE: Final = Part(name="schedule", prepare=schedule)
AUDIT: Final = Part(name="audit", prepare=audit)
PLAN: Final = Part(name="plan", prepare=plan)
