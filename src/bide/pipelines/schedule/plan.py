"""Plan of a schedule: the meaning of the columns, and the target of the messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from bide.admin.apply import exists
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.delay.allowed_targets import AllowedTargets
from bide.errors import InvalidColumnError, InvalidInputError, TargetNotFoundError
from bide.messages.checker import MessageChecker
from bide.messages.outgoing import OutgoingMessage
from bide.pipelines.ledger import digest_of
from bide.pipelines.run_sync import run_sync
from bide.schedules.outgoing import OutgoingSchedule
from bide.schedules.prepared import check_schedule
from bide.spark.sink_settings import SinkSettings
from bide.topology import Exchange, Queue, Topology

WINDOW: Final = 1_000
"""The largest number of unconfirmed messages of a task. With a larger window, messages that are due soon would be
later, because each waits at the broker for those before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePlan:
    """How rows become messages.

    Attributes:
        to_column: the column with the names of the target queues, if *settings* have no target.
        allow: patterns of the targets that the column may name; see :class:`bide.delay.allowed_targets.AllowedTargets`.
            If empty: all but the queues of delay infrastructures. The patterns do not change message ids.
        at_column: the column of due times: timestamps, dates, or text that Spark can cast to a timestamp. Times without
            a zone are in the time zone of the session.
        delay_column: the column of delays, instead of *at_column*: intervals, milliseconds, or text such as ``5m``.
        body_columns: the columns of the body, a JSON object. If empty: all columns except *at_column*, *delay_column*,
            *to_column*, *header_columns* and *headers_column*.
        body_column: the column that is the body itself, as text or binary; instead of *body_columns*.
        id_column: the column of message ids; if None, an id is derived from the contents of the row.
        key_column: the column of keys, by which messages can be cancelled, moved and replaced while they wait; each key
            once. None for messages without keys, which wait in the delay infrastructure.
        header_columns: the columns that become headers of the same names, as text; null leaves a header out.
        headers_column: the column of all headers, instead of *header_columns*: a map, a struct, or a JSON object of
            text.
        name: a name that distinguishes runs with equal rows: the ids of their messages differ.
        settings: target and options of the messages.
    """

    to_column: str | None = None
    allow: tuple[str, ...] = ()
    at_column: str | None = None
    delay_column: str | None = None
    body_columns: tuple[str, ...] = ()
    body_column: str | None = None
    id_column: str | None = None
    key_column: str | None = None
    header_columns: tuple[str, ...] = ()
    headers_column: str | None = None
    name: str = ""
    settings: SinkSettings = field(repr=False)

    def digest(self) -> str:
        """A digest that differs between plans that make different messages of the same row. It ignores the broker.

        Message ids depend on the digest, so an option that a later release of bide adds must not change it unless the
        option is set.
        """
        left_out = ("settings", "allow")
        columns = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in left_out}
        return digest_of({**columns, "constants": self.settings.constants})

    def ledger_digest(self) -> str:
        """A digest of the plan and the delay infrastructure, to recognize the plan of a ledger.

        Message ids do not depend on it, because the infrastructure does not change the message.
        """
        infrastructure = self.settings.infrastructure
        named = {"plan": self.digest(), "layout": infrastructure.name, "settings": _settings_of(infrastructure)}
        return digest_of({**named, "allow": sorted(self.allow)})

    @property
    def text_columns(self) -> tuple[str | None, ...]:
        """The columns of text; None for those that the plan does not have."""
        return (self.id_column, self.key_column, self.to_column, *self.header_columns)

    def check_columns(self, columns: Sequence[str]) -> None:
        """Check that a table has the columns of the plan.

        Raises:
            InvalidInputError: the plan names columns that exclude each other.
            InvalidColumnError: the table lacks a column.
        """
        if self.body_column is not None and self.body_columns:
            raise InvalidInputError(
                f"the column {self.body_column!r} is the body, and columns of a JSON body "
                f"({', '.join(self.body_columns)}) were given too: give only one of the two"
            )
        if self.headers_column is not None and self.header_columns:
            raise InvalidInputError(
                f"the column {self.headers_column!r} has all headers, and columns of single headers "
                f"({', '.join(self.header_columns)}) were given too: give only one of the two"
            )
        named = (self.time_column, self.body_column, self.headers_column, *self.body_columns, *self.text_columns)
        for name in named:
            if name is not None and name not in columns:
                raise InvalidColumnError(f"there is no column {name!r}: choose from {', '.join(columns)}")

    @property
    def time_column(self) -> str:
        """The column of due times or of delays.

        Raises:
            InvalidInputError: neither or both are set.
        """
        found = [one for one in (self.at_column, self.delay_column) if one is not None]
        if len(found) != 1:
            raise InvalidInputError("name either the column of due times or the column of delays")
        return found[0]

    @property
    def broker(self) -> str:
        """The broker and its virtual host, without user and password."""
        url = BrokerUrl.parse(self.settings.url)
        return f"{','.join(f'{host}:{port}' for host, port in url.hosts)}/{url.vhost.removeprefix('/')}"

    def check_messages(self) -> None:
        """Check a delayed sample message with the headers and the target of the plan: if it is invalid, all rows are.

        Raises:
            InvalidInputError: the sample is invalid.
        """
        AllowedTargets.of(self.allow)
        self.check_sample(None if self.to_column is None else "sample")

    def check_sample(self, queue: str | None) -> None:
        """Check a delayed sample message to a queue; None for the target of the plan.

        Raises:
            InvalidInputError: the sample is invalid.
        """
        infrastructure, now = self.settings.infrastructure, datetime.now(UTC)
        headers = dict.fromkeys(self.header_columns, "")
        common: dict[str, Any] = {**self.settings.constants, "headers": headers}
        if queue is not None:
            common["to"] = queue
        if self.key_column is not None:
            check_schedule(OutgoingSchedule(b"", key="sample", delay=timedelta(0), **common), now)
            return
        sample = OutgoingMessage(b"", delay=infrastructure.resolution, **common)
        MessageChecker().check(sample).starting(now).route(infrastructure, now)

    def check(self) -> None:
        """Check the broker and the target before the slow steps.

        Raises:
            TargetNotFoundError: the queue or exchange does not exist.
            BrokerError: the broker cannot be reached, or refuses.
        """
        run_sync(self._check())

    async def _check(self) -> None:
        constants = self.settings.constants
        if (queue := constants.get("to")) is not None:
            what, target = f"queue {queue!r}", Topology(queues=[Queue(queue)])
        else:
            exchange = constants.get("exchange", "")
            # The default exchange always exists, and RabbitMQ refuses to declare it, even passively.
            what, target = f"exchange {exchange!r}", Topology([Exchange(exchange)] if exchange else [])
        connection = await Connection.open(BrokerUrl.parse(self.settings.url))
        try:
            if not await exists(connection, target):
                raise TargetNotFoundError(f"the {what} does not exist on {self.broker}: declare it, or name another")
        finally:
            await connection.close()


def _settings_of(infrastructure: Any) -> dict[str, Any]:
    """The settings of an infrastructure, by name, without defaults: a later release of bide may add settings."""
    if not is_dataclass(infrastructure):
        return {name: getattr(infrastructure, name) for name in ("delivery_exchange", "resolution", "max_delay")}
    given = ((one, getattr(infrastructure, one.name)) for one in fields(infrastructure))
    return {one.name: value for one, value in given if value != one.default}
