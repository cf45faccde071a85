"""Targets of the rows of a schedule that has a column of queues: counts and checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bide.admin.apply import exists
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.delay.allowed_targets import AllowedTargets
from bide.delay.protocol import QueueTarget
from bide.errors import InvalidInputError, InvalidRowError
from bide.pipelines.run_sync import run_sync
from bide.pipelines.schedule.plan import SchedulePlan
from bide.runtime.wording import quantity
from bide.topology import Queue, Topology

MAX_TARGETS: Final = 10_000
"""The largest number of different queues in the column: the broker is asked whether each of them exists."""

_SHOWN: Final = 5
"""Queues that an error shows."""


@dataclass(frozen=True, slots=True)
class TargetCount:
    """The rows of one target.

    Attributes:
        queue: the name of the queue; None for rows without one.
        rows: the number of rows.
        message_id: the message id of one of these rows.
    """

    queue: str | None
    rows: int
    message_id: str


def check_targets(
    targets: Sequence[TargetCount], plan: SchedulePlan, *, is_offline: bool = False
) -> dict[str, str | None]:
    """Check the queues of the rows, and return them, each with the reason why no message can be sent to it, or None.

    Args:
        is_offline: do not ask the broker whether the queues exist.

    Raises:
        InvalidRowError: rows have no queue, or a queue to which no message can be sent, and the plan has no folder for
            rejects.
        BrokerError: the broker cannot be reached, or refuses.
    """
    if plan.to_column is None:
        return {}
    queues = [one.queue for one in targets if one.queue is not None]
    reasons: dict[str | None, str] = {None: f"the column {plan.to_column!r} is null"}
    reasons.update(_refused(queues, plan, is_offline=is_offline))
    refused = [one for one in targets if one.queue in reasons]
    if refused and plan.settings.rejects is None:
        shown = [
            f"{quantity(one.rows, 'row')}, such as that with the message id {one.message_id!r}: {reasons[one.queue]}"
            for one in refused[:_SHOWN]
        ]
        if len(refused) > _SHOWN:
            shown.append(f"and {quantity(len(refused) - _SHOWN, 'other queue')}")
        raise InvalidRowError(
            f"{sum(one.rows for one in refused):,} of {sum(one.rows for one in targets):,} rows cannot be sent to "
            f"their queues, and nothing was sent: {'; '.join(shown)}. Correct these rows, or name a folder for them "
            "with rejects=..."
        )
    return {queue: reasons.get(queue) for queue in queues}


def _refused(queues: Iterable[str], plan: SchedulePlan, *, is_offline: bool) -> dict[str, str]:
    """The queues to which no message can be sent, with the reasons."""
    allowed = AllowedTargets.of(plan.allow or ("*",))
    refused: dict[str, str] = {}
    remaining = []
    for queue in queues:
        try:
            plan.check_sample(queue)
            allowed.check_delivery(QueueTarget(queue))
            remaining.append(queue)
        except InvalidInputError as error:
            refused[queue] = str(error)
    if remaining and not is_offline:
        missing = run_sync(_missing(remaining, plan))
        refused |= {queue: f"the queue {queue!r} does not exist on {plan.broker}" for queue in missing}
    return refused


async def _missing(queues: Iterable[str], plan: SchedulePlan) -> list[str]:
    connection = await Connection.open(BrokerUrl.parse(plan.settings.url))
    try:
        return [one for one in queues if not await exists(connection, Topology(queues=[Queue(one)]))]
    finally:
        await connection.close()
