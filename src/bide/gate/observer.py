"""Events of a gate, and their observers: the base class of its metrics and tracing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from bide.runtime.logs import logger

log = logger(__name__)

GateEventKind = Literal["delivered", "undeliverable", "refused", "cancelled", "superseded", "skipped"]
"""``delivered``: the target has the message. ``undeliverable``: the message was moved to the undeliverable queue.
``refused``: the target refused the message, which is sent again. ``cancelled``, ``superseded``, ``skipped``: the
occurrence ended in the log without a delivery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateEvent:
    """An event of an occurrence of a schedule, at the gate that leads its partition.

    The attributes from ``schedule_id`` on are None or empty for events without a delivery.

    Attributes:
        kind: the kind of event.
        gate: the name of the gate.
        partition: the number of the partition.
        key: the key of the schedule.
        occurrence: the id of the occurrence.
        schedule_id: the id of the schedule.
        target: ``q:`` and a queue, or ``x:`` and an exchange.
        routing_key: the routing key for an exchange.
        message_id: the id of the message.
        headers: the headers of the message.
        due_at: when the occurrence was due.
        sent_at: when the gate sent the message, by its own clock.
        ended_at: when the broker had confirmed or refused it.
        text: why it was moved to the undeliverable queue, or the refusal.
    """

    kind: GateEventKind
    gate: str
    partition: int
    key: str
    occurrence: str
    schedule_id: str | None = None
    target: str | None = None
    routing_key: str | None = None
    message_id: str | None = None
    headers: Mapping[str, Any] = field(default_factory=dict, repr=False)
    due_at: datetime | None = None
    sent_at: datetime | None = None
    ended_at: datetime | None = None
    text: str | None = None

    @property
    def lateness(self) -> timedelta | None:
        """From the due time until the message was sent; None without a delivery."""
        return None if self.sent_at is None or self.due_at is None else self.sent_at - self.due_at


class GateObserver:
    """Receives the events of a gate. Override the method that you need.

    Exceptions of an observer are logged and have no effect on the gate. A gate that takes over may report an event
    again, with the same occurrence.
    """

    def at_gate(self, event: GateEvent) -> None:
        """Called in the event loop of the gate: return at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    """The state of a partition, as a gate knows it.

    Attributes:
        partition: its number.
        is_leading: whether this gate leads it.
        waiting: schedules that wait.
        under_way: claimed occurrences that this gate is sending, or will send: when they are due, or again.
        lag: seconds since this gate sent the latest of its beats that it has read back. A gate that keeps up with the
            log has a lag below two seconds. None before the first beat was read.
    """

    partition: int
    is_leading: bool
    waiting: int
    under_way: int
    lag: float | None


class GateObservers:
    """The observers of one gate."""

    def __init__(self, observers: Iterable[GateObserver]) -> None:
        self._observers = tuple(observers)

    def __bool__(self) -> bool:
        return bool(self._observers)

    def notify(self, event: GateEvent) -> None:
        """Pass an event to all observers."""
        for one in self._observers:
            try:
                one.at_gate(event)
            except Exception as error:
                log.error("the observer %r failed for %s: %s", one, event.occurrence, error, exc_info=error)
