"""The latest messages in the streams of the taps."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

from bide.admin.locate import stream_port
from bide.console.site import Site
from bide.console.tap_index import MAX_READ, TapIndex
from bide.console.tap_records import TapRecord, records
from bide.errors import BideError, TargetNotFoundError
from bide.streams.log import DEFAULT_PORT, DEFAULT_TLS_PORT, Address, StreamLogs
from bide.streams.range_reader import OffsetRange

TapKind = Literal["scheduled", "delivered"]

TAPS: Final[tuple[TapKind, TapKind]] = ("scheduled", "delivered")

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class TapRecords:
    """The messages that were read from the stream of a tap.

    Attributes:
        stream: the name of the stream; empty if the layout has no taps.
        records: the messages in the order of the stream.
        is_whole: whether all messages since the given time were read.
        why: why the stream could not be read; empty if it was read.
    """

    stream: str
    records: tuple[TapRecord, ...] = ()
    is_whole: bool = True
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedTap(Generic[_Value]):
    """The size of the index of a tap, and an answer from the index.

    Attributes:
        stream: the name of the stream; empty if the layout has no taps.
        number: the number of messages in the index: the latest ones of the stream.
        since: when the first of them was stored, in milliseconds since the Unix epoch; None without messages.
        older: the approximate number of messages of the stream before the index.
        is_full: whether the index has no room for older messages.
        answer: the result of the question; None if there is no index.
        why: why there is no index; empty if there is one.
    """

    stream: str
    number: int = 0
    since: int | None = None
    older: int = 0
    is_full: bool = False
    answer: _Value | None = None
    why: str = ""

    def state(self) -> dict[str, Any]:
        """The values for the page, without the answer."""
        return {
            "stream": self.stream,
            "number": self.number,
            "since": self.since,
            "older": self.older,
            "is_full": self.is_full,
            "why": self.why,
        }


async def read_tap(site: Site, which: TapKind, *, since: int) -> TapRecords:
    """The latest messages of a tap.

    Args:
        since: read messages that were stored at this time or later, in milliseconds since the Unix epoch.
    """
    stream = _stream(site, which)
    if stream is None:
        return TapRecords(stream="", why=_no_taps(site))
    try:
        return await asyncio.to_thread(_read, site, stream, since)
    except BideError as error:
        return TapRecords(stream=stream, why=_why(error))


async def ask_index(
    site: Site, which: TapKind, question: Callable[[TapIndex, Address], _Value], *, older: bool = False
) -> IndexedTap[_Value]:
    """Bring the index of a tap up to date, and ask it a question.

    Args:
        question: called in a thread with the index, which is locked, and the address of the stream.
        older: whether to add older messages to the index, too.
    """
    stream = _stream(site, which)
    if stream is None:
        return IndexedTap(stream="", why=_no_taps(site))
    index = site.tap_indexes.setdefault(stream, TapIndex(stream))

    def ask() -> IndexedTap[_Value]:
        address = _address(site)
        with index.lock:
            index.read(address, older=older)
            return IndexedTap(
                stream=stream,
                number=len(index),
                since=index.since,
                older=index.older,
                is_full=index.is_full,
                answer=question(index, address),
            )

    try:
        return await asyncio.to_thread(ask)
    except BideError as error:
        return IndexedTap(stream=stream, why=_why(error))


def _stream(site: Site, which: TapKind) -> str | None:
    taps = site.infrastructure.taps()
    if taps is None:
        return None
    return taps.scheduled if which == "scheduled" else taps.delivered


def _no_taps(site: Site) -> str:
    return f"the layout {site.infrastructure.name} has no taps"


def _why(error: BideError) -> str:
    return "there is no tap: run 'bide tap on'" if isinstance(error, TargetNotFoundError) else str(error)


def _address(site: Site) -> Address:
    # The port does not depend on the password, which this text of the URL lacks.
    known = site.stream_port or stream_port(str(site.url), os.environ)
    return Address(url=site.url, port=known or (DEFAULT_TLS_PORT if site.url.tls else DEFAULT_PORT))


def _read(site: Site, stream: str, since: int) -> TapRecords:
    address = _address(site)
    with StreamLogs(address) as logs:
        end = logs.end(stream)
        first = logs.since(stream, since)
    start = max(first, end - MAX_READ)
    wanted = OffsetRange(stream=stream, start=start, end=end)
    found = tuple(records(address, wanted, since=since)) if start < end else ()
    return TapRecords(stream=stream, records=found, is_whole=start == first)
