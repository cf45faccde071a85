"""Replay of a small audit, in this process.

The messages, their due times and their parts are those that :mod:`bide.pipelines.replay.from_audit` computes on Spark.
Each of the two can finish a replay that the other has begun.
"""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import pyarrow as pa
from pyarrow import fs, parquet

from bide.errors import InvalidInputError
from bide.pipelines.audit.columns import TIMESTAMP
from bide.pipelines.engine import NeedsSparkError
from bide.pipelines.formats import is_hidden
from bide.pipelines.ledger import Ledger, LedgerHead, LedgerPart
from bide.pipelines.replay.choices import (
    CHOSEN_FOLDER,
    FAILURE_KEY,
    PART_ROWS,
    Choices,
    NotReplayedCounts,
    order_of,
    rows_per_part,
)
from bide.pipelines.replay.fact_tables import fact_tables
from bide.pipelines.replay.parts import PartSender
from bide.pipelines.replay.small import spread
from bide.pipelines.replay.tap_reader import ReplayMessage, ReplayRun, available_offsets
from bide.pipelines.small_table import MAX_SMALL_BYTES
from bide.runtime.wording import in_bytes

if TYPE_CHECKING:
    from bide.pipelines.audit.folder import Folder
    from bide.pipelines.replay.condition import TextCondition

_CHOSEN_SCHEMA: Final = pa.schema(
    [
        *(("message_id", pa.string()), ("queue", pa.string()), ("failed_at", TIMESTAMP), ("stream", pa.string())),
        *(("offset", pa.int64()), ("deliver_at", TIMESTAMP), ("part", pa.int32())),
    ]
)
_NOTHING: Final = _CHOSEN_SCHEMA.empty_table()


@dataclass(frozen=True, slots=True, kw_only=True)
class TappedFailure:
    """A failed message of an audit, with the place of its copy in a tap.

    Attributes:
        message_id: the id of the message.
        queue: the queue on which it failed.
        failed_at: the time of the failure, in microseconds since the Unix epoch.
        stream: the stream of the copy.
        offset: the offset of the copy.
        due: when to send it, in microseconds since the Unix epoch; 0 in a message that was not chosen yet.
        part: the number of its part.
    """

    message_id: str
    queue: str
    failed_at: int
    stream: str
    offset: int
    due: int = 0
    part: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundInProcess(NotReplayedCounts):
    """Messages to replay, and counts of messages that are not replayed.

    Attributes:
        messages: messages that a stream has, with the oldest failure first.
        size: the size of the tables that were read, as a reason for this engine.
    """

    messages: list[TappedFailure]
    size: str


def find(
    folder: Folder,
    choices: Choices,
    *,
    url: str,
    condition: TextCondition | None = None,
    limit: int | None = None,
    parked: bool = False,
    skip_missing: bool = False,
    largest: int | None = MAX_SMALL_BYTES,
) -> FoundInProcess:
    """Choose failures of an audit that are in no earlier choice, and find their messages.

    The arguments are those of :func:`bide.pipelines.replay.from_audit.find`, except for two.

    Args:
        condition: a condition on the columns :data:`bide.pipelines.replay.condition.AUDIT_COLUMNS`.
        largest: the largest size in bytes of the tables that are read, and of all earlier choices; None for any size.

    Raises:
        InvalidInputError: a file of the audit or of an earlier choice is incomplete, or was removed.
        BrokerError: the broker cannot be reached, or refuses.
        NeedsSparkError: the folder is a URI, or the tables or the earlier choices are too large, or only Spark can read
            the tables.
    """
    with fact_tables(folder, largest=largest) as tables:
        earlier = choices.all()
        _refuse_large(earlier, "the earlier choices have", largest)
        keys = pa.concat_tables([chosen.select(FAILURE_KEY) for chosen in (_NOTHING, *map(chosen_of, earlier))])
        found = tables.failures(earlier=keys)
        known = [row for row in found if condition is None or condition.holds_for(row)]
        chosen = [row for row in known if parked or row["reason"] != "parked"]
        located = tables.locate(chosen if skip_missing else chosen[:limit])
    seen = [row for row in located if row["stream"] is not None]
    highest: dict[str, int] = {}
    for row in seen:
        highest[row["stream"]] = max(highest.get(row["stream"], 0), row["offset"])
    held = available_offsets(url, highest)
    existing = [row for row in seen if row["offset"] in held.get(row["stream"], range(0))]
    return FoundInProcess(
        messages=[
            TappedFailure(**{name: row[name] for name in (*FAILURE_KEY, "stream", "offset")})
            for row in existing[:limit]
        ],
        parked=len(known) - len(chosen),
        unseen=len(located) - len(seen),
        dropped=len(seen) - len(existing),
        size=tables.size,
    )


def record(
    choices: Choices,
    messages: Sequence[TappedFailure],
    over: timedelta = timedelta(0),
    *,
    plan: str,
    broker: str,
    part_rows: int = PART_ROWS,
) -> Ledger:
    """Record a choice, before any of its messages is sent; see :func:`bide.pipelines.replay.from_audit.record`."""
    ledger = choices.next()
    part_rows = rows_per_part(len(messages), over, part_rows)
    dues = spread(len(messages), over, begin=datetime.now(UTC))
    rows = pa.Table.from_pylist(
        [
            {**{name: getattr(one, name) for name in (*FAILURE_KEY, "stream", "offset")}, "deliver_at": due, "part": 0}
            for one, due in zip(messages, dues, strict=True)
        ],
        schema=_CHOSEN_SCHEMA,
    ).sort_by([(name, "ascending") for name in order_of(over)])
    parts = pa.array([place // part_rows for place in range(rows.num_rows)], pa.int32())
    files, place = fs.FileSystem.from_uri(_chosen_folder(ledger))
    # A run that was killed before the head of the ledger was written may have left some.
    files.create_dir(place, recursive=True)
    files.delete_dir_contents(place)
    with files.open_output_stream(posixpath.join(place, f"part-00000-{uuid4()}.parquet")) as file:
        parquet.write_table(rows.set_column(rows.column_names.index("part"), "part", parts), file)
    ledger.begin(
        LedgerHead(plan=plan, broker=broker, rows=rows.num_rows, checksum=0, parts=-(-rows.num_rows // part_rows))
    )
    return ledger


def chosen_of(ledger: Ledger) -> pa.Table:
    """The messages of a choice, with their due times and parts.

    Raises:
        InvalidInputError: a file of the choice cannot be read, or the files were removed.
    """
    tables = [_NOTHING]
    for one, files in _chosen_files(ledger):
        try:
            with files.open_input_file(one.path) as file:
                # Spark writes times of the type INT96.
                rows = parquet.ParquetFile(file, coerce_int96_timestamp_unit="us").read(columns=_CHOSEN_SCHEMA.names)
            tables.append(rows.select(_CHOSEN_SCHEMA.names).cast(_CHOSEN_SCHEMA))
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(one.path, error) from error
    return pa.concat_tables(tables)


def check_small(ledger: Ledger, *, largest: int | None) -> str:
    """Check that this process can finish a choice, and describe its size.

    Args:
        largest: the largest size of the files in bytes; None for any size.

    Raises:
        InvalidInputError: the files of the choice were removed.
        NeedsSparkError: the choice is too large.
    """
    return _refuse_large([ledger], "the unfinished choice has", largest)


def _refuse_large(ledgers: Sequence[Ledger], what: str, largest: int | None) -> str:
    size = sum(one.size for ledger in ledgers for one, _ in _chosen_files(ledger))
    shown = f"{what} {in_bytes(size)}"
    if largest is not None and size > largest:
        raise NeedsSparkError(f"{shown}, more than {in_bytes(largest)}")
    return shown


def remaining_of(ledger: Ledger) -> list[TappedFailure]:
    """The messages of a choice whose parts were not sent."""
    done = ledger.numbers()
    rows = [row for row in _rows_of(chosen_of(ledger)) if row["part"] not in done]
    return [TappedFailure(due=row.pop("deliver_at"), **row) for row in rows]


def send(ledger: Ledger, replay: ReplayRun, *, to: str | None = None, skip_missing: bool = False) -> list[LedgerPart]:
    """Send the messages of a choice whose parts are not in the ledger, one part after the other.

    An interruption takes effect after the current part. See :func:`bide.pipelines.replay.from_audit.send`.

    Returns:
        The parts that were sent.

    Raises:
        FolderInUseError: another run is sending this choice.
        NotFoundError: a stream has dropped a message since the choice was made.
        BrokerError: the broker cannot be reached, or refuses a message.
    """
    with ledger.lock():
        done = ledger.numbers()
        rows = sorted(remaining_of(ledger), key=lambda one: one.part)
        if rows:
            due: defaultdict[int, int] = defaultdict(int)
            for one in rows:
                due[one.part] = max(due[one.part], one.due)
            PartSender(ledger=ledger, replay=replay, skip_missing=skip_missing).send_when_due(
                (
                    (part, [_replay_message(one, to) for one in some])
                    for part, some in groupby(rows, key=lambda one: one.part)
                ),
                due,
                first=min(one.due for one in rows),
            )
        return [one for one in ledger.parts() if one.part not in done]


def _chosen_files(ledger: Ledger) -> Iterator[tuple[fs.FileInfo, fs.FileSystem]]:
    files, place = fs.FileSystem.from_uri(_chosen_folder(ledger))
    try:
        found = files.get_file_info(fs.FileSelector(place))
    except OSError as error:
        raise _unreadable(place, error) from error
    for one in found:
        if one.is_file and not is_hidden(one.base_name):
            yield one, files


def _unreadable(path: str, error: Exception) -> InvalidInputError:
    return InvalidInputError(
        f"the chosen messages in {path} cannot be read ({error}): restore them, or name another ledger, with which "
        "messages of earlier replays are sent again"
    )


def _chosen_folder(ledger: Ledger) -> str:
    return f"{ledger.folder.rstrip('/')}/{CHOSEN_FOLDER}"


def _rows_of(chosen: pa.Table) -> list[dict[str, Any]]:
    """The rows of a choice, with times in microseconds."""
    numbers = pa.schema([(one.name, pa.int64() if one.type == TIMESTAMP else one.type) for one in chosen.schema])
    return chosen.cast(numbers).to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types


def _replay_message(one: TappedFailure, to: str | None) -> ReplayMessage:
    return ReplayMessage(message_id=one.message_id, queue=to or one.queue, stream=one.stream, offset=one.offset)
