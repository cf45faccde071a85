"""The record of what operators did, in a stream."""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Self

from bide.amqp.connection import Connection
from bide.client.client import Client
from bide.error_queues.stream_browser import everything
from bide.errors import BrokerError, UnsupportedBrokerError
from bide.topology import Queue, Topology

AUDIT: Final = "bide.audit"
"""The stream that operations are recorded in."""

IDS_PER_RECORD: Final = 1000

_KEEP: Final = "1Y"

_PATIENCE: Final = 10.0
"""Seconds without a record, or an answer, after which the broker is taken to stand still."""

_QUIET: Final = 1.0
"""Seconds without another record after which the broker is asked whether it has sent all of the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """One step of an operation.

    Attributes:
        at: when.
        who: the user of the operating system, and the machine.
        user: the broker's user.
        operation: ``retry``, ``replay``, ``edit``, ``archive``, ``unarchive`` or ``discard``.
        run: the same for all records of one operation.
        step: ``begun``, ``ids`` (some of the messages that it was done to), ``ended`` or ``interrupted``.
        queue: the error queue.
        details: what was chosen, where to, which ids, and what came of it.
    """

    at: datetime
    who: str
    user: str
    operation: str
    run: str
    step: str
    queue: str
    details: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "at": self.at.isoformat(timespec="milliseconds"),
            "who": self.who,
            "user": self.user,
            "operation": self.operation,
            "run": self.run,
            "step": self.step,
            "queue": self.queue,
            **self.details,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The record that :meth:`to_dict` made.

        Raises:
            KeyError: it lacks something.
            ValueError: something in it is not what it should be.
        """
        known = ("at", "who", "user", "operation", "run", "step", "queue")
        texts = {name: values[name] for name in known}
        if odd := [name for name, value in texts.items() if not isinstance(value, str)]:
            raise ValueError(f"{odd[0]} is not text")
        details = {name: value for name, value in values.items() if name not in known}
        if not isinstance(details.get("ids", []), list):
            raise ValueError("ids is not a list")
        at = datetime.fromisoformat(texts.pop("at"))
        if at.tzinfo is None:
            raise ValueError("at has no time zone")
        try:
            return cls(at=at.astimezone(UTC), details=details, **texts)
        except OverflowError:
            raise ValueError("at is outside the years 1 to 9999") from None


class Audit:
    """Writes the records of one operation.

    Args:
        run: names the operation.
    """

    def __init__(self, client: Client, *, operation: str, queue: str, run: str) -> None:
        self._client = client
        self._operation = operation
        self._queue = queue
        self._run = run

    async def begin(self, details: Mapping[str, Any]) -> None:
        """Say what is about to be done, before it is.

        Raises:
            UnsupportedBrokerError: the broker has no streams.
            BrokerError: the record was not taken.
        """
        try:
            if not await self._client.exists(AUDIT):
                stream = Queue(AUDIT, arguments={"x-queue-type": "stream", "x-max-age": _KEEP})
                await self._client.declare(Topology(queues=[stream]))
        except BrokerError as error:
            raise UnsupportedBrokerError(
                f"the operation cannot be recorded, because the stream {AUDIT!r} cannot be declared ({error}): see to "
                "that, or leave the record out with --no-audit"
            ) from error
        await self._write("begun", details)

    async def ids(self, ids: Sequence[str]) -> None:
        """Say which messages it was done to.

        Raises:
            BrokerError: the record was not taken.
        """
        for start in range(0, len(ids), IDS_PER_RECORD):
            await self._write("ids", {"ids": list(ids[start : start + IDS_PER_RECORD])})

    async def end(self, details: Mapping[str, Any]) -> None:
        """Say what came of it.

        Raises:
            BrokerError: the record was not taken.
        """
        await self._write("ended", details)

    async def interrupt(self, details: Mapping[str, Any]) -> None:
        """Say what was done and what is left, as the operation was interrupted.

        Raises:
            BrokerError: the record was not taken.
        """
        await self._write("interrupted", details)

    async def _write(self, step: str, details: Mapping[str, Any]) -> None:
        record = AuditRecord(
            at=self._client.now(),
            who=_who(),
            user=self._client.url.user,
            operation=self._operation,
            run=self._run,
            step=step,
            queue=self._queue,
            details=details,
        )
        body = json.dumps(record.to_dict(), ensure_ascii=True, separators=(",", ":"), default=str)
        await self._client.publish(body, to=AUDIT, type="bide.audit", content_type="application/json")


async def read_audit(
    client: Client, *, malformed: Callable[[bytes], None] | None = None
) -> AsyncGenerator[AuditRecord, None]:
    """All records, oldest first; none where nothing was ever recorded.

    Args:
        malformed: is called with the body of each message in the stream that is not a record: every client that may
            write to the stream can put one there. They are left out.

    Raises:
        ConnectionLostError: the connection broke, or the broker stands still: there may be more.
        BrokerError: the broker cannot be reached, or refuses.
    """
    connection = await Connection.open(client.url)
    try:
        async with aclosing(everything(connection, AUDIT, patience=_PATIENCE, quiet=_QUIET)) as deliveries:
            async for delivery in deliveries:
                if (record := _record(delivery.body)) is not None:
                    yield record
                elif malformed is not None:
                    malformed(delivery.body)
    finally:
        await connection.close()


def _record(body: bytes) -> AuditRecord | None:
    try:
        return AuditRecord.from_dict(json.loads(body))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _who() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "(unknown)"
    return f"{user}@{socket.gethostname()}"
