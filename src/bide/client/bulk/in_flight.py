"""Messages in flight of a bulk publish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bide.amqp.confirms import Unconfirmed
from bide.client.broker_state import BrokerState, Preparation
from bide.client.encoding import Encoded
from bide.client.publish_result import PublishResult
from bide.errors import BideError, InvalidInputError
from bide.messages.prepared import PreparedMessage


class InFlightMessage(Unconfirmed):
    """A message in flight.

    Attributes:
        outgoing: the message as given.
        message: the checked message; None if it cannot be sent.
        attempts: the number of times it was sent.
        refusals: how many of these attempts the broker certainly did not accept.
        was_lost: whether the connection broke after it was sent.
        error: why it is not on the broker, once that is known.
        prepared_in: the broker state that has everything that the message needs.
        preparation: the preparation for its next sending; see :meth:`bide.client.broker_state.BrokerState.prepare`.
        confirmed_elsewhere: whether another host confirmed it.
        hops: the number of queues that it waits in.
        unroutable: whether the broker returned it; see
            :meth:`bide.client.broker_state.BrokerState.is_worth_repeating`.
        on_settled: called with the message and its error (None for a confirm) when the result is known.
    """

    __slots__ = (
        *("attempts", "confirmed_elsewhere", "error", "hops", "message", "on_settled", "outgoing", "position"),
        *("preparation", "prepared_in", "refusals", "unroutable", "was_lost"),
    )

    def __init__(
        self,
        outgoing: Any,
        position: int,
        message: PreparedMessage | None,
        on_settled: Callable[[InFlightMessage, BideError | None], None],
    ) -> None:
        self.on_settled = on_settled
        self.outgoing = outgoing
        self.position = position
        self.message = message
        self.attempts = 0
        self.refusals = 0
        self.was_lost = False
        self.error: BideError | None = None
        self.prepared_in: BrokerState | None = None
        self.preparation: Preparation | None = None
        self.confirmed_elsewhere = False
        self.hops = 0
        self.unroutable = False

    def begin(self, message: PreparedMessage, encoded: Encoded) -> bytes:
        """Record that the message is being sent, and return its frames."""
        self.message = message
        self.preparation = None
        self.hops = encoded.hops
        self.attempts += 1
        Unconfirmed.__init__(self, encoded.exchange, encoded.routing_key, message.message_id, message.body)
        return encoded.frames

    @property
    def partition(self) -> int | None:
        """The partition of the schedule log that it is a record of; None for other messages."""
        return None

    @property
    def mandatory(self) -> bool:
        """Whether the broker returns the message if no queue takes it."""
        mandatory: bool = self.outgoing.mandatory
        return mandatory

    def is_ready(self, state: BrokerState) -> bool:
        """Whether it needs no preparation before it is sent."""
        assert self.message is not None
        return self.prepared_in is state or state.is_prepared(self.message)

    async def prepare(self, state: BrokerState) -> None:
        """Declare or check everything that it needs; see :meth:`bide.client.broker_state.BrokerState.prepare`."""
        assert self.message is not None
        self.preparation = await state.prepare(self.message, self.preparation)
        self.prepared_in = state

    def forget_preparation(self) -> None:
        """Prepare it again before its next sending: something that it needs is missing."""
        self.prepared_in = None

    def encode(self, state: BrokerState, channel: int) -> tuple[PreparedMessage, Encoded] | None:
        """Encode it; see :meth:`bide.client.broker_state.BrokerState.encode`."""
        assert self.message is not None
        return state.encode(self.message, channel=channel, mandatory=self.mandatory, prepared=self.preparation)

    def is_worth_repeating(self, state: BrokerState, error: BideError) -> bool:
        """Whether to send it again after what it needs was declared again."""
        return state.is_worth_repeating(self, error)

    def give_up(self) -> None:
        """Record that it will not be sent again."""

    def settle(self, error: BideError | None) -> None:
        """Report the result."""
        self.on_settled(self, None if self.confirmed_elsewhere else error)

    def result(self) -> PublishResult:
        """The result for the caller."""
        message = self.message
        if message is None:
            return PublishResult(self.outgoing, self.position, None, None, 0, self.error)
        due = message.due if self.attempts else None
        return PublishResult(self.outgoing, self.position, message.message_id, due, self.attempts, self.error)


def unsendable(position: int, error: Exception) -> InvalidInputError:
    """The error for a message that cannot be checked or encoded."""
    if isinstance(error, InvalidInputError):
        return error
    found = InvalidInputError(f"the message {position} cannot be sent: {type(error).__name__}: {error}")
    found.__cause__ = error
    return found
