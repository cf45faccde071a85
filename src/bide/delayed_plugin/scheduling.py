"""Scheduling the messages of an export with their due times."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Final

from bide.admin.apply import exists
from bide.amqp.connection import Connection
from bide.client.client import Client
from bide.delay.waiting_hall import delivery_exchange_of
from bide.delayed_plugin.export import read_export
from bide.delayed_plugin.pending import PendingMessage
from bide.durations import EPOCH, MILLISECOND
from bide.errors import BideError, InvalidInputError, TargetNotFoundError
from bide.messages.outgoing import OutgoingMessage
from bide.relay.decision import HEADER_DELAY
from bide.runtime.arguments import whole_number
from bide.topology import Exchange, Topology

BATCH: Final = 5000
"""Messages that are published before the progress is saved. A crash can repeat at most this many."""

_SENT_AS_IS: Final = (
    "message_id",
    "correlation_id",
    "reply_to",
    "content_type",
    "content_encoding",
    "type",
    "app_id",
    "priority",
)


@dataclass(slots=True, kw_only=True)
class Imported:
    """The counts of :func:`import_messages`, including those of interrupted runs on the same file.

    Attributes:
        scheduled: messages that the broker has confirmed.
        delivered: messages that were skipped, because they were due before the plugin was switched off.
        elsewhere: messages of other virtual hosts.
        refused: messages that cannot be sent; they are in the file ``FILE.refused``, with the reasons.
        place: the byte offset in the file after the last message.
    """

    scheduled: int = 0
    delivered: int = 0
    elsewhere: int = 0
    refused: int = 0
    place: int = 0


async def import_messages(
    path: Path,
    client: Client,
    connection: Connection,
    *,
    delivered_before: datetime | None = None,
    progress: Callable[[Imported], None] | None = None,
) -> Imported:
    """Schedule the messages of an export. An interrupted import continues after its last batch.

    Each message goes to the delivery exchange of its exchange, or to the exchange itself if there is none. A message
    without a message id gets one that is made of its position in the file, so it is the same in every run.

    Args:
        path: the file. ``FILE.progress`` records how far the import got.
        client: a client with the delay infrastructure in which the messages are to wait.
        connection: a connection to the same virtual host.
        delivered_before: skip messages that were due before this time, because the plugin has delivered them.
        progress: called after each batch.

    Raises:
        InvalidInputError: the file is not a complete export, or a file is damaged.
        TargetNotFoundError: an exchange does not exist.
        BrokerError: the broker cannot be reached, or refuses. Call the function again.
        OSError: a file cannot be read or written.
    """
    noted = path.with_name(path.name + ".progress")
    done = _read_progress(noted)
    targets: dict[str, str] = {}
    run = _Importer(client.url.vhost, client.url.user, _file_id(path), delivered_before)
    messages = read_export(path, start=done.place)
    while batch := list(islice(messages, BATCH)):
        for name in {one.exchange for one, _ in batch if one.vhost == client.url.vhost} - targets.keys():
            targets[name] = await _target(connection, name)
        refused: list[tuple[PendingMessage, str]] = []
        sent = list(run.outgoing(batch, targets, done, refused))
        async for summary in client.publish_many(message for message, _ in sent).batches():
            done.scheduled += summary.confirmed
            refused += [(sent[one.position][1], str(one.error)) for one in summary.failures]
        _note_refused(path, refused)
        done.refused += len(refused)
        done.place = batch[-1][1]
        _write(noted, json.dumps(asdict(done)))
        if progress is not None:
            progress(done)
    return done


def _read_progress(noted: Path) -> Imported:
    if not noted.exists():
        return Imported()
    try:
        done = Imported(**json.loads(noted.read_text()))
        for count in asdict(done).values():
            whole_number("the count", count, 0, sys.maxsize)
    except (ValueError, TypeError) as error:
        raise InvalidInputError(
            f"{noted} is damaged: delete it to start the import from the beginning, which repeats sent messages"
        ) from error
    return done


async def _target(connection: Connection, name: str) -> str:
    for candidate in (delivery_exchange_of(name), name):
        if not candidate or await exists(connection, Topology([Exchange(candidate)])):
            return candidate
    raise TargetNotFoundError(
        f"the exchange {name!r} does not exist on the virtual host {connection.url.vhost!r}: declare what replaces it, "
        "for example with bide.delayed_plugin.replacing.replace_exchanges(...)"
    )


def _file_id(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(file.readline()).hexdigest()[:12]


class _Importer:
    def __init__(self, vhost: str, user: str, file_id: str, delivered_before: datetime | None) -> None:
        self._vhost, self._user, self._file_id = vhost, user, file_id
        self._delivered_before = None if delivered_before is None else (delivered_before - EPOCH) // MILLISECOND

    def outgoing(
        self,
        batch: Iterable[tuple[PendingMessage, int]],
        targets: dict[str, str],
        done: Imported,
        refused: list[tuple[PendingMessage, str]],
    ) -> Iterator[tuple[OutgoingMessage, PendingMessage]]:
        for one, offset in batch:
            if one.vhost != self._vhost:
                done.elsewhere += 1
            elif self._delivered_before is not None and one.due < self._delivered_before:
                done.delivered += 1
            else:
                try:
                    message = self._message(one, targets[one.exchange], f"delayed-plugin-{self._file_id}-{offset}")
                except BideError as error:
                    refused.append((one, str(error)))
                else:
                    yield message, one

    def _message(self, one: PendingMessage, target: str, message_id: str) -> OutgoingMessage:
        if len(one.routing_keys) > 1:
            raise InvalidInputError("it has CC or BCC keys: publish it once for each key")
        values = one.properties()
        headers: dict[str, Any] = dict(values.pop("headers", {}))
        if (delay := headers.pop(HEADER_DELAY, None)) is not None:
            headers[HEADER_DELAY] = -_whole(f"its header {HEADER_DELAY}", delay)
        known = {name: values.pop(name) for name in _SENT_AS_IS if name in values}
        if not isinstance(values.get("timestamp", EPOCH), datetime):
            raise InvalidInputError(f"its timestamp {values['timestamp']} is beyond the year 9999")
        if values.get("user_id", self._user) != self._user:
            raise InvalidInputError(f"its user_id is {values['user_id']!r}: only that user can send it")
        if "cluster_id" in values:
            raise InvalidInputError("it has a cluster_id, which bide does not send")
        expiration = values.get("expiration")
        return OutgoingMessage(
            one.body,
            exchange=target,
            routing_key=one.routing_keys[0],
            deliver_at=EPOCH + one.due * MILLISECOND,
            headers=headers,
            persistent=values.get("delivery_mode") == 2,
            timestamp=values.get("timestamp"),
            user_id=values.get("user_id"),
            expiration=None if expiration is None else timedelta(milliseconds=_whole("its expiration", expiration)),
            **{"message_id": message_id, **known},
        )


def _whole(what: str, value: Any) -> int:
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"{what} is {value!r}: it must be a number of milliseconds") from error


def _note_refused(path: Path, refused: Iterable[tuple[PendingMessage, str]]) -> None:
    lines = [
        json.dumps(
            {
                "reason": reason,
                "due": (EPOCH + one.due * MILLISECOND).astimezone(UTC).isoformat(timespec="milliseconds"),
                "exchange": one.exchange,
                "routing_keys": one.routing_keys,
                "body_bytes": len(one.body),
            }
        )
        for one, reason in refused
    ]
    if lines:
        with path.with_name(path.name + ".refused").open("a") as file:
            file.write("\n".join(lines) + "\n")


def _write(path: Path, text: str) -> None:
    """Replace a small file. After a crash, either the old or the new file is there."""
    new = path.with_name(path.name + ".new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
