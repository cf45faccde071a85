"""Delivery of the occurrences of one partition, and the results."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Final

from bide.client.target_sender import undeliverable_reason
from bide.durations import from_milliseconds
from bide.errors import AccessRefusedError, BideError, PublishRefusedError
from bide.gate.observer import GateEvent, GateEventKind
from bide.gate.partition import PartitionGate
from bide.gate.publisher import GatePublisher
from bide.gate.scheduled_delivery import DeliveryRules, ScheduledDelivery
from bide.runtime.logs import RepeatedWarnings, logger
from bide.topology import DEFAULT_EXCHANGE

log = logger(__name__)

FETCHED: Final = 200
"""The number of messages that are read from the index at once."""


class Deliverer:
    """Sends the messages of claimed occurrences, and records the results.

    Args:
        failed: called with the error when nothing can be delivered on this connection.
    """

    def __init__(
        self, gate: PartitionGate, publisher: GatePublisher, rules: DeliveryRules, failed: Callable[[BideError], None]
    ) -> None:
        self._gate = gate
        self._publisher = publisher
        self._rules = rules
        self._fail = failed
        self._connection = publisher.connection
        self._is_over = False
        self._warnings = RepeatedWarnings(log)

    def close(self) -> None:
        """Record no more results. The next session delivers the messages in flight again."""
        self._is_over = True

    async def deliver(self, now: float, clock: int) -> None:
        """Send what is due and can be sent now.

        Args:
            now: seconds by the monotonic clock.
            clock: the time by the gate's clock, in milliseconds since the Unix epoch.
        """
        self._gate.deliveries.queue_due(clock)
        while taken := self._gate.deliveries.take(now, FETCHED):
            try:
                found = await self._gate.index.deliveries(taken, self._rules)
            except BaseException:
                self._gate.deliveries.not_sent(taken)
                raise
            for one in set(taken).difference(one.entry.occurrence for one in found):
                self._gate.deliveries.gone(one)
            for delivery in found:
                if delivery.reason:
                    self._warn_undeliverable(delivery.reason)
                    self._publisher.windows.leave(delivery.entry.target)
                self._publisher.deliver(delivery, partial(self._on_delivered, self._connection.now()))

    def _on_delivered(self, sent_at: datetime, delivery: ScheduledDelivery, error: BideError | None) -> None:
        if self._is_over:
            # The result is ignored: the next session delivers the occurrence again.
            return
        occurrence, now, counts = delivery.entry.occurrence, self._connection.monotonic(), self._gate.counts
        match error:
            case None if delivery.reason:
                counts.undeliverable += 1
                self._notify("undeliverable", sent_at, delivery, delivery.reason)
                self._gate.deliveries.ended(occurrence, "undeliverable", now)
            case None:
                counts.delivered += 1
                self._notify("delivered", sent_at, delivery)
                self._gate.deliveries.ended(occurrence, "delivered", now)
            case PublishRefusedError():
                counts.refused += 1
                self._notify("refused", sent_at, delivery, str(error))
                self._refused(delivery, now, "refuses messages: they are sent again")
            case AccessRefusedError() if delivery.exchange == DEFAULT_EXCHANGE:
                # The permission for the default exchange affects all targets.
                self._fail(error)
            case _ if delivery.reason:
                self._refused(delivery, now, f"takes no messages, which are sent again: {error}")
            case _:
                exchange, key = delivery.exchange, delivery.routing_key
                reason = undeliverable_reason(error, delivery.entry.target, exchange=exchange, routing_key=key)
                self._set_aside(sent_at, delivery, reason)
        self._gate.wake.set()

    def _refused(self, delivery: ScheduledDelivery, now: float, what: str) -> None:
        self._gate.deliveries.refused(delivery.entry.occurrence, now)
        self._warnings.warn(f"{delivery.exchange or delivery.routing_key} {what}")

    def _set_aside(self, sent_at: datetime, delivery: ScheduledDelivery, reason: str) -> None:
        self._warn_undeliverable(reason)
        undeliverable = self._rules.undeliverable(delivery.entry, reason)
        self._publisher.deliver(undeliverable, partial(self._on_delivered, sent_at))

    def _notify(self, kind: GateEventKind, sent_at: datetime, delivery: ScheduledDelivery, text: str = "") -> None:
        if self._gate.observers:
            entry = delivery.entry
            self._gate.observers.notify(
                GateEvent(
                    kind=kind,
                    gate=self._gate.gate,
                    partition=self._gate.number,
                    key=entry.key,
                    occurrence=entry.occurrence,
                    schedule_id=entry.id,
                    target=entry.target,
                    routing_key=entry.routing_key or None,
                    message_id=delivery.values.get("message_id"),
                    headers=delivery.values.get("headers") or {},
                    due_at=from_milliseconds(entry.due),
                    sent_at=sent_at,
                    ended_at=self._connection.now(),
                    text=text or None,
                )
            )

    def _warn_undeliverable(self, reason: str) -> None:
        self._warnings.warn(f"moving a message to {self._gate.names.undeliverable!r}: {reason}")
