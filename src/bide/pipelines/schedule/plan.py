"""What becomes of the rows of a table that is scheduled: which columns are what, and where messages go."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from typing import Any, Final

from bide.admin.apply import exists
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.errors import InvalidInputError, TargetNotFoundError
from bide.messages.checker import MessageChecker
from bide.messages.outgoing import OutgoingMessage
from bide.pipelines.ledger import digest_of
from bide.pipelines.run_sync import wait_for
from bide.spark.sink_settings import SinkSettings
from bide.topology import Exchange, Queue, Topology

WINDOW: Final = 1_000
"""Messages of one task that are sent and not yet confirmed: each is late by as many as lie before it at the broker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePlan:
    """What becomes of a row.

    Attributes:
        at_column: when it is due: a timestamp, a date, or text that Spark can cast to a timestamp. Where there is no
            time zone, the session's counts.
        delay_column: instead, how long after it is sent: an interval, milliseconds, or text such as ``5m``.
        body_columns: whose values make the body, a JSON object; if empty, all columns but that of times or
            delays and those of headers: the one of ids too.
        body_column: whose value is the body as it is, text or binary; instead of *body_columns*.
        id_column: whose value is the message id; if None, it is made of what is in the row.
        header_columns: whose values are headers of the same names, as text; null leaves a header out.
        name: tells schedules apart that have equal rows and are both meant.
        settings: where messages go, and how.
    """

    at_column: str | None = None
    delay_column: str | None = None
    body_columns: tuple[str, ...] = ()
    body_column: str | None = None
    id_column: str | None = None
    header_columns: tuple[str, ...] = ()
    name: str = ""
    settings: SinkSettings = field(repr=False)

    def digest(self) -> str:
        """Tells plans apart that make other messages of the same rows. The broker's address is no part of it.

        Message ids are made of it: an option that a later bide adds must not change those of who does not use it.
        """
        columns = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "settings"}
        return digest_of({**columns, "constants": self.settings.constants})

    def ledger_digest(self) -> str:
        """Tells apart what ledgers are about: plans, and the infrastructures that delay what they make.

        Message ids are not made of it: however a row is delayed, it is the same message.
        """
        infrastructure = self.settings.infrastructure
        told = {"plan": self.digest(), "layout": infrastructure.name, "settings": _settings_of(infrastructure)}
        return digest_of(told)

    @property
    def time_column(self) -> str:
        """The column that says when a message is due, or in what time.

        Raises:
            InvalidInputError: there is none, or two.
        """
        found = [one for one in (self.at_column, self.delay_column) if one is not None]
        if len(found) != 1:
            raise InvalidInputError("name the column of due times or that of delays, and not both")
        return found[0]

    @property
    def broker(self) -> str:
        """The broker and its virtual host, without user and password."""
        url = BrokerUrl.parse(self.settings.url)
        return f"{','.join(f'{host}:{port}' for host, port in url.hosts)}/{url.vhost.removeprefix('/')}"

    def check_letters(self) -> None:
        """See whether messages with such headers can be sent, delayed, to such a target: else no row could be.

        Raises:
            InvalidInputError: they cannot.
        """
        infrastructure, now = self.settings.infrastructure, datetime.now(UTC)
        same = {**self.settings.constants, "headers": dict.fromkeys(self.header_columns, "")}
        outgoing = OutgoingMessage(b"", delay=infrastructure.resolution, **same)
        MessageChecker().check(outgoing).starting(now).route(infrastructure, now)

    def check(self) -> None:
        """See whether the broker and the target are there, before anything takes its time.

        Raises:
            TargetNotFoundError: there is no such queue or exchange.
            BrokerError: the broker cannot be asked.
        """
        wait_for(self._check())

    async def _check(self) -> None:
        constants = self.settings.constants
        if (queue := constants.get("to")) is not None:
            what, target = f"queue {queue!r}", Topology(queues=[Queue(queue)])
        else:
            exchange = constants.get("exchange", "")
            # The default exchange is there, and may not be asked for.
            what, target = f"exchange {exchange!r}", Topology([Exchange(exchange)] if exchange else [])
        connection = await Connection.open(BrokerUrl.parse(self.settings.url))
        try:
            if not await exists(connection, target):
                raise TargetNotFoundError(f"the {what} does not exist on {self.broker}: declare it, or name another")
        finally:
            await connection.close()


def _settings_of(infrastructure: Any) -> dict[str, Any]:
    """What is set about an infrastructure, by name: defaults are left out, so that a later bide can add some."""
    if not is_dataclass(infrastructure):
        return {name: getattr(infrastructure, name) for name in ("delivery_exchange", "resolution", "max_delay")}
    given = ((one, getattr(infrastructure, one.name)) for one in fields(infrastructure))
    return {one.name: value for one, value in given if value != one.default}
