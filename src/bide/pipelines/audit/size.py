"""Size of the new messages of a round of an audit, which decides its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bide.pipelines.audit.columns import TABLES_BY_SOURCE
from bide.pipelines.audit.positions import PositionFile, find_new_messages
from bide.pipelines.engine import NeedsSparkError
from bide.pipelines.formats import is_uri
from bide.runtime.wording import in_bytes
from bide.streams.log import StreamLogs

if TYPE_CHECKING:
    from bide.pipelines.audit.folder import Folder
    from bide.pipelines.audit.run import Sources


MAX_EARLIER_BYTES: Final = 500_000_000
"""The largest size of the files with earlier facts of new messages that this process reads, unless it has to."""


def check_small(sources: Sources, folder: Folder, *, largest: int | None) -> str:
    """Check that this process can read the new messages of a round, and describe their size.

    Args:
        largest: the largest size in bytes; None for any size.

    Raises:
        NeedsSparkError: the folder is a URI, or the new messages are too large.
        BrokerError: the streams cannot be read.
    """
    if is_uri(folder.place):
        raise NeedsSparkError(f"{folder.place} is a URI")
    size = _bytes_of_new(sources, folder)
    if largest is not None and size > largest:
        raise NeedsSparkError(f"the new messages have {in_bytes(size)}, more than {in_bytes(largest)}")
    return f"the new messages have {in_bytes(size)}"


def _bytes_of_new(sources: Sources, folder: Folder) -> float:
    """Estimate the bytes of the new messages of all sources, from the size of the first new ones of each stream."""
    size = 0.0
    with StreamLogs(sources.address) as logs:
        for source in TABLES_BY_SOURCE:
            known = PositionFile(folder, source).read().offsets
            streams, _ = sources.streams_of(source)
            # The round itself reports gaps.
            new = find_new_messages(logs, streams, known, allow_gaps=True)
            for stream, begin in new.begin.items():
                if (count := new.end[stream] - begin) > 0:
                    size += count * logs.message_size(stream, begin)
    return size
