"""Declaration of the schedule log on a broker."""

from __future__ import annotations

from bide.admin.apply import apply, check_streams, exists
from bide.admin.settling import settle
from bide.amqp.connection import Connection
from bide.errors import AccessRefusedError, NotAppliedError
from bide.runtime.logs import logger
from bide.schedules.names import ScheduleNames
from bide.topology import Exchange, Queue, Topology

log = logger(__name__)


async def ensure_schedule_log(connection: Connection, names: ScheduleNames, *, declare: bool = True) -> None:
    """Declare the exchanges, streams and queues of the schedule log if they are missing.

    Args:
        declare: whether to declare missing items; if not, they are an error.

    Raises:
        NotAppliedError: the log is missing, and may not be declared.
        DeclarationMismatchError: an exchange or queue exists with other properties.
        BrokerError: the broker refuses, or the connection was lost.
    """
    mark = schedule_log_mark(names)
    try:
        if await exists(connection, Topology([Exchange(names.operations, "direct")], mark.queues)):
            return
    except AccessRefusedError as error:
        # Since 4.3 a user needs a permission on a queue to see whether it exists, and an application has none. If
        # something is missing, publishing the first operation fails.
        log.debug("it is not known whether the schedule log %s is complete: %s", names.operations, error)
        return
    if not declare:
        raise _not_applied(connection, names)
    await declare_schedule_log(connection, names)


async def declare_schedule_log(connection: Connection, names: ScheduleNames) -> None:
    """Declare all parts of the schedule log, even if some of them exist.

    Raises:
        NotAppliedError: this user may not declare the log.
        DeclarationMismatchError: an exchange or queue exists with other properties.
        BrokerError: the broker refuses, or the connection was lost.
    """
    try:
        await check_streams(connection, prefix=names.operations)
        applied = await apply(connection, names.topology(), last=schedule_log_mark(names), can_move=False)
        await settle(connection, prefix=names.operations, can_move=False)
    except AccessRefusedError as error:
        raise _not_applied(connection, names, f" and this user may not declare it ({error})") from error
    log.info("declared the schedule log %s: %s", names.operations, applied)


def schedule_log_mark(names: ScheduleNames) -> Topology:
    """The queue that is declared last: it shows that everything else was declared."""
    return Topology(queues=[Queue(names.undeliverable, arguments={"x-queue-type": "quorum"})])


def _not_applied(connection: Connection, names: ScheduleNames, reason: str = "") -> NotAppliedError:
    return NotAppliedError(
        f"the schedule log {names.operations!r} is not on the virtual host {connection.url.vhost!r} of "
        f"{connection.address}{reason}: start a gate, which declares it, or connect with declare=True as a user who may"
    )
