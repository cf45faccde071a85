"""Recorder of the messages that workloads send and receive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from bide.check.history import UNDELIVERABLE, DeliveredRow, HistoryWriter, SentRow, digest_of, digest_of_headers
from bide.check.reference_clock import ReferenceClock

if TYPE_CHECKING:
    from bide.client.message import Message

OWN_HEADER: Final = "check"
"""The prefix of the headers that are compared. Other headers, such as those of retries, may change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A message that is about to be sent.

    Attributes:
        at: when the call began, in microseconds on the clock of the run.
        offset: the system clock minus the clock of the run at that time, in microseconds.
    """

    id: str
    workload: str
    body: bytes
    headers: dict[str, Any]
    routing_key: str
    at: int
    offset: int


class Recorder:
    """The history of a run while it is written."""

    def __init__(self, run: str, writer: HistoryWriter) -> None:
        self.run = run
        self.clock = ReferenceClock()
        self.sent = self.delivered = 0
        self.clock_change = 0
        self._writer = writer
        self._missing: set[tuple[str, str]] = set()
        self._under_way: dict[str, set[str]] = {}
        self._changed = asyncio.Event()

    @property
    def missing(self) -> int:
        """The number of messages that have to arrive and have not arrived yet."""
        return len(self._missing)

    def draft(
        self, message_id: str, workload: str, body: bytes, headers: dict[str, Any], *, routing_key: str = ""
    ) -> Draft:
        """Note that a message is about to be sent."""
        self._under_way[message_id] = set()
        return Draft(
            id=message_id,
            workload=workload,
            body=body,
            headers=headers,
            routing_key=routing_key,
            at=self.clock.now(),
            offset=self.clock.offset(),
        )

    def add_sent(
        self,
        draft: Draft,
        places: Iterable[str],
        *,
        outcome: str,
        expected: str,
        due: datetime | int | None = None,
        attempts: int = 1,
        role: str = "message",
        is_call: bool = False,
    ) -> None:
        """Record the result of sending a message. For *expected* and *role* see :class:`SentRow`.

        Args:
            places: the queues in which the message has to arrive.
            due: the due time, as a datetime of the system clock, or as microseconds on the clock of the run; None for
                a message without a delay.
            is_call: whether the publish of this message has just ended.
        """
        ended_at = self.clock.now() if is_call else None
        change = 0
        if isinstance(due, datetime):
            change = abs(self.clock.offset() - draft.offset)
            self.clock_change = max(self.clock_change, change)
            due = self.clock.of(due, draft.offset)
        arrived = self._under_way.pop(draft.id, set())
        body, headers = digest_of(draft.body), digest_of_headers(draft.headers.items())
        for place in places:
            self.sent += 1
            if expected == "delivered" and not arrived & {place, UNDELIVERABLE}:
                self._missing.add((draft.id, place))
            self._writer.add(
                SentRow(
                    run=self.run,
                    id=draft.id,
                    place=place,
                    workload=draft.workload,
                    role=role,
                    outcome=outcome,
                    expected=expected,
                    sent_at=draft.at,
                    due=draft.at if due is None else due,
                    due_error=change,
                    attempts=attempts,
                    routing_key=draft.routing_key,
                    body=body,
                    headers=headers,
                    ended_at=ended_at,
                )
            )
        self._changed.set()

    def add_delivered(self, message: Message, place: str, *, message_id: str | None = None) -> None:
        """Record a delivery.

        Args:
            message_id: an id to record in place of the message's own.
        """
        name = message_id or message.message_id or ""
        own = [(key, value) for key, value in message.headers.items() if key.startswith(OWN_HEADER)]
        self.delivered += 1
        self._writer.add(
            DeliveredRow(
                run=self.run,
                id=name,
                place=place,
                received_at=self.clock.of(message.received_at, self.clock.offset()),
                redelivered=message.redelivered,
                routing_key=message.routing_key,
                body=digest_of(message.body),
                headers=digest_of_headers(own),
            )
        )
        if (arrived := self._under_way.get(name)) is not None:
            arrived.add(place)
        elif place == UNDELIVERABLE:
            self._missing = {one for one in self._missing if one[0] != name}
        else:
            self._missing.discard((name, place))
        self._changed.set()

    async def until_complete(self) -> None:
        """Wait until everything that has to arrive has arrived."""
        while self._missing:
            self._changed.clear()
            await self._changed.wait()
