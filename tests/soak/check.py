"""The check that files, a stream and schedules have everything once, and a queue every row.

What is in the streams and in the queues is read by another client than bide, and the files as Spark's log of them says.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Final
from urllib.parse import unquote, urlparse
from uuid import uuid4

import pika
import pyarrow.parquet as pq
from pika.adapters.blocking_connection import BlockingChannel

from tests.soak.feed import FIRST, LONGEST_DELAY
from tests.soak.job_run import SoakError

_QUIET: Final = LONGEST_DELAY + 2
"""Seconds without a message after which no more are expected, when all have come."""
_TIMEOUT: Final = 180.0
"""Seconds without a message after which those that did not come are lost."""

_AT_ONCE: Final = 1_000

Placed = tuple[int, bytes]
"""A message of a stream: its offset and body."""
Named = tuple[str | None, bytes]
"""A message of a queue: its id, or that of its schedule, and its body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InFiles:
    """The files, compared with the stream.

    Attributes:
        read: messages of the stream.
        missing: that are not in the files.
        twice: that are there more than once.
        wrong: rows that are not in the stream, or with another body.
    """

    read: int
    missing: int
    twice: int
    wrong: int

    @property
    def sound(self) -> bool:
        """Exactly once."""
        return not (self.missing or self.twice or self.wrong)


@dataclass(frozen=True, slots=True, kw_only=True)
class InQueue:
    """The queue, compared with the rows that were to be sent.

    Attributes:
        written: rows.
        lost: that did not come.
        foreign: messages that are no row.
        copies: messages that came again, with the same id.
        other_ids: messages that came again, with another id.
        shared_ids: ids that different messages have, or that are missing.
    """

    written: int
    lost: int
    foreign: int
    copies: int
    other_ids: int
    shared_ids: int

    @property
    def sound(self) -> bool:
        """At least once, and what came twice with equal ids. For schedules: applied once."""
        return not (self.lost or self.foreign or self.other_ids or self.shared_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class InCopy:
    """The stream that stores rows once, compared with the rows that were to be stored.

    Attributes:
        stored: messages of the stream.
        absent: rows that are not in the stream.
        repeated: rows that are there more than once.
        alien: messages that are no row.
    """

    stored: int
    absent: int
    repeated: int
    alien: int

    @property
    def sound(self) -> bool:
        """Exactly once."""
        return not (self.absent or self.repeated or self.alien)


def compare_files(stream: Collection[Placed], rows: Iterable[Placed]) -> InFiles:
    """Compare the files with the stream."""
    there = Counter(rows)
    expected = set(stream)
    return InFiles(
        read=len(stream),
        missing=len(expected - there.keys()),
        twice=sum(number > 1 for number in there.values()),
        wrong=len(there.keys() - expected),
    )


def compare_queue(rows: Collection[bytes], messages: Iterable[Named]) -> InQueue:
    """Compare what came from the queue with what was to be sent."""
    expected = set(rows)
    came: dict[bytes, Counter[str | None]] = {}
    bodies: dict[str | None, set[bytes]] = {}
    for name, body in messages:
        came.setdefault(body, Counter())[name] += 1
        bodies.setdefault(name, set()).add(body)
    return InQueue(
        written=len(expected),
        lost=len(expected - came.keys()),
        foreign=len(came.keys() - expected),
        copies=sum(ids.total() - len(ids) for ids in came.values()),
        other_ids=sum(len(ids) - 1 for ids in came.values()),
        shared_ids=sum(len(some) > 1 or name is None for name, some in bodies.items()),
    )


def compare_copy(rows: Collection[bytes], messages: Iterable[bytes]) -> InCopy:
    """Compare a stream with the rows that it is to store once."""
    there = Counter(messages)
    expected = set(rows)
    return InCopy(
        stored=there.total(),
        absent=len(expected - there.keys()),
        repeated=sum(number > 1 for number in there.values()),
        alien=len(there.keys() - expected),
    )


def found(files: InFiles, queue: InQueue, copy: InCopy, schedules: InQueue, orphans: int) -> dict[str, int]:
    """All that was counted, for the account."""
    counts = [(one.name, getattr(part, one.name)) for part in (files, queue, copy) for one in fields(part)]
    counts += [(f"keyed_{one.name}", getattr(schedules, one.name)) for one in fields(schedules)]
    assert len(dict(counts)) == len(counts)
    return {**dict(counts), "orphans": orphans}


def committed_files(folder: Path) -> list[Path]:
    """The files that belong to a table, as the log of Spark's file sink has it."""
    log = folder / "_spark_metadata"
    compacts = [int(entry.stem) for entry in log.glob("*.compact") if entry.stem.isdigit()]
    newest = max(compacts, default=-1)
    names = [f"{newest}.compact"] if compacts else []
    names += sorted(
        (entry.name for entry in log.iterdir() if entry.name.isdigit() and int(entry.name) > newest), key=int
    )
    paths = []
    for name in names:
        version, *lines = (log / name).read_text().splitlines()
        if version != "v1":
            raise SoakError(f"{log / name} is of another version: {version}")
        paths += [entry["path"] for entry in map(json.loads, lines) if entry["action"] == "add"]
    return [Path(unquote(urlparse(path).path)) for path in paths]


def read_files(paths: Iterable[Path]) -> Iterator[Placed]:
    """The rows of the table that ``read`` wrote."""
    for path in paths:
        table = pq.read_table(path, columns=["offset", "value"])
        yield from zip(table["offset"].to_pylist(), table["value"].to_pylist(), strict=True)


def read_rows(folder: Path) -> list[bytes]:
    """The rows that ``write`` was to send."""
    return [
        value.encode()
        for path in sorted(folder.glob("*.parquet"))
        for value in pq.read_table(path, columns=["value"])["value"].to_pylist()
    ]


def read_stream(url: str, name: str) -> list[Placed]:
    """Everything in a stream, by AMQP 0-9-1: offsets and bodies."""
    mark = uuid4().bytes
    stream: list[Placed] = []
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", name, mark)
        channel.basic_qos(prefetch_count=1_000)
        arguments = {"x-stream-offset": "first"}
        for method, properties, body in channel.consume(name, arguments=arguments, inactivity_timeout=_TIMEOUT):
            if method is None:
                raise SoakError(f"the stream {name} gave {len(stream)} messages, and then no more, before its last one")
            channel.basic_ack(method.delivery_tag)
            if body == mark:
                break
            stream.append((properties.headers["x-stream-offset"], body))
    return stream


def read_queue(url: str, queue: str, expected: Collection[bytes], kept: Path) -> list[Named]:
    """Everything in a queue; it takes a while to be sure that nothing more comes.

    Args:
        kept: a file for what was taken out of it already, should this be interrupted and called again.
    """
    with kept.open("a+") as file, closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        file.seek(0)
        before = [(name, body.encode()) for name, body in map(json.loads, file)]
        missing = set(expected) - {body for _, body in before}
        messages = [*before, *_consumed(connection.channel(), queue, missing, file)]
    return [one for one in messages if one[1] != FIRST]


def _consumed(channel: BlockingChannel, queue: str, missing: set[bytes], file: IO[str]) -> Iterator[Named]:
    channel.basic_qos(prefetch_count=2 * _AT_ONCE)
    last = time.monotonic()
    waiting = tag = 0
    for method, properties, body in channel.consume(queue, inactivity_timeout=_QUIET):
        if method is not None:
            name = (properties.headers or {}).get("bide-schedule-id", properties.message_id)
            print(json.dumps([name, body.decode()]), file=file)
            yield name, body
            missing.discard(body)
            last = time.monotonic()
            waiting, tag = waiting + 1, method.delivery_tag
        if waiting and (method is None or waiting == _AT_ONCE):
            file.flush()
            channel.basic_ack(tag, multiple=True)
            waiting = 0
        if method is None and (not missing or time.monotonic() - last > _TIMEOUT):
            return
