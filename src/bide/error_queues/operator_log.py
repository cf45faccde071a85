"""Operator log: records of operations on failed messages and schedules, in a stream."""

from __future__ import annotations

import asyncio
import getpass
import json
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Self

from bide.amqp.connection import Connection
from bide.client.client import Client
from bide.error_queues.stream_browser import read_all
from bide.errors import BideError, BrokerError, UnsupportedBrokerError
from bide.runtime.logs import logger
from bide.topology import Queue, Topology

log = logger(__name__)

OPERATOR_LOG: Final = "bide.audit"
"""The stream of the operator log."""

IDS_PER_RECORD: Final = 1000

_KEEP: Final = "1Y"

_TIMEOUT: Final = 10.0
"""Seconds without a record or an answer after which the broker is considered unresponsive."""

_INTERRUPT_TIMEOUT: Final = 5.0
"""Seconds that recording an interruption may take."""

_QUIET: Final = 1.0
"""Seconds without another record after which the broker is asked whether all records have arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorLogRecord:
    """One step of an operation.

    Attributes:
        at: when the step was recorded.
        who: the user of the operating system and the host name; for the console, also its user.
        user: the broker's user.
        operation: ``retry``, ``replay``, ``edit``, ``archive``, ``unarchive`` or ``discard``. The console also records
            ``resend``, and changes of schedules such as ``cancel schedules``.
        run: the name of the operation, the same in all of its records.
        step: ``begun``, ``ids`` (some of the processed messages), ``ended`` or ``interrupted``.
        queue: the error queue, or the exchange of the schedule log.
        details: the selection, the target, the ids or the result, depending on the step.
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
        """The record as JSON."""
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
        """Parse a record from the result of :meth:`to_dict`.

        Raises:
            KeyError: a value is missing.
            ValueError: a value has the wrong type.
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


class OperatorLogWriter:
    """Writes the records of one operation.

    Args:
        run: the name of the operation.
        operator: the operator's name; None for :func:`this_operator`.
    """

    def __init__(self, client: Client, *, operation: str, queue: str, run: str, operator: str | None = None) -> None:
        self._client = client
        self._operator = operator
        self._operation = operation
        self._queue = queue
        self._run = run

    async def begin(self, details: Mapping[str, Any]) -> None:
        """Record an operation before it begins.

        Raises:
            UnsupportedBrokerError: the broker has no streams.
            BrokerError: the broker did not confirm the record.
        """
        try:
            if not await self._client.exists(OPERATOR_LOG):
                stream = Queue(OPERATOR_LOG, arguments={"x-queue-type": "stream", "x-max-age": _KEEP})
                await self._client.declare(Topology(queues=[stream]))
        except BrokerError as error:
            raise UnsupportedBrokerError(
                f"the operation cannot be recorded, because the stream {OPERATOR_LOG!r} cannot be declared ({error}): "
                "allow this user to declare it, or run without a record with audit=False"
            ) from error
        await self._write("begun", details)

    async def ids(self, ids: Sequence[str]) -> None:
        """Record the ids of processed messages.

        Raises:
            BrokerError: the broker did not confirm the record.
        """
        for start in range(0, len(ids), IDS_PER_RECORD):
            await self._write("ids", {"ids": list(ids[start : start + IDS_PER_RECORD])})

    async def end(self, details: Mapping[str, Any]) -> None:
        """Record the result of the operation.

        Raises:
            BrokerError: the broker did not confirm the record.
        """
        await self._write("ended", details)

    async def interrupt(self, details: Mapping[str, Any]) -> None:
        """Record what was done and what is left when the operation was interrupted or failed.

        The broker may be the cause, so this stops after 5 seconds without a confirm, and logs a warning.
        """
        try:
            async with asyncio.timeout(_INTERRUPT_TIMEOUT):
                await self._write("interrupted", details)
        except (BideError, TimeoutError) as error:
            log.warning("the interruption of %s was not recorded: %s", self._operation, error)

    async def _write(self, step: str, details: Mapping[str, Any]) -> None:
        record = OperatorLogRecord(
            at=self._client.now(),
            who=self._operator or this_operator(),
            user=self._client.url.user,
            operation=self._operation,
            run=self._run,
            step=step,
            queue=self._queue,
            details=details,
        )
        body = json.dumps(record.to_dict(), ensure_ascii=True, separators=(",", ":"), default=str)
        await self._client.publish(body, to=OPERATOR_LOG, type="bide.audit", content_type="application/json")


async def read_operator_log(
    client: Client, *, malformed: Callable[[bytes], None] | None = None
) -> AsyncGenerator[OperatorLogRecord, None]:
    """Read all records, oldest first. Without the stream there are none.

    Args:
        malformed: called with the body of each message in the stream that is not a record. Every client that may write
            to the stream can put such a message there; it is skipped.

    Raises:
        ConnectionLostError: the connection was lost, or the broker does not answer; there may be more records.
        BrokerError: the broker refuses, or cannot be reached.
    """
    connection = await Connection.open(client.url)
    try:
        async with aclosing(read_all(connection, OPERATOR_LOG, max_wait=_TIMEOUT, quiet=_QUIET)) as deliveries:
            async for delivery in deliveries:
                if (record := _record(delivery.body)) is not None:
                    yield record
                elif malformed is not None:
                    malformed(delivery.body)
    finally:
        await connection.close()


def _record(body: bytes) -> OperatorLogRecord | None:
    try:
        return OperatorLogRecord.from_dict(json.loads(body))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def new_run() -> str:
    """Create the name of an operation."""
    return secrets.token_hex(6)


def this_operator() -> str:
    """The user of the operating system and the host name."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "(unknown)"
    return f"{user}@{socket.gethostname()}"
