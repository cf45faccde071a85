"""A scheduled message as the gate delivers it, or moves it to the undeliverable queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bide.delay.allowed_targets import AllowedTargets
from bide.delay.forwarding import MAX_REASON, carry_user_id, parse_target
from bide.delay.protocol import (
    HEADER_DUE,
    HEADER_KEY,
    HEADER_ROUTING_KEY,
    HEADER_SCHEDULE,
    HEADER_SET_ASIDE,
    HEADER_TO,
    QueueTarget,
    Target,
)
from bide.errors import InvalidInputError, ScheduleRecordError, TargetNotAllowedError
from bide.schedules.entries import UnderWay
from bide.schedules.names import ScheduleNames
from bide.topology import DEFAULT_EXCHANGE

_COPIES: Final = ("CC", "BCC")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledDelivery:
    """An occurrence of a schedule as a message.

    Attributes:
        entry: the occurrence.
        values: the properties by their AMQP names.
        reason: why the message goes to the undeliverable queue; empty if it goes to its target.
    """

    entry: UnderWay
    exchange: str
    routing_key: str
    values: Mapping[str, Any] = field(repr=False)
    reason: str = ""


class DeliveryRules:
    """The rules by which the messages of a schedule log are delivered.

    Args:
        allowed: the targets that the gate may deliver to. Delay queues and the log itself are never targets: a message
            for the log could be a forged record.
        user: the user of the gate's connection.
    """

    def __init__(self, names: ScheduleNames, allowed: AllowedTargets, user: str | None) -> None:
        self._names = names
        self._allowed = allowed
        self._user = user

    def delivery(self, entry: UnderWay) -> ScheduledDelivery:
        """The message for the target, or for the undeliverable queue if the target is invalid or not allowed."""
        try:
            target = self._target(entry.target, entry.routing_key)
            values = self._values(entry)
            if isinstance(target, QueueTarget):
                self._check_copies(values["headers"])
        except (InvalidInputError, ScheduleRecordError) as error:
            return self.undeliverable(entry, str(error))
        queue = target.queue if isinstance(target, QueueTarget) else None
        return ScheduledDelivery(
            entry=entry,
            exchange=entry.target[2:] if queue is None else DEFAULT_EXCHANGE,
            routing_key=entry.routing_key if queue is None else queue,
            values=values,
        )

    def undeliverable(self, entry: UnderWay, reason: str) -> ScheduledDelivery:
        """The message for the undeliverable queue."""
        try:
            values = self._values(entry)
        except ScheduleRecordError as error:
            # The message cannot have properties that nothing can decode. Its body and the key of its schedule are left.
            values, reason = {"headers": self._headers(entry)}, f"{reason}; {error}"
        headers = {name: value for name, value in values["headers"].items() if name not in _COPIES}
        headers[HEADER_SET_ASIDE] = reason[:MAX_REASON]
        if entry.routing_key:
            headers[HEADER_ROUTING_KEY] = entry.routing_key
        return ScheduledDelivery(
            entry=entry,
            exchange=DEFAULT_EXCHANGE,
            routing_key=self._names.undeliverable,
            values={**values, "headers": headers, "expiration": None, "delivery_mode": 2},
            reason=reason,
        )

    def _target(self, text: str, routing_key: str) -> Target:
        target = parse_target(text, routing_key)
        self._allowed.check_delivery(target)
        return target

    def _check_copies(self, headers: Mapping[str, Any]) -> None:
        """Check further queues: on the default exchange each key of a CC or BCC list is the name of a queue."""
        for name in _COPIES:
            keys = headers.get(name)
            for key in keys if isinstance(keys, list) else ():
                if isinstance(key, str):
                    self._target(f"q:{key}", "")
                else:
                    raise TargetNotAllowedError(f"the header {name} is {keys!r}: it must be a list of queues")

    def _values(self, entry: UnderWay) -> dict[str, Any]:
        properties = dict(entry.message.values)
        headers = {**(properties.pop("headers", None) or {}), **self._headers(entry)}
        carry_user_id(properties, headers, self._user)
        if entry.is_recurring:
            # Otherwise a consumer that drops duplicates would drop all runs but the first.
            properties["message_id"] = entry.occurrence
        return {**properties, "headers": headers}

    @staticmethod
    def _headers(entry: UnderWay) -> dict[str, Any]:
        return {
            HEADER_KEY: entry.key,
            HEADER_SCHEDULE: entry.id,
            HEADER_DUE: entry.due,
            HEADER_TO: entry.target,
        }
