"""Positions of an audit in the streams of a source, in a file of the folder.

Both engines read from these positions, so a round of one continues where a round of the other ended. A batch counts
from the moment when its positions are written, after its facts and their note. Before the first fact of a batch is
written, the file says that the batch was begun; after a crash, the next round removes what it left.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from bide.errors import InvalidOptionError, OffsetsLostError
from bide.pipelines.audit.columns import TABLES, UNDECODABLE
from bide.spark.offsets import limited, positions_of
from bide.streams.log import StreamLogs
from bide.streams.range_reader import OffsetRange

if TYPE_CHECKING:
    from bide.pipelines.audit.folder import Folder

WAY_OUT: Final = "with allow_gaps=True, or audit into another folder"
"""The advice of errors about gaps."""

_PLACE: Final = "_state/positions"
_CHECKPOINT: Final = "_checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Positions of a source after its last batch.

    Attributes:
        batch: the number of that batch; -1 before the first one.
        offsets: the next offset of each stream.
        is_begun: whether the next batch may have left facts, or a note.
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
    """The file of a source.

    Args:
        source: one of :data:`bide.pipelines.audit.columns.TABLES`.
    """

    def __init__(self, folder: Folder, source: str) -> None:
        self._folder = folder
        self._source = source
        self._path = folder.path(_PLACE, f"{source}.json")

    def read(self) -> Positions:
        """The positions; those before the first batch if there are none yet."""
        if not self._folder.exists(self._path):
            return Positions()
        return Positions(**json.loads(self._folder.read_bytes(self._path)))

    def write(self, positions: Positions) -> None:
        """Write the positions, of which readers see all or nothing."""
        content = {"batch": positions.batch, "offsets": dict(positions.offsets), "is_begun": positions.is_begun}
        self._folder.write_json(self._path, content)

    def note_name(self, batch: int) -> str:
        """The name of the note about the facts of a batch."""
        return f"{self._source}-{batch}"

    def clear(self) -> Positions:
        """Remove what a killed round has left of its batch, and return the positions before it."""
        found = self.read()
        if found.is_begun:
            for table in (*TABLES[self._source], f"{UNDECODABLE}/source={self._source}"):
                self._folder.drop_batch(table, found.batch + 1)
            self._folder.drop_note(self.note_name(found.batch + 1))
            found = replace(found, is_begun=False)
            self.write(found)
        return found


def find_new(logs: StreamLogs, streams: Sequence[str], known: Mapping[str, int], *, allow_gaps: bool) -> NewMessages:
    """What a round has to read of the streams of a source.

    Args:
        known: the positions after the last batch; streams without one are read from their beginning.
        allow_gaps: leave out streams that are not named any more, and begin again with streams that are shorter.

    Raises:
        InvalidOptionError: a stream with a position is not named any more.
        OffsetsLostError: a stream ends before its position.
        TargetNotFoundError: a stream does not exist.
        BrokerError: the broker cannot be reached, or refuses.
    """
    if (missing := sorted(known.keys() - set(streams))) and not allow_gaps:
        raise InvalidOptionError(
            f"the folder has positions of {', '.join(missing)}, which the audit does not read any more: name them with "
            f"the same layouts, prefix and events as before, continue without them {WAY_OUT}"
        )
    end = {stream: logs.end(stream) for stream in streams}
    begin = {stream: known[stream] if stream in known else logs.first(stream) for stream in streams}
    for stream, last in end.items():
        if begin[stream] <= last:
            continue
        if not allow_gaps:
            raise OffsetsLostError(
                f"the stream {stream!r} was read up to offset {begin[stream]:,}, and now it ends at {last:,}: it was "
                f"deleted and declared again. Continue {WAY_OUT}",
                stream=stream,
                offset=last,
            )
        begin[stream] = 0
    return NewMessages(begin=begin, end=end)


def take_over(folder: Folder) -> None:
    """Carry the positions of an audit of version 2, which were in checkpoints of Spark, into files.

    Spark notes the end of a batch when it begins it, and again when it is complete. A batch without the second note was
    interrupted, and is read again.
    """
    for source in TABLES:
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
    """Remove the checkpoints of Spark, after :func:`take_over`."""
    if folder.exists(place := folder.path(_CHECKPOINT)):
        folder.files.delete_dir(place)


def _numbers(folder: Folder, place: str) -> list[int]:
    return [int(name) for name in folder.entries(place) if name.isdecimal()]
