"""Checked sending of the rows of one task into a stream, which stores each row once.

A publishing id has two parts: a digest of the ids of all rows of the task, and the index of the row in the order of
these ids. So if a repeated task has its rows in another order, they get the same publishing ids, and the stream drops
those that it has. If the repeated task has other rows, its digest differs from the one that the stream has, and the
task fails. Without this check, a row would be lost if another row with its index is in the stream already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from bide.errors import BideError, BrokerError, InvalidRowError, TargetNotFoundError
from bide.messages.checker import MessageChecker
from bide.messages.outgoing import OutgoingMessage
from bide.runtime.logs import logger
from bide.spark.rate_limiter import RateLimiter
from bide.spark.rows import RowConverter
from bide.spark.sending import TaskResult, WriteTask, invalid_rows
from bide.spark.sink_columns import PUBLISHING_ID
from bide.spark.sink_settings import SinkSettings
from bide.spark.spool import Spool
from bide.streams import frames
from bide.streams.amqp10_encoder import StreamMessageEncoder
from bide.streams.log import Address
from bide.streams.publisher import StreamPublisher

log = logger(__name__)

_INDEX_BITS: Final = 25
"""Bits of a publishing id for the index of a row; the other 38 bits of a positive number are for the digest."""

MAX_ROWS: Final = (1 << _INDEX_BITS) - 1
"""The largest number of rows in a task."""

MAX_PARTITIONS: Final = 200
"""The largest number of tasks of a write. A stream remembers the last ids of the 255 publishers that published last."""

_FRAME_ROWS: Final = 1_000
_FRAME_BYTES: Final = 1 << 20
_DATA: Final = "data"
_ADVICE: Final = "Fix or filter these rows"


def send_once(
    batches: Iterator[pa.RecordBatch], converter: RowConverter, settings: SinkSettings, task: WriteTask
) -> TaskResult:
    """Send the rows of one task. If an attempt at the task has sent some of them before, the stream drops these.

    Args:
        batches: with the column :data:`bide.spark.sink_columns.PUBLISHING_ID`.
        task: the same for each attempt at the task; its run begins with the name of the publisher.

    Raises:
        InvalidRowError: rows are invalid, an id is missing or repeated, there are too many rows or tasks, or an attempt
            at this task had other rows and has published some.
        BrokerError: the broker cannot be reached, or refuses.
    """
    if task.partition >= MAX_PARTITIONS:
        raise InvalidRowError(
            f"this write has more than {MAX_PARTITIONS} partitions, but a stream recognizes repeated rows of at most "
            f"{MAX_PARTITIONS}: write df.coalesce({MAX_PARTITIONS}), or fewer. Other partitions may already be stored, "
            "and a new write stores their rows a second time"
        )
    stream = settings.constants["to"]
    address = Address.of(settings.url, settings.stream_port)
    with Spool() as spool:
        with address.connect() as connection:
            encoder = StreamMessageEncoder(stream, connection.release)
            room = (connection.max_frame or _FRAME_BYTES) - frames.PUBLISH_OVERHEAD - frames.MESSAGE_OVERHEAD
        ids = _check_and_buffer(batches, converter, spool, encoder, str(task), room)
        publisher = StreamPublisher(address, stream, str(task), timeout=settings.timeout.total_seconds())
        if not len(ids):
            # If another attempt had rows, they are in another partition now, and would be stored twice.
            with publisher, suppress(TargetNotFoundError):
                _check_digest(publisher, None, task)
            return TaskResult(confirmed=0)
        is_sorted = bool(pc.all(pc.less(ids.slice(0, len(ids) - 1), ids.slice(1))).as_py())
        if not is_sorted:
            ids = ids.take(pc.sort_indices(ids))
            _refuse_repeated(ids)
        digest = _digest(ids)
        with publisher:
            complete = digest << _INDEX_BITS | len(ids)
            if _check_digest(publisher, digest, task) == complete:
                log.warning(
                    "the stream %r has %d rows with the ids of partition %d already, published as %r: if this is "
                    "a new write, its rows are not stored, and it needs another producerName",
                    *(stream, len(ids), task.partition, str(task)),
                )
            first = digest << _INDEX_BITS | 1
            _publish(publisher, _messages(spool, is_sorted=is_sorted), first, RateLimiter(settings.rate), room)
            # An attempt that runs at the same time and has other rows may have made the stream drop rows of this one.
            if _check_digest(publisher, digest, task) != complete:
                raise BrokerError(
                    f"the stream {stream!r} lacks rows that it has confirmed to {str(task)!r}: it was deleted and "
                    "declared again, lost them, or has forgotten this publisher"
                )
    return TaskResult(confirmed=len(ids))


def _check_and_buffer(
    batches: Iterator[pa.RecordBatch],
    converter: RowConverter,
    spool: Spool,
    encoder: StreamMessageEncoder,
    run: str,
    room: int,
) -> pa.ChunkedArray:
    """Check and encode all rows, and buffer their messages; returns their ids in the order of the rows."""
    checker = MessageChecker()
    found: list[pa.Array] = []
    first = 0
    for given in batches:
        batch = given.rename_columns([name.lower() for name in given.schema.names])
        now = datetime.now(UTC)
        column = batch.column(PUBLISHING_ID)
        column = column.cast(pa.int64() if pa.types.is_integer(column.type) else pa.large_string())
        ids = column.to_pylist()
        problems = converter.problems(batch, now)
        problems |= {
            index: f"the column {PUBLISHING_ID} is null: give each row an id that is the same in each attempt"
            for index, one in enumerate(ids)
            if one is None and index not in problems
        }
        encoded: list[bytes] = []
        if not problems:
            for index, message in enumerate(converter.messages(batch, ids, run=run)):
                assert isinstance(message, OutgoingMessage), "rows with keys are refused before"
                try:
                    prepared = checker.check(message)
                    data = encoder.encode(prepared.wire_values(None, now), prepared.body)
                    if len(data) > room:
                        raise InvalidRowError(
                            f"its message has {len(data):,} bytes, and a frame of the stream protocol has room for "
                            f"{room:,}: send less, or raise stream.frame_max of the broker"
                        )
                except BideError as error:
                    problems[index] = str(error)
                else:
                    encoded.append(data)
        if problems:
            raise invalid_rows(problems, first, first + len(batch) - 1, _ADVICE)
        first += len(batch)
        if first > MAX_ROWS:
            raise InvalidRowError(
                f"this partition has more than {MAX_ROWS:,} rows, the limit of a task that writes into a stream: "
                "divide the table into more partitions"
            )
        if len(batch):
            spool.put(pa.record_batch([column, pa.array(encoded, pa.large_binary())], names=[PUBLISHING_ID, _DATA]))
            found.append(column)
    return pa.chunked_array(found, found[0].type if found else pa.int64())


def _refuse_repeated(ids: pa.ChunkedArray) -> None:
    """Refuse sorted ids of which several are equal."""
    equal = pc.equal(ids.slice(0, len(ids) - 1), ids.slice(1))
    at = pc.index(equal, True).as_py()
    if at >= 0:
        raise InvalidRowError(
            f"several rows of this partition have the {PUBLISHING_ID} {ids[at].as_py()!r}, and nothing was sent: give "
            "each row its own id"
        )


def _digest(ids: pa.ChunkedArray) -> int:
    """A digest of sorted ids."""
    found = blake2b(digest_size=8)
    for chunk in ids.chunks:
        # Texts have their length in front, so that no two lists of ids have the same encoding.
        parts = (f"{len(one)}:{one}," if isinstance(one, str) else f"{one}," for one in chunk.to_pylist())
        found.update("".join(parts).encode())
    return int.from_bytes(found.digest()) >> _INDEX_BITS + 1


def _check_digest(publisher: StreamPublisher, digest: int | None, task: WriteTask) -> int:
    """Compare the rows of this task with those of the attempt that published last.

    Args:
        digest: None if this task has no rows.

    Returns:
        The last publishing id that the stream has of this task.

    Raises:
        InvalidRowError: that attempt had other rows.
    """
    last = publisher.last_id()
    if last and last >> _INDEX_BITS != digest:
        what = f"of micro-batch {task.batch}" if task.batch else "of a write"
        raise InvalidRowError(
            f"an attempt at partition {task.partition} {what} published {last & MAX_ROWS:,} of its rows under the "
            f"name {str(task)!r}, and this one has other rows: the values of {PUBLISHING_ID} differ. Rows could be "
            "lost. If this is a new write, give it another producerName. If it is the same write, make sure that each "
            "attempt has the same rows in each partition, for example with repartition by a column, and write with "
            "another producerName. This stores the rows of the first attempt a second time"
        )
    return last


def _messages(spool: Spool, *, is_sorted: bool) -> Iterator[bytes]:
    """The buffered messages in the order of their ids."""
    batches: Any = spool.batches()
    if not is_sorted:
        batches = pa.Table.from_batches(batches).sort_by(PUBLISHING_ID).to_batches(max_chunksize=10 * _FRAME_ROWS)
    for batch in batches:
        yield from batch.column(_DATA).to_pylist()


def _publish(
    publisher: StreamPublisher, messages: Iterator[bytes], first: int, limiter: RateLimiter, room: int
) -> None:
    """Publish messages in frames.

    Args:
        first: the publishing id of the first message.
    """
    most = _FRAME_ROWS if limiter.step is None else min(_FRAME_ROWS, limiter.step)
    frame: list[bytes] = []
    size = 0

    def send() -> None:
        nonlocal first
        limiter.wait(len(frame))
        publisher.publish(first, frame)
        if limiter.step is not None:
            publisher.flush()
        first += len(frame)

    for message in messages:
        taken = len(message) + frames.MESSAGE_OVERHEAD
        if frame and (len(frame) == most or size + taken > room):
            send()
            frame, size = [], 0
        frame.append(message)
        size += taken
    send()
    publisher.flush()
