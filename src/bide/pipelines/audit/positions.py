"""Positions of an audit in the streams of a source, in a file of the folder.

Both engines use these positions, so a round with one engine continues where a round with the other ended. The
positions after a batch are written after its facts and their note, which commits the batch. Before the first fact of a
batch is written, the file records that the batch has begun. After a crash, the next round removes the facts and the
note of such a batch, and reads its messages again.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from bide.errors import InvalidOptionError, OffsetsLostError
from bide.pipelines.audit.columns import TABLES_BY_SOURCE, UNDECODABLE
from bide.pipelines.audit.storage import open_storage
from bide.spark.offsets import limited, positions_of
from bide.streams.log import StreamLogs
from bide.streams.range_reader import OffsetRange

if TYPE_CHECKING:
    from bide.pipelines.audit.folder import Folder

GAPS_ADVICE: Final = "with allow_gaps=True, or audit into another folder"
"""The advice of errors about gaps."""

_POSITIONS: Final = "_state/positions"
_CHECKPOINT: Final = "_checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Positions of a source after its last batch.

    Attributes:
        batch: the number of that batch; -1 before the first one.
        offsets: the next offset of each stream.
        is_begun: whether the next batch has begun, so that some of its facts, or its note, may exist.
    """

    batch: int = -1
    offsets: Mapping[str, int] = field(default_factory=dict)
    is_begun: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMessages:
    """Messages of a source that a round reads.

    Attributes:
        begin: the first offset of each stream.
        end: the offset after the last one of each stream.
    """

    begin: Mapping[str, int]
    end: Mapping[str, int]

    def batches(self, limit: int) -> Iterator[tuple[list[OffsetRange], Mapping[str, int]]]:
        """The ranges of each batch of at most *limit* offsets, and the positions after it."""
        begin = self.begin
        while begin != self.end:
            upto = limited(begin, self.end, limit)
            yield [OffsetRange(stream=one, start=begin[one], end=upto[one]) for one in sorted(upto)], upto
            begin = upto


class PositionFile:
    """The file with the positions of a source.

    Args:
        source: one of :data:`bide.pipelines.audit.columns.TABLES_BY_SOURCE`.
    """

    def __init__(self, folder: Folder, source: str) -> None:
        self._folder = folder
        self._source = source
        self._path = folder.path(_POSITIONS, f"{source}.json")

    def read(self) -> Positions:
        """Read the positions. Before the first batch, they are ``Positions()``."""
        if not self._folder.exists(self._path):
            return Positions()
        return Positions(**json.loads(self._folder.read_bytes(self._path)))

    def write(self, positions: Positions) -> None:
        """Write the positions atomically."""
        content = {"batch": positions.batch, "offsets": dict(positions.offsets), "is_begun": positions.is_begun}
        self._folder.write_json(self._path, content)

    def note_name(self, batch: int) -> str:
        """The name of the note about the facts of a batch."""
        return f"{self._source}-{batch}"

    def clear(self) -> Positions:
        """Remove the facts and the note of a batch that a killed round began. Return the positions before it."""
        found = self.read()
        if found.is_begun:
            storage = open_storage(self._folder)
            for table in (*TABLES_BY_SOURCE[self._source], f"{UNDECODABLE}/source={self._source}"):
                storage.drop_batch(table, found.batch + 1)
            self._folder.drop_note(self.note_name(found.batch + 1))
            found = replace(found, is_begun=False)
            self.write(found)
        return found


def find_new_messages(
    logs: StreamLogs, streams: Sequence[str], known: Mapping[str, int], *, allow_gaps: bool
) -> NewMessages:
    """Find the messages of a source that a round has to read.

    Args:
        known: the positions after the last batch. Streams without a position are read from their beginning.
        allow_gaps: leave out streams that are not named any more, and read a stream that ends before its position from
            the beginning.

    Raises:
        InvalidOptionError: a stream with a position is not named any more.
        OffsetsLostError: a stream ends before its position.
        TargetNotFoundError: a stream does not exist.
        BrokerError: the broker cannot be reached, or refuses.
    """
    if (missing := sorted(known.keys() - set(streams))) and not allow_gaps:
        raise InvalidOptionError(
            f"the folder has positions of {', '.join(missing)}, which the audit does not read any more: name them with "
            f"the same layouts, prefix and events as before, continue without them {GAPS_ADVICE}"
        )
    end = {stream: logs.end(stream) for stream in streams}
    begin = {stream: known[stream] if stream in known else logs.first(stream) for stream in streams}
    for stream, last in end.items():
        if begin[stream] <= last:
            continue
        if not allow_gaps:
            raise OffsetsLostError(
                f"the stream {stream!r} was read up to offset {begin[stream]:,}, and now it ends at {last:,}: it was "
                f"deleted and declared again. Continue {GAPS_ADVICE}",
                stream=stream,
                offset=last,
            )
        begin[stream] = 0
    return NewMessages(begin=begin, end=end)


def import_checkpoints(folder: Folder) -> None:
    """Copy the positions of an audit of version 2 from the checkpoints of Spark into files.

    Spark writes the end offsets of a batch when the batch begins, and a commit when the batch is complete. A batch
    without a commit was interrupted. Its messages are read again.
    """
    for source in TABLES_BY_SOURCE:
        place = folder.path(_CHECKPOINT, source)
        begun, ended = (_numbers(folder, posixpath.join(place, kind)) for kind in ("offsets", "commits"))
        batch, offsets = max(ended, default=-1), {}
        if batch >= 0:
            text = folder.read_bytes(posixpath.join(place, "offsets", str(batch))).decode()
            offsets = positions_of(json.loads(text.splitlines()[-1]))
        if begun:
            is_begun = max(begun) > batch
            PositionFile(folder, source).write(Positions(batch=batch, offsets=offsets, is_begun=is_begun))


def remove_checkpoints(folder: Folder) -> None:
    """Remove the checkpoints of Spark, after :func:`import_checkpoints`."""
    if folder.exists(place := folder.path(_CHECKPOINT)):
        folder.files.delete_dir(place)


def _numbers(folder: Folder, place: str) -> list[int]:
    return [int(name) for name in folder.entries(place) if name.isdecimal()]
