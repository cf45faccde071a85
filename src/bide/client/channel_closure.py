"""Rejected messages and messages in doubt after the broker closed a channel."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from bide.amqp import reply_codes
from bide.client.broker_state import BrokerState, too_large
from bide.client.publish_result import in_doubt_after
from bide.errors import BideError, MessageTooLargeError, TargetNotFoundError


class PublishAttempts(Protocol):
    """A message, and the attempts to send it.

    Attributes:
        attempts: the number of times it was sent.
        refusals: how many of these attempts the broker certainly did not accept.
        was_lost: whether the connection broke after an attempt.
    """

    # PreparedMessage, or None for a message that cannot be sent.
    message: Any
    attempts: int
    refusals: int
    was_lost: bool


class ChannelClosure:
    """The reason why the broker closed a channel, and the unconfirmed messages that the reason applies to.

    The broker closes a channel for one message that it rejects. It may have accepted the other unconfirmed messages. A
    reply text about the size limit applies to every message over the limit; a reply text that names an exchange applies
    to every message to that exchange. Any other reply text applies to a message only if no other one is unconfirmed.
    Otherwise the sender publishes fewer messages at once, until the rejected one is alone.

    Args:
        error: the error that the channel was closed with.
        text: the broker's reply text.
        unconfirmed: the number of unconfirmed messages on the channel, by exchange.

    Attributes:
        limit: the broker's size limit in bytes, if a message was over it.
        is_known: whether the reason applies to any message.
    """

    def __init__(self, error: BideError, text: str, unconfirmed: Counter[str]) -> None:
        size, exchange = reply_codes.size_limit(text), reply_codes.subject(text)
        self.limit = None if size is None else size[1]
        self._error = error
        self._exchange = exchange if exchange in unconfirmed else None
        # The only candidate is the rejected message, which the broker certainly does not have.
        self._is_certain = (unconfirmed.total() if self._exchange is None else unconfirmed[self._exchange]) == 1
        self.is_known = self.limit is not None or self._exchange is not None or self._is_certain

    def applies_to(self, exchange: str, body: bytes) -> bool:
        """Whether the broker rejects a message of the channel for this reason."""
        if self.limit is not None:
            return len(body) > self.limit
        return self._is_certain if self._exchange is None else exchange == self._exchange

    def record(self, state: BrokerState) -> None:
        """Let *state* remember the size limit, or forget the exchange that is missing or refused."""
        if self.limit is not None:
            state.size_limit = self.limit
        elif self._exchange is not None:
            state.forget(self._exchange)

    def verdict(self, sent: PublishAttempts, *, may_resend: bool) -> BideError | None:
        """Count the refusals of a message that the reason applies to, and return its error.

        Args:
            may_resend: whether to send a message again that the broker certainly refused because its exchange was
                missing.

        Returns:
            None if the message has to be sent again.
        """
        if self.limit is not None:
            return too_large(sent.message, self.limit)
        if isinstance(self._error, TargetNotFoundError):
            # The exchange existed before, and may have routed all of these messages except the rejected one.
            sent.refusals += self._is_certain
            if self._exchange is not None and sent.attempts == 1 and (may_resend or not self._is_certain):
                return None
        else:
            # RabbitMQ checks the permission at the first message of a channel to an exchange. So it refused the earlier
            # attempts too, unless their connection broke.
            sent.refusals = 0 if sent.was_lost else sent.attempts
        return final_error(sent, self._error)


def final_error(sent: PublishAttempts, error: BideError) -> BideError:
    """*error*, or a PublishInDoubtError for it if the broker may have accepted the message at an earlier attempt."""
    if sent.attempts > sent.refusals and not isinstance(error, MessageTooLargeError):
        return in_doubt_after(sent.message.message_id, error)
    return error
