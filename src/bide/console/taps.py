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

Which = Literal["scheduled", "delivered"]

TAPS: Final[tuple[Which, Which]] = ("scheduled", "delivered")

_Value = TypeVar("_Value")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedTap(Generic[_Value]):
    """What the index of a tap has, and the answer that was taken from it.

    Attributes:
        stream: the name of the stream.
        number: the messages in the index, which are the latest ones of the stream.
        since: when the first of them was stored, in milliseconds since the Unix epoch; None without one.
        older: the number of messages of the stream before them, about.
        is_full: whether the index has no room for older ones.
        answer: the answer; None if there is no index.
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


async def read_tap(site: Site, which: Which, *, since: int) -> TapRecords:
    """The latest messages of a tap.

    Args:
        since: read what was stored at this time or later, in milliseconds since the Unix epoch.
    """
    stream = _stream(site, which)
    if stream is None:
        return TapRecords(stream="", why=_no_taps(site))
    try:
        return await asyncio.to_thread(_read, site, stream, since)
    except BideError as error:
        return TapRecords(stream=stream, why=_why(error))


async def ask_index(
    site: Site, which: Which, question: Callable[[TapIndex, Address], _Value], *, older: bool = False
) -> IndexedTap[_Value]:
    """Bring the index of a tap up to date, and take an answer from it.

    Args:
        older: add older messages to the index, too.
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


def _stream(site: Site, which: Which) -> str | None:
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
