"""Streams of taps, events and schedules with messages of each kind that an audit reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pika
import pyarrow as pa
from deltalake import DeltaTable
from pyarrow import parquet

import bide
from bide.delay.taps import taps_of
from bide.pipelines.audit.run import Sources
from bide.pipelines.audit.sources import find_sources
from bide.pipelines.iceberg import identifier, open_catalog
from bide.schedules.names import ScheduleNames, partition_of
from bide.schedules.records import ChangeSchedule
from bide.streams.log import Address
from bide.topology import Binding, Exchange, Queue, Topology
from tests import stream_publisher
from tests.broker.schedule_log import log_client
from tests.support import RawText, Vhost, stream_port

EVENTS: Final = "events"
LAYOUTS: Final = (bide.Clock(), bide.NServiceBus(), bide.Celery())
STREAM: Final = {"x-queue-type": "stream"}
TABLES: Final = (
    *("scheduled", "delivered", "processed", "failed", "occurrences", "undecodable"),
    *("messages", "pending", "lateness", "failures", "schedules_pending"),
)

_BAD: Final = RawText(b"o\xff\xfek")
_START: Final = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=3)
"""Far from now and from now on, so that no message becomes overdue between two audits."""


@dataclass(frozen=True, slots=True)
class AuditedStreams:
    """A virtual host with these streams."""

    vhost: Vhost

    @property
    def port(self) -> int:
        """The port of the stream protocol."""
        return stream_port(self.vhost.broker)

    def declare(self) -> None:
        """Declare the streams, and the schedule log."""
        names = [name for layout in LAYOUTS for name in taps_of(layout).names]
        streams = Topology(
            exchanges=[Exchange(_exchange(name), "fanout") for name in (*names, EVENTS)],
            queues=[Queue(name, arguments=STREAM) for name in (*names, EVENTS)],
            bindings=[Binding(_exchange(name), name) for name in (*names, EVENTS)],
        )
        with bide.connect_sync(self.vhost.url) as client:
            client.declare(ScheduleNames().topology() | streams | Topology(queues=[Queue.quorum("mails")]))

    def sources(self, *, batch_rows: int = 1_000_000, allow_gaps: bool = False) -> Sources:
        """What an audit reads of it."""
        return find_sources(
            self.vhost.url, LAYOUTS, events=[EVENTS], port=self.port, batch_rows=batch_rows, allow_gaps=allow_gaps
        )

    def fill(self, part: int, *, count: int = 12) -> None:
        """Add messages; those of a later part tell more about those of an earlier one.

        Args:
            count: messages of each system.
        """
        with closing(pika.BlockingConnection(pika.URLParameters(self.vhost.url))) as connection:
            channel = connection.channel()
            channel.confirm_delivery()

            def put(stream: str, key: str, body: bytes, **fields: Any) -> None:
                channel.basic_publish(_exchange(stream), key, body, pika.BasicProperties(**fields))

            for message_id, place in ((f"{part}-{one}", one) for one in range(count)):
                self._live(put, message_id, place)
            if part:
                self._finish(put, part, count)
        self._schedule(part)
        self._put_odd()

    def _live(self, put: Any, message_id: str, place: int) -> None:
        """A message of each system, which is scheduled and perhaps delivered."""
        clock, net, celery = map(taps_of, LAYOUTS)
        due = (
            _START
            + timedelta(minutes=place * 7, seconds=place)
            + (timedelta(days=1) if place % 5 == 0 else timedelta())
        )
        headers: dict[str, Any] = {"bide-to": f"q:{'orders' if place % 2 else 'mails'}", "bide-due": _ms(due),
                                   "bide-sent": _ms(due) - 60_000}  # fmt: skip
        own: dict[str, Any] = {"message_id": f"clock-{message_id}", "headers": headers, "type": "Remind"}
        put(clock.scheduled, "orders", b"12345", **own)
        if place % 3 == 0:
            again = headers | {"bide-retries": 1, "bide-first-due": _ms(due), "bide-due": _ms(due) + 9_000}
            put(clock.scheduled, "orders", b"12345", **{**own, "headers": again})
            self._tell(put, "failed", own["message_id"], due, exception="ValueError", group="g", text="no \ud83d")
            self._tell(put, "failed", own["message_id"], due, exception="ValueError", group="g", text="no \ud83d")
        sent = due - timedelta(minutes=5)
        dotnet = {
            "NServiceBus.MessageId": f"net-{message_id}",
            "NServiceBus.TimeSent": sent.strftime("%Y-%m-%d %H:%M:%S:%f Z"),
            "NServiceBus.EnclosedMessageTypes": "Shop.Remind, Shop.Messages;Shop.Other",
            "NServiceBus.Transport.RabbitMQ.DelayInSeconds": 300,
        }
        put(net.scheduled, f"{_digits(300)}.Shop.Orders", b"{}", message_id=f"net-{message_id}", headers=dotnet)
        task = {"task": "shop.remind", "id": f"task-{message_id}", "eta": due.isoformat()}
        put(celery.scheduled, f"{_digits(60)}.tasks", b"[]", headers={**task, "argsrepr": "()"})
        if place % 4 != 1:
            put(clock.delivered, "orders", b"12345", **own)
            put(net.delivered, f"{_digits(300)}.Shop.Orders", b"{}", message_id=f"net-{message_id}", headers=dotnet)
            put(celery.delivered, f"{_digits(60)}.tasks", b"[]", headers=task)

    def _finish(self, put: Any, part: int, count: int) -> None:
        """What happens later to messages of the part before."""
        for place in range(0, count, 2):
            due = _START + timedelta(minutes=place * 7, seconds=place)
            self._tell(put, "processed", f"clock-{part - 1}-{place}", due, attempt=2)
            self._tell(
                put, "parked", f"clock-{part - 1}-{place}", due, endpoint="mail", exception="KeyError", group="h"
            )

    def _tell(self, put: Any, kind: str, message_id: str, due: datetime, **more: Any) -> None:
        started = _ms(due) + 1_000
        event = {"event": kind, "endpoint": "shop", "queue": "orders", "message_id": message_id, "attempt": 1,
                 "retries": 0, "sent": _ms(due) - 60_000, "due": _ms(due), "started": started,
                 "ended": started + 250, **more}  # fmt: skip
        put(EVENTS, "", json.dumps(event).encode())

    def _schedule(self, part: int) -> None:
        """Schedules that wait, that are replaced, and that are cancelled. No gate runs."""

        async def append() -> None:
            async with log_client(self.vhost.url) as log:
                for key in ("a", "b", "c", "a"):
                    name = f"{part}-{key}"
                    await log.add(name, "q:mails", 86_400_000, properties={"message_id": name, "type": "Remind"})
                key = f"{part}-b"
                await log.append(ChangeSchedule(request=log.next_request(partition_of(key)), action="cancel", key=key))

        asyncio.run(append())

    def _put_odd(self) -> None:
        """Text that is not UTF-8, times without a meaning, and bytes that are not AMQP 1.0."""
        clock = taps_of(LAYOUTS[0])
        with closing(pika.BlockingConnection(pika.URLParameters(self.vhost.url))) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            for headers in (
                {"bide-to": "q:orders", "bide-due": _ms(_START), _BAD: _BAD},
                {"bide-to": "x:shop", "bide-due": 1 << 62, "bide-sent": "soon", "bide-retries": "1.5"},
                {"task": "t", "id": "odd", "eta": "later", "NServiceBus.DeliverAt": "2026-11-21 11:59:59:000000 Z"},
            ):
                properties = pika.BasicProperties(message_id=_BAD, type=_BAD, headers=headers)
                for stream in clock.names:
                    channel.basic_publish("", stream, b"body", properties)
            for body in (
                b"not an event",
                b"\xff",
                b'[{"event": "processed"}]',
                b'{"event": "processed", "ended": 1e400}',
            ):
                channel.basic_publish("", EVENTS, body)
        entries = [stream_publisher.message(one) for one in (b"not AMQP", b"\0\x53\x77" + b"\0" * 3_000)]
        for stream in (*clock.names, EVENTS):
            assert stream_publisher.publish(Address.of(self.vhost.url, self.port), stream, entries) == entries


def tables_in(folder: Path) -> dict[str, list[Any]]:
    """All tables of an audit as sorted rows, without the numbers of batches."""
    return {name: _rows(folder / name) for name in TABLES if (folder / name).exists()}


def types_in(folder: Path) -> dict[str, set[str]]:
    """The columns of all tables with the types of their values, without those that are names of folders."""
    return {name: {one for file in _files(folder / name) for one in _types(file)} for name in tables_in(folder)}


def _types(file: Path) -> Iterable[str]:
    return (f"{one.name} {one.type}" for one in parquet.read_schema(file) if not pa.types.is_list(one.type))


def _rows(table: Path) -> list[Any]:
    if (table / "_delta_log").exists():
        return sorted(map(_versioned_row, DeltaTable(table).to_pyarrow_table().to_pylist()))
    if (table / "metadata").exists():
        with open_catalog(str(table.parent)) as catalog:
            rows = catalog.load_table(identifier(table.name)).scan().to_arrow().to_pylist()
        # pyiceberg writes an empty list for null (apache/iceberg-python#3833).
        plain = ({name: None if value == [] else value for name, value in row.items()} for row in rows)
        return sorted(map(_versioned_row, plain))
    rows = []
    for file in _files(table):
        named = [part for part in file.relative_to(table).parts[:-1] if not part.startswith("batch=")]
        with file.open("rb") as opened:
            found = parquet.ParquetFile(opened, coerce_int96_timestamp_unit="us").read()
        rows += [
            repr((named, sorted((name, _plain(value)) for name, value in row.items()))) for row in found.to_pylist()
        ]
    return sorted(rows)


def _versioned_row(row: dict[str, Any]) -> str:
    """A row as it is in a Parquet table, where partitions are folders."""
    named = [f"{name}={row.pop(name)}" for name in ("source", "day") if name in row]
    row.pop("batch", None)
    return repr((named, sorted((name, _plain(value)) for name, value in row.items())))


def _plain(value: Any) -> Any:
    """A time without its zone, which Spark's type does not have."""
    match value:
        case datetime():
            return value.replace(tzinfo=None)
        case list():
            return [_plain(one) for one in value]
        case dict():
            return {name: _plain(one) for name, one in value.items()}
        case _:
            return value


def _files(table: Path) -> list[Path]:
    return sorted(one for one in table.rglob("*.parquet") if not one.name.startswith((".", "_")))


def _exchange(stream: str) -> str:
    return f"to {stream}"


def _digits(seconds: int) -> str:
    return ".".join(f"{seconds:028b}")


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1_000)
