"""The latest messages in the streams of the taps."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from bide.admin.locate import stream_port
from bide.console.site import Site
from bide.delay.protocol import HEADER_DUE, HEADER_SENT, HEADER_TO
from bide.errors import BideError, TargetNotFoundError, UndecodableMessageError
from bide.streams.amqp10 import first_properties, lookup, sections
from bide.streams.chunk import Chunk
from bide.streams.log import DEFAULT_PORT, DEFAULT_TLS_PORT, Address, StreamLogs
from bide.streams.range_reader import OffsetRange, read_range

MAX_READ: Final = 100_000
"""Messages of a stream that are read for one picture or search: some seconds."""

_NAMES: Final = tuple(one.encode() for one in (HEADER_DUE, HEADER_SENT, HEADER_TO))


@dataclass(frozen=True, slots=True, kw_only=True)
class TapRecord:
    """A message in the stream of a tap.

    Attributes:
        offset: its offset.
        at: when the broker stored it, in milliseconds since the Unix epoch.
        due: the due time in its header; None if it has none.
        sent: when it was sent, by its header.
        target: its target, by its header.
    """

    offset: int
    at: int
    message_id: str
    due: int | None
    sent: int | None
    target: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TapRecords:
    """What was read of a stream.

    Attributes:
        stream: its name.
        records: the messages in the order of the stream.
        is_whole: whether all messages of the wanted time were read.
        why: why nothing was read; empty if something was.
    """

    stream: str
    records: tuple[TapRecord, ...] = ()
    is_whole: bool = True
    why: str = ""


async def read_tap(site: Site, which: str, *, since: int) -> TapRecords:
    """The latest messages of a tap.

    Args:
        which: ``scheduled`` or ``delivered``.
        since: read what was stored at this time or later, in milliseconds since the Unix epoch.
    """
    taps = site.infrastructure.taps()
    if taps is None:
        return TapRecords(stream="", why=f"the layout {site.infrastructure.name} has no taps")
    stream = taps.scheduled if which == "scheduled" else taps.delivered
    try:
        return await asyncio.to_thread(_read, site, stream, since)
    except TargetNotFoundError:
        return TapRecords(stream=stream, why="there is no tap: run 'bide tap on'")
    except BideError as error:
        return TapRecords(stream=stream, why=str(error))


def _read(site: Site, stream: str, since: int) -> TapRecords:
    # The port does not depend on the password, which this text of the URL lacks.
    known = site.stream_port or stream_port(str(site.url), os.environ)
    port = known or (DEFAULT_TLS_PORT if site.url.tls else DEFAULT_PORT)
    address = Address(url=site.url, port=port)
    with StreamLogs(address) as logs:
        end = logs.end(stream)
        first = logs.since(stream, since)
    start = max(first, end - MAX_READ)
    wanted = OffsetRange(stream=stream, start=start, end=end)
    records = tuple(_records(read_range(address, wanted, fail_on_data_loss=False), since)) if start < end else ()
    return TapRecords(stream=stream, records=records, is_whole=start == first)


def _records(chunks: Iterator[tuple[Chunk, int, int]], since: int) -> Iterator[TapRecord]:
    for chunk, first, last in chunks:
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
        at=at,
        message_id=str(message_id or ""),
        due=due if isinstance(due, int) else None,
        sent=sent if isinstance(sent, int) else None,
        target=target if isinstance(target, str) else None,
    )
