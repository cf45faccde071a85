"""Records of the stream of a tap: id, due time and target of each message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from bide.delay.protocol import HEADER_DUE, HEADER_SENT, HEADER_TO
from bide.errors import UndecodableMessageError
from bide.streams.amqp10 import first_properties, lookup, sections
from bide.streams.log import Address
from bide.streams.range_reader import OffsetRange, read_range

_NAMES: Final = tuple(one.encode() for one in (HEADER_DUE, HEADER_SENT, HEADER_TO))


@dataclass(frozen=True, slots=True, kw_only=True)
class TapRecord:
    """A message in the stream of a tap.

    Attributes:
        offset: its offset in the stream.
        stored_at: when the broker stored it, in milliseconds since the Unix epoch.
        due: its due time, in milliseconds since the Unix epoch; None if it has no such header.
        sent: when it was sent, in milliseconds since the Unix epoch; None if it has no such header.
        target: its target, such as ``q:mail``; None if it has no such header.
    """

    offset: int
    stored_at: int
    message_id: str
    due: int | None
    sent: int | None
    target: str | None


def records(address: Address, wanted: OffsetRange, *, since: int = 0) -> Iterator[TapRecord]:
    """Read the messages in a range of offsets, without those that cannot be decoded.

    Args:
        since: leave out chunks that were stored before this time, in milliseconds since the Unix epoch.
    """
    for chunk, first, last in read_range(address, wanted, fail_on_data_loss=False):
        if chunk.timestamp < since:
            continue
        for number, data in enumerate(chunk.messages()):
            if not first <= number < last or not isinstance(data, bytes):
                continue
            if (found := _record(data, chunk.first + number, chunk.timestamp)) is not None:
                yield found


def _record(data: bytes, offset: int, at: int) -> TapRecord | None:
    try:
        parts = sections(data)
        message_id = first_properties(parts.properties, 1)[0] if parts.properties else None
        due, sent, target = lookup(parts.application, *_NAMES) if parts.application else (None, None, None)
    except UndecodableMessageError:
        return None
    return TapRecord(
        offset=offset,
        stored_at=at,
        message_id=str(message_id or ""),
        due=due if isinstance(due, int) else None,
        sent=sent if isinstance(sent, int) else None,
        target=target if isinstance(target, str) else None,
    )
