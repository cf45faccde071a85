"""Files of exported messages: JSON lines, written page by page."""

from __future__ import annotations

import asyncio
import json
import os
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from bide.delayed_plugin.pending import PAGE_MESSAGES, PendingMessage, read_page
from bide.durations import from_milliseconds
from bide.errors import InvalidInputError
from bide.foreign_text import visible_json

_Read = TypeVar("_Read")

FORMAT: Final = 1

_FIRST: Final = b'{"bide-export"'
_PAGE: Final = b'{"page"'
_END: Final = b'{"end"'


@dataclass(slots=True, kw_only=True)
class Exported:
    """The result of :func:`export`.

    Attributes:
        messages: the number of messages in the file.
        resumed: how many of them an earlier, interrupted export had written.
        exchanges: the number of messages that this run wrote, by virtual host and exchange.
    """

    messages: int = 0
    resumed: int = 0
    exchanges: Counter[tuple[str, str]] = field(default_factory=Counter)


async def export(
    path: Path,
    command: Sequence[str],
    *,
    page: int = PAGE_MESSAGES,
    progress: Callable[[int], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Exported:
    """Write all messages that wait on one node to a file. An interrupted export continues after its last page.

    Stop the publishers first: the export misses a message that is published after the page of its due time was read.

    Args:
        path: the file; it is synced to the disk after every page.
        command: the command that runs ``rabbitmqctl`` for the node.
        page: messages per page.
        progress: called with the number of messages in the file, after each page.
        environment: environment variables of the command.

    Raises:
        InvalidInputError: the file is not an export, or is complete already.
        BrokerError: the messages cannot be read.
        OSError: the file cannot be written.
    """
    done = Exported()
    with _open(path) as file:
        key = _resume(file, done)
        while True:
            read = await read_page(command, key, messages=page, environment=environment)
            if not file.tell():
                header = {"bide-export": FORMAT, "started": datetime.now(UTC).isoformat(timespec="milliseconds")}
                file.write(json.dumps(header).encode() + b"\n")
            for one in read.messages:
                done.exchanges[one.vhost, one.exchange] += 1
            done.messages += len(read.messages)
            key = read.next_key
            lines = [*(_line(one) for one in read.messages), _marker(read.node, key, done.messages)]
            await asyncio.to_thread(_append, file, b"".join(lines))
            if progress is not None:
                progress(done.messages)
            if not key:
                return done


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open a file. A new one without a page is removed again: import and apply would ask for the rest of the export."""
    is_new = not path.exists()
    with path.open("x+b" if is_new else "r+b") as file:
        try:
            yield file
        finally:
            if is_new and not file.tell():
                path.unlink()


def _append(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _resume(file: BinaryIO, done: Exported) -> str:
    """Cut off an incomplete page, and return the key at which the next page starts."""
    kept, key = 0, ""
    for offset, line in _lines(file):
        if line.startswith(_END):
            raise InvalidInputError(f"{file.name} is a complete export already: name another file, or delete it")
        if line.startswith(_PAGE):
            key, done.messages = _parsed(line, _read_marker, Path(file.name), offset)
            kept = offset + len(line)
    done.resumed = done.messages
    file.seek(kept)
    file.truncate()
    return key


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The complete lines, each with the byte offset of its start."""
    offset = 0
    for line in file:
        if offset == 0 and not line.startswith(_FIRST) and not _FIRST.startswith(line):
            raise InvalidInputError(
                f"{file.name} was not written by bide.delayed_plugin.export.export(...): name another file"
            )
        if line.endswith(b"\n"):
            yield offset, line
        offset += len(line)


def _marker(node: str, key: str, messages: int) -> bytes:
    values = {"page": key} if key else {"end": True}
    return json.dumps({**values, "messages": messages, "node": node}).encode() + b"\n"


def _line(one: PendingMessage) -> bytes:
    values = {
        "due": one.due,
        "vhost": one.vhost,
        "exchange": one.exchange,
        "routing_keys": one.routing_keys,
        "encoded_properties": b64encode(one.encoded_properties).decode(),
        "body": b64encode(one.body).decode(),
    }
    return visible_json(values).encode() + b"\n"


def read_export(path: Path, *, start: int = 0) -> Iterator[tuple[PendingMessage, int]]:
    """The messages of a complete export, each with the byte offset of the end of its line.

    Args:
        path: the file.
        start: a byte offset from an earlier read, at which to start.

    Raises:
        InvalidInputError: the file is not a complete export.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        _check_complete(file, path)
        file.seek(start)
        for line in file:
            if line.startswith(_END):
                return
            after = start + len(line)
            if not line.startswith((_FIRST, _PAGE)):
                yield _parsed(line, _message, path, start), after
            start = after


def _check_complete(file: BinaryIO, path: Path) -> None:
    is_export = file.read(len(_FIRST)) == _FIRST
    file.seek(max(file.seek(0, os.SEEK_END) - 1000, 0))
    *_, last, after = (b"\n" + file.read()).split(b"\n")
    if not is_export or after or not last.startswith(_END):
        raise InvalidInputError(
            f"{path} is not a complete export: call bide.delayed_plugin.export.export(...) again to finish it"
        )


def _parsed(line: bytes, read: Callable[[Any], _Read], path: Path, offset: int) -> _Read:
    """A line of the file.

    Raises:
        InvalidInputError: it is damaged.
    """
    try:
        return read(json.loads(line))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidInputError(
            f"{path} is damaged in the line at the byte {offset}: export the messages into a new file"
        ) from error


def _read_marker(values: Any) -> tuple[str, int]:
    return _of(str, values["page"]), _of(int, values["messages"])


def _message(values: Any) -> PendingMessage:
    first, *others = _of(list, values["routing_keys"])
    return PendingMessage(
        due=_due(values["due"]),
        vhost=_of(str, values["vhost"]),
        exchange=_of(str, values["exchange"]),
        routing_keys=tuple(_of(str, one) for one in (first, *others)),
        encoded_properties=b64decode(values["encoded_properties"], validate=True),
        body=b64decode(values["body"], validate=True),
    )


def _due(value: Any) -> int:
    due = _of(int, value)
    if from_milliseconds(due) is None:
        raise ValueError(f"{due} ms are beyond the years 1 to 9999")
    return due


def _of(kind: type[_Read], value: Any) -> _Read:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def count_waiting(path: Path, vhost: str, *, now: datetime) -> Counter[str]:
    """The number of messages of an export that are not yet due, by exchange.

    Raises:
        InvalidInputError: the file is not a complete export.
        OSError: the file cannot be read.
    """
    after = now.timestamp() * 1000
    return Counter(one.exchange for one, _ in read_export(path) if one.vhost == vhost and one.due > after)
