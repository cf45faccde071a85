"""The rejected and in-doubt messages of a closed channel, by its reply text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import cast

import pytest

from bide.amqp import reply_codes
from bide.client.broker_state import BrokerState
from bide.client.channel_closure import ChannelClosure, final_error
from bide.errors import (
    AccessRefusedError,
    BrokerError,
    ClosedError,
    MessageTooLargeError,
    PublishInDoubtError,
    TargetNotFoundError,
)
from bide.messages.outgoing import OutgoingMessage
from bide.messages.prepared import PreparedMessage, check_message

MISSING = 404, "NOT_FOUND - no exchange 'x' in vhost '/'"
REFUSED = 403, "ACCESS_REFUSED - write access to exchange 'x' in vhost '/' refused for user 'limited'"
TOPIC = 403, "ACCESS_REFUSED - write access to topic 'b' in exchange 'x' in vhost '/' refused for user 'limited'"
DEFAULT = 403, "ACCESS_REFUSED - write access to exchange 'amq.default' in vhost '/' refused for user 'limited'"
TOO_LARGE = 406, "PRECONDITION_FAILED - message size 11 is larger than configured max size 10"
USER = 406, "PRECONDITION_FAILED - user_id property set to 'a' but authenticated user was 'b'"
LONG_NAME = 404, f"NOT_FOUND - no exchange '{'x' * 200}..."


@dataclass
class Sent:
    """A sent message with the fields that the rule uses."""

    attempts: int = 1
    refusals: int = 0
    was_lost: bool = False
    message: PreparedMessage = field(
        default_factory=lambda: check_message(OutgoingMessage(bytes(11), exchange="x", message_id="sent"))
    )


class State:
    """Records what a closure has the state of the broker forget and remember."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []
        self.size_limit: int | None = None

    def forget(self, exchange: str) -> None:
        self.forgotten.append(exchange)


def closed(reply: tuple[int, str], *exchanges: str) -> ChannelClosure:
    code, text = reply
    return ChannelClosure(reply_codes.channel_error(code, text), text, Counter(exchanges))


def rejected(reply: tuple[int, str], *messages: tuple[str, int]) -> list[int]:
    """The places of the rejected messages, given exchange and size of all unconfirmed ones."""
    closure = closed(reply, *(exchange for exchange, _ in messages))
    places = [place for place, (exchange, size) in enumerate(messages) if closure.applies_to(exchange, bytes(size))]
    assert closure.is_known == bool(places)
    return places


def recorded(closure: ChannelClosure) -> State:
    state = State()
    closure.record(cast("BrokerState", state))
    return state


@pytest.mark.parametrize("reply", [MISSING, REFUSED])
def test_a_named_exchange_rejects_all_messages_to_it_and_no_others(reply: tuple[int, str]) -> None:
    assert rejected(reply, ("x", 0), ("", 0), ("x", 0), ("y", 0)) == [0, 2]
    assert recorded(closed(reply, "x", "y")).forgotten == ["x"]


def test_the_default_exchange_is_named_by_its_alias() -> None:
    assert rejected(DEFAULT, ("x", 0), ("", 0)) == [1]


def test_the_size_limit_rejects_all_bodies_over_it_and_no_others() -> None:
    assert rejected(TOO_LARGE, ("x", 10), ("x", 11), ("y", 0), ("y", 12)) == [1, 3]
    state = recorded(closed(TOO_LARGE, "x"))
    assert (state.size_limit, state.forgotten) == (10, [])


@pytest.mark.parametrize("reply", [TOPIC, USER, LONG_NAME])
def test_a_reply_that_names_neither_rejects_a_message_only_if_it_is_alone(reply: tuple[int, str]) -> None:
    assert rejected(reply, ("x", 0), ("x", 0)) == []
    assert rejected(reply, ("x", 0)) == [0]
    assert recorded(closed(reply, "x")).forgotten == []


def test_an_exchange_that_no_unconfirmed_message_goes_to_is_not_the_reason() -> None:
    """Otherwise all messages would be sent together again, and lost again, until their time is up."""
    assert rejected(REFUSED, ("a", 0), ("b", 0)) == []
    assert rejected(REFUSED, ("a", 0)) == [0]


@pytest.mark.parametrize("may_resend", [True, False])
def test_a_deleted_exchange_may_have_taken_some_of_several_messages(may_resend: bool) -> None:
    closure, sent = closed(MISSING, "x", "x"), Sent()
    assert closure.verdict(sent, may_resend=may_resend) is None
    assert sent.refusals == 0
    sent.attempts = 2
    assert isinstance(closed(MISSING, "x").verdict(sent, may_resend=may_resend), PublishInDoubtError)


@pytest.mark.parametrize("others", [(), ("y", "z")])
def test_a_message_alone_on_its_way_to_a_deleted_exchange_is_not_in_doubt(others: tuple[str, ...]) -> None:
    closure = closed(MISSING, "x", *others)
    assert isinstance(closure.verdict(Sent(), may_resend=False), TargetNotFoundError)
    again = Sent()
    assert closure.verdict(again, may_resend=True) is None
    assert isinstance(final_error(again, TargetNotFoundError("gone")), TargetNotFoundError)
    again.attempts = 2
    assert isinstance(closure.verdict(again, may_resend=True), TargetNotFoundError)


def test_a_deleted_exchange_whose_name_is_cut_off_may_have_taken_messages_too() -> None:
    """Together with others the message was lost, and then sent alone."""
    assert isinstance(closed(LONG_NAME, "x").verdict(Sent(attempts=2), may_resend=True), PublishInDoubtError)
    assert isinstance(closed(LONG_NAME, "x").verdict(Sent(), may_resend=True), TargetNotFoundError)


@pytest.mark.parametrize(("reply", "error"), [(REFUSED, AccessRefusedError), (USER, BrokerError)])
def test_a_refused_message_is_in_doubt_only_if_a_connection_broke_before(
    reply: tuple[int, str], error: type[BrokerError]
) -> None:
    closure = closed(reply, "x")
    assert type(closure.verdict(Sent(attempts=2), may_resend=True)) is error
    found = closure.verdict(Sent(attempts=2, was_lost=True), may_resend=True)
    assert isinstance(found, PublishInDoubtError)
    assert type(found.__cause__) is error


def test_a_message_over_the_size_limit_is_never_in_doubt() -> None:
    """An earlier attempt was over the limit too."""
    sent = Sent(attempts=2, was_lost=True)
    error = closed(TOO_LARGE, "x").verdict(sent, may_resend=True)
    assert isinstance(error, MessageTooLargeError)
    assert final_error(sent, error) is error


def test_a_message_is_in_doubt_unless_every_attempt_was_refused() -> None:
    error = ClosedError("closed")
    assert final_error(Sent(attempts=0), error) is error
    assert final_error(Sent(attempts=2, refusals=2), error) is error
    assert isinstance(final_error(Sent(attempts=2, refusals=1), error), PublishInDoubtError)
