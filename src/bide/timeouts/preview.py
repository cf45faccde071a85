"""Preview of a migration of timeouts: counts, destinations and problems of each endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from bide.admin.apply import exists
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.encoding import Encoder
from bide.delay.allowed_targets import AllowedTargets
from bide.delay.protocol import DelayInfrastructure, QueueTarget
from bide.errors import BideError, InvalidInputError
from bide.messages.checker import MessageChecker
from bide.schedules.prepared import check_schedule
from bide.schedules.requests import RequestId
from bide.timeouts.database import Database
from bide.timeouts.messages import timeout_message, timeout_schedule
from bide.timeouts.tables import (
    EARLIEST,
    LATEST,
    Condition,
    TimeoutTable,
    check_table,
    choose_tables,
    count_unreadable,
    database_time,
    find_tables,
    has_bytes_or_text,
    stored_timeout,
    usable_id_condition,
)
from bide.timeouts.worker_thread import WorkerThread
from bide.topology import Exchange, Queue, Topology

_ANY_REQUEST: Final = RequestId("preview", 1)

UNREADABLE_TIME: Final = "the due time is missing, not a date, or outside the years 1 to 9999"
UNUSABLE_ID: Final = "the id is missing or not unique"


@dataclass(slots=True, kw_only=True)
class EndpointPreview:
    """The timeouts of one endpoint.

    Attributes:
        endpoint: its name, as in the name of its table.
        table: the name of its table.
        count: the number of its timeouts from the cutoff on.
        past: the number of these that are due already, without those whose ids cannot be used.
        earliest_due, latest_due: the bounds of the due times; None without timeouts.
        destinations: the number of timeouts by destination.
        problems: the number of timeouts that cannot be moved, by reason.
    """

    endpoint: str
    table: str
    count: int = 0
    past: int = 0
    earliest_due: datetime | None = None
    latest_due: datetime | None = None
    destinations: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)

    def to_dict(self) -> dict[str, Any]:
        """The preview as JSON."""
        return {
            "endpoint": self.endpoint,
            "table": self.table,
            "timeouts": self.count,
            "past": self.past,
            "earliest_due": self.earliest_due,
            "latest_due": self.latest_due,
            "destinations": dict(self.destinations),
            "problems": dict(self.problems),
        }


async def preview_timeouts(
    database_url: str,
    url: str | BrokerUrl,
    infrastructure: DelayInfrastructure,
    *,
    endpoints: Iterable[str] = (),
    table: TimeoutTable | None = None,
    cutoff: datetime | None = None,
    allow: Iterable[str] = ("*",),
    keyed: bool = False,
) -> list[EndpointPreview]:
    """Read the timeouts, and check each of them as the migration would. Nothing is changed.

    Args:
        database_url: see :class:`bide.timeouts.TimeoutMigration`.
        url: the URL of the broker.
        infrastructure: the delay infrastructure that the timeouts would move to.
        endpoints: the names of endpoints; all endpoints by default.
        table: a table of any other form, instead of the tables of endpoints.
        cutoff: leave out timeouts that are due before this time.
        allow: patterns of the targets that timeouts may have.
        keyed: check the timeouts as schedules.

    Raises:
        InvalidInputError: a URL cannot be read, or the driver is not installed.
        TimeoutStoreError: the database cannot be reached, refuses, or has no table of an endpoint.
        BrokerError: the broker cannot be reached.
    """
    allowed = AllowedTargets.of(allow)
    connection = await Connection.open(url if isinstance(url, BrokerUrl) else BrokerUrl.parse(url))
    try:
        checked = infrastructure.for_release(connection.release)
        async with WorkerThread() as thread:
            found = await thread.run(
                _read, database_url, checked, allowed, list(endpoints), table, cutoff or EARLIEST, keyed=keyed
            )
        missing: dict[str, str] = {}
        for destination in {name for one in found for name in one.destinations}:
            if (problem := await _destination_problem(connection, checked, destination)) is not None:
                missing[destination] = problem
    finally:
        await connection.close()
    for one in found:
        for destination, count in one.destinations.items():
            if destination in missing:
                one.problems[missing[destination]] += count
    return found


async def _destination_problem(
    connection: Connection, infrastructure: DelayInfrastructure, destination: str
) -> str | None:
    try:
        bound = infrastructure.route(timedelta(0), QueueTarget(destination)).requires.bindings
        needed = [
            Topology(queues=[Queue(destination)]),
            Topology([Exchange(one.destination) for one in bound if one.destination_type == "exchange"]),
        ]
        for topology, what in zip(needed, ("queue", "exchange"), strict=True):
            if not await exists(connection, topology):
                return f"the {what} {destination!r} does not exist on the virtual host {connection.url.vhost!r}"
    except InvalidInputError as error:
        return str(error)
    return None


def _read(
    database_url: str,
    infrastructure: DelayInfrastructure,
    allowed: AllowedTargets,
    endpoints: list[str],
    table: TimeoutTable | None,
    cutoff: datetime,
    *,
    keyed: bool,
) -> list[EndpointPreview]:
    with Database(database_url) as database:
        if table is not None:
            check_table(database, table)
        tables = choose_tables(find_tables(database), endpoints) if table is None else [table]
        usable = Condition() if table is None else usable_id_condition(database, table)
        return [_read_table(database, one, infrastructure, allowed, cutoff, usable, keyed=keyed) for one in tables]


def _read_table(
    database: Database,
    table: TimeoutTable,
    infrastructure: DelayInfrastructure,
    allowed: AllowedTargets,
    cutoff: datetime,
    usable: Condition,
    *,
    keyed: bool,
) -> EndpointPreview:
    one = EndpointPreview(endpoint=table.endpoint, table=table.name)
    quote = database.dialect.quote
    time, source = quote(table.time), database.table(table.name)
    is_time = database.dialect.is_time.format(time)
    bounds = (database_time(cutoff), database_time(LATEST))
    if unreadable := count_unreadable(database, table):
        one.problems[UNREADABLE_TIME] += unreadable
    headers_column = "NULL" if table.headers is None else quote(table.headers)
    # Bodies can be large, and bytes or text can always be sent.
    body_column = "NULL" if has_bytes_or_text(database, table) else quote(table.state)
    columns = f"{quote(table.id)}, {quote(table.destination)}, {headers_column}, {body_column}"
    checker, encoder = MessageChecker(), Encoder(infrastructure, frame_max=131_072)
    for *row, is_usable in database.stream(
        f"SELECT {columns}, {time}, {usable.sql} FROM {source} WHERE {time} >= %s AND {time} <= %s AND {is_time}",
        (*usable.values, *bounds),
    ):
        timeout = stored_timeout(tuple(row))
        now = datetime.now(UTC)
        one.count += 1
        one.earliest_due = min(one.earliest_due or timeout.due, timeout.due)
        one.latest_due = max(one.latest_due or timeout.due, timeout.due)
        if not is_usable:
            one.problems[UNUSABLE_ID] += 1
            continue
        one.past += timeout.due <= now
        try:
            if keyed:
                schedule = timeout_schedule(timeout, endpoint=table.endpoint, request=_ANY_REQUEST, allowed=allowed)
                check_schedule(schedule, now)
                one.destinations[timeout.destination] += 1
                continue
            message = checker.check(
                timeout_message(timeout, now=now, max_delay=infrastructure.max_delay, allowed=allowed)
            )
            one.destinations[timeout.destination] += 1
            if timeout.due > now:
                encoder.encode(message, now, channel=1, mandatory=True)
        except BideError as error:
            one.problems[str(error)] += 1
    return one
