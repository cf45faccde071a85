"""One operation on schedules, or one question, while it is being sent and answered."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Final

from bide.amqp.delivery import Delivery
from bide.errors import BideError, NoGateAnswerError, PublishError, PublishInDoubtError

START_A_GATE: Final = "check that a gate is running"


# Compared by identity.
@dataclass(slots=True, kw_only=True, eq=False)
class ScheduleRequest:
    """A request: an operation that is appended to the log, or a question to a gate.

    Attributes:
        what: the operation or question, for errors: ``"cancelling 'invoice:42'"``.
        id: the id by which answers and returns are recognised.
        partition: the number of its partition of the log.
        routing_key: the routing key on the exchange for operations.
        values: properties by their AMQP names, without ``reply_to``.
        is_recorded: whether it is an operation; a question leaves no trace.
        needs_answer: whether the request is done when a gate has answered, not when the broker has confirmed it.
        header_size: the size of its message's encoded properties in bytes.
        answer: the answer of a gate.
        attempts: the number of times it was sent.
        refusals: how many of these attempts the broker certainly did not accept.
        is_confirmed: whether the broker has confirmed it.
        is_declared_again: whether the log was declared again because the broker had no route for it.
        reason: why it is not done yet.
    """

    what: str
    id: str
    partition: int
    routing_key: str
    values: dict[str, Any]
    body: bytes
    is_recorded: bool
    needs_answer: bool
    header_size: int = 0
    answer: asyncio.Future[Delivery]
    confirms: set[asyncio.Future[None]] = field(default_factory=set)
    attempts: int = 0
    refusals: int = 0
    is_confirmed: bool = False
    is_declared_again: bool = False
    reason: str = "the broker was not reached"

    @property
    def is_done(self) -> bool:
        """Whether its result is known."""
        return self.answer.done() or (self.is_confirmed and not self.needs_answer)

    @property
    def is_lost(self) -> bool:
        """Whether its number was used, and may be missing in the log."""
        return not self.is_confirmed and not self.answer.done()

    def failed(self, error: BideError) -> BideError:
        """The error to raise when it cannot be sent again: *error* only if it certainly has no effect."""
        if self.is_recorded and self.is_confirmed:
            return self._no_answer(f"no gate has answered before this: {error}")
        if self.is_recorded and self.attempts > self.refusals:
            return self._in_doubt(str(error))
        return error

    def out_of_time(self, seconds: float, reason: str) -> BideError:
        """The error for a request without a result in time."""
        within = f"within {seconds:g} s"
        if self.is_confirmed and self.is_recorded:
            return self._no_answer(f"no gate has answered {within}")
        if self.is_confirmed:
            return NoGateAnswerError(
                f"{self.what}: no gate has answered {within}; {START_A_GATE}", correlation_id=self.id
            )
        if self.is_recorded and self.attempts > self.refusals:
            return self._in_doubt(f"no confirm {within}: {reason or self.reason}")
        return PublishError(f"{self.what}: it was not sent {within}: {reason or self.reason}", message_id=self.id)

    def _no_answer(self, reason: str) -> NoGateAnswerError:
        return NoGateAnswerError(
            f"{self.what} is recorded, and {reason}; it takes effect when a gate reads it, and whether it was in time "
            f"is decided then; {START_A_GATE}",
            correlation_id=self.id,
        )

    def _in_doubt(self, reason: str) -> PublishInDoubtError:
        return PublishInDoubtError(
            f"it is not known whether the broker has recorded {self.what}: {reason}; do it again, or look at the "
            "schedule",
            message_id=self.id,
        )
