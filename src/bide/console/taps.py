"""The latest messages in the streams of the taps."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

from bide.admin.locate import stream_port
from bide.console.tap_index import MAX_READ, TapIndex
from bide.console.tap_records import TapRecord, records
from bide.console.vhost import ConsoleVhost
from bide.errors import BideError, TargetNotFoundError
from bide.streams.log import DEFAULT_PORT, DEFAULT_TLS_PORT, Address, StreamLogs
from bide.streams.range_reader import OffsetRange

TapKind = Literal["scheduled", "delivered"]

TAPS: Final[tuple[TapKind, TapKind]] = ("scheduled", "delivered")

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentTapRecords:
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
class TapIndexAnswer(Generic[_Value]):
    """The size of the index of a tap, and an answer from the index.

    Attributes:
        stream: the name of the stream; empty if the layout has no taps.
        count: the number of messages in the index: the latest ones of the stream.
        since: when the first of them was stored, in milliseconds since the Unix epoch; None without messages.
        older_count: the approximate number of messages of the stream before the index.
        is_full: whether the index has no room for older messages.
        answer: the result of the question; None if there is no index.
        why: why there is no index; empty if there is one.
    """

    stream: str
    count: int = 0
    since: int | None = None
    older_count: int = 0
    is_full: bool = False
    answer: _Value | None = None
    why: str = ""

    def state(self) -> dict[str, Any]:
        """The values for the page, without the answer."""
        return {
            "stream": self.stream,
            "number": self.count,
            "since": self.since,
            "older": self.older_count,
            "is_full": self.is_full,
            "why": self.why,
        }


async def read_tap(vhost: ConsoleVhost, which: TapKind, *, since: int) -> RecentTapRecords:
    """The latest messages of a tap.

    Args:
        since: read messages that were stored at this time or later, in milliseconds since the Unix epoch.
    """
    stream = _stream(vhost, which)
    if stream is None:
        return RecentTapRecords(stream="", why=_no_taps(vhost))
    try:
        return await asyncio.to_thread(_read, vhost, stream, since)
    except BideError as error:
        return RecentTapRecords(stream=stream, why=_why(error))


async def ask_index(
    vhost: ConsoleVhost, which: TapKind, question: Callable[[TapIndex, Address], _Value], *, older: bool = False
) -> TapIndexAnswer[_Value]:
    """Bring the index of a tap up to date, and ask it a question.

    Args:
        question: called in a thread with the index, which is locked, and the address of the stream.
        older: whether to add older messages to the index, too.
    """
    stream = _stream(vhost, which)
    if stream is None:
        return TapIndexAnswer(stream="", why=_no_taps(vhost))
    index = vhost.tap_indexes.setdefault(stream, TapIndex(stream))

    def ask() -> TapIndexAnswer[_Value]:
        address = _address(vhost)
        with index.lock:
            index.read(address, older=older)
            return TapIndexAnswer(
                stream=stream,
                count=len(index),
                since=index.since,
                older_count=index.older_count,
                is_full=index.is_full,
                answer=question(index, address),
            )

    try:
        return await asyncio.to_thread(ask)
    except BideError as error:
        return TapIndexAnswer(stream=stream, why=_why(error))


def _stream(vhost: ConsoleVhost, which: TapKind) -> str | None:
    taps = vhost.infrastructure.taps()
    if taps is None:
        return None
    return taps.scheduled if which == "scheduled" else taps.delivered


def _no_taps(vhost: ConsoleVhost) -> str:
    return f"the layout {vhost.infrastructure.name} has no taps"


def _why(error: BideError) -> str:
    return "there is no tap: run 'bide tap on'" if isinstance(error, TargetNotFoundError) else str(error)


def _address(vhost: ConsoleVhost) -> Address:
    # The port does not depend on the password, which this text of the URL lacks.
    known = vhost.stream_port or stream_port(str(vhost.url), os.environ)
    return Address(url=vhost.url, port=known or (DEFAULT_TLS_PORT if vhost.url.tls else DEFAULT_PORT))


def _read(vhost: ConsoleVhost, stream: str, since: int) -> RecentTapRecords:
    address = _address(vhost)
    with StreamLogs(address) as logs:
        end = logs.end(stream)
        first = logs.since(stream, since)
    start = max(first, end - MAX_READ)
    wanted = OffsetRange(stream=stream, start=start, end=end)
    found = tuple(records(address, wanted, since=since)) if start < end else ()
    return RecentTapRecords(stream=stream, records=found, is_whole=start == first)
