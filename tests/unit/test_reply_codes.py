"""Errors for the replies of RabbitMQ 3.10.8 and 4.3.6, with recorded reply texts."""

from __future__ import annotations

import ssl

import pytest

from bide.amqp import reply_codes
from bide.errors import (
    AccessRefusedError,
    AuthenticationError,
    BrokerError,
    BrokerUnreachableError,
    ConnectionLostError,
    DeclarationMismatchError,
    NotEmptyError,
    ProtocolError,
    TargetNotFoundError,
    TlsError,
    UnsupportedBrokerError,
    VirtualHostError,
)


def mismatch(what: str, received: str, current: str) -> DeclarationMismatchError:
    error = reply_codes.channel_error(
        406, f"PRECONDITION_FAILED - inequivalent arg {what} in vhost 't': received {received} but current is {current}"
    )
    assert isinstance(error, DeclarationMismatchError)
    assert error.reply_code == 406
    return error


@pytest.mark.parametrize(
    ("what", "received", "current", "kind", "name", "argument", "wanted", "found"),
    [
        (
            "'x-message-ttl' for queue 'q'",
            "the value '5' of type 'signedint'",
            "the value '6' of type 'signedint'",
            *("queue", "q", "x-message-ttl", "5", "6"),
        ),
        (
            "'x-message-ttl' for queue 'q'",
            "the value '5' of type 'signedint'",
            "none",
            *("queue", "q", "x-message-ttl", "5", "(absent)"),
        ),
        (
            "'x-queue-type' for queue 'q'",
            "none",
            "the value 'quorum' of type 'longstr'",
            *("queue", "q", "x-queue-type", "(absent)", "quorum"),
        ),
        ("'x-queue-type' for queue 'q'", "'classic'", "'quorum'", *("queue", "q", "x-queue-type", "classic", "quorum")),
        ("'type' for exchange 'e'", "'direct'", "'topic'", *("exchange", "e", "type", "direct", "topic")),
        ("'durable' for exchange 'e'", "'false'", "'true'", *("exchange", "e", "durable", "false", "true")),
        (
            "'alternate-exchange' for exchange 'e'",
            "the value 'x' of type 'longstr'",
            "none",
            *("exchange", "e", "alternate-exchange", "x", "(absent)"),
        ),
        (
            "'x-dead-letter-exchange' for queue 'it's in vhost 'a''",
            "the value 'but current is' of type 'longstr'",
            "the value 'b' of type 'longstr'",
            *("queue", "it's in vhost 'a'", "x-dead-letter-exchange"),
            *("but current is", "b"),
        ),
    ],
)
def test_a_mismatch_names_argument_and_both_values(
    what: str, received: str, current: str, kind: str, name: str, argument: str, wanted: str, found: str
) -> None:
    error = mismatch(what, received, current)
    assert (error.kind, error.name, error.argument, error.wanted, error.found) == (kind, name, argument, wanted, found)
    assert str(error) == (
        f"the {kind} {name!r} exists with {argument} = {found}, not with {wanted} as declared: delete the {kind}, or "
        "declare it as it is"
    )


@pytest.mark.parametrize(("kind", "argument"), [("queue", "x-message-ttl"), ("exchange", "type")])
def test_a_truncated_mismatch_names_the_argument(kind: str, argument: str) -> None:
    text = f"PRECONDITION_FAILED - inequivalent arg '{argument}' for {kind} '{'n' * 250}' in vhost 't': received none"
    error = reply_codes.channel_error(406, text[:252] + "...")
    assert isinstance(error, DeclarationMismatchError)
    assert (error.kind, error.argument) == (kind, argument)
    assert f"exists with another {argument} than declared: delete the {kind}, or declare it as it is" in str(error)


@pytest.mark.parametrize(
    ("code", "text", "kind", "message"),
    [
        (404, "NOT_FOUND - no queue 'q' in vhost 't'", TargetNotFoundError, "no queue 'q' in vhost 't': declare it"),
        (404, "NOT_FOUND - no exchange 'e' in vhost 't'", TargetNotFoundError, "no exchange 'e' in vhost 't': declare"),
        (
            403,
            "ACCESS_REFUSED - access to queue 'q' in vhost 't' refused for user 'u'",
            AccessRefusedError,
            "refused for user 'u': give this user the permission, or use another",
        ),
        (
            403,
            "ACCESS_REFUSED - configure access to queue 'q' in vhost 't' refused for user 'u'",
            AccessRefusedError,
            "configure access to queue 'q' in vhost 't' refused for user 'u': give this user the permission",
        ),
        (
            403,
            "ACCESS_REFUSED - queue name 'amq.x' contains reserved prefix 'amq.*'",
            AccessRefusedError,
            "contains reserved prefix 'amq.*': choose another name",
        ),
        (
            405,
            "RESOURCE_LOCKED - cannot obtain exclusive access to locked queue 'q' in vhost 't'",
            AccessRefusedError,
            "it is exclusive to another connection",
        ),
        (
            406,
            "PRECONDITION_FAILED - queue 'q' in vhost 't' not empty",
            NotEmptyError,
            "the queue 'q' still holds messages: wait, purge it, or delete it by force",
        ),
        (
            406,
            "PRECONDITION_FAILED - invalid arg 'x-message-ttl' for queue 'q' in vhost 't': {value_negative,-5}",
            BrokerError,
            "the broker refused: invalid arg 'x-message-ttl' for queue 'q' in vhost 't': {value_negative,-5}",
        ),
        (540, "NOT_IMPLEMENTED - active=false", UnsupportedBrokerError, "does not implement this: active=false"),
        (311, "CONTENT_TOO_LARGE - too much", BrokerError, "the broker closed the channel: too much (311)"),
        (406, "", BrokerError, "the broker refused: "),
        (404, "odd words", TargetNotFoundError, "odd words: declare it first"),
    ],
)
def test_a_closed_channel_becomes_its_exception(code: int, text: str, kind: type[BrokerError], message: str) -> None:
    error = reply_codes.channel_error(code, text)
    assert type(error) is kind
    assert message in str(error)
    assert error.reply_code == code


def test_a_not_empty_queue_is_named() -> None:
    error = reply_codes.channel_error(406, "PRECONDITION_FAILED - queue 'a b' in vhost '/' not empty")
    assert isinstance(error, NotEmptyError)
    assert list(error.counts) == ["a b"]


@pytest.mark.parametrize(
    ("code", "text", "kind", "message"),
    [
        (
            320,
            "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'",
            ConnectionLostError,
            "the broker closed the connection: broker forced connection closure with reason 'shutdown' (320)",
        ),
        (
            501,
            "FRAME_ERROR - type 2, all octets = <<>>: {frame_too_large,200025,131064}",
            ProtocolError,
            "{frame_too_large,200025,131064} (501)",
        ),
        (503, "COMMAND_INVALID - unknown exchange type 'x-foo'", ProtocolError, "unknown exchange type 'x-foo' (503)"),
        (530, "NOT_ALLOWED - attempt to reuse consumer tag 'a'", ConnectionLostError, "reuse consumer tag 'a' (530)"),
        (541, "INTERNAL_ERROR", ConnectionLostError, "INTERNAL_ERROR (541)"),
    ],
)
def test_a_closed_connection_becomes_its_exception(code: int, text: str, kind: type[BrokerError], message: str) -> None:
    error = reply_codes.connection_error(code, text)
    assert type(error) is kind
    assert message in str(error)
    assert error.reply_code == code


@pytest.mark.parametrize(
    ("code", "text", "kind", "message"),
    [
        (
            403,
            "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. For details see the",
            AuthenticationError,
            "the broker at h:5672 does not accept the user 'u' with this password: check both",
        ),
        (
            530,
            "NOT_ALLOWED - vhost v not found",
            VirtualHostError,
            "the broker at h:5672 has no virtual host 'v': create it, or name another in the URL",
        ),
        (
            530,
            "NOT_ALLOWED - access to vhost 'v' refused for user 'u'",
            VirtualHostError,
            "the user 'u' may not enter the virtual host 'v' of the broker at h:5672 (NOT_ALLOWED - access to vhost",
        ),
        (
            320,
            "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'",
            ConnectionLostError,
            "the broker at h:5672 closed the connection: broker forced connection closure with reason 'shutdown' (320)",
        ),
        (
            530,
            "NOT_ALLOWED - access to vhost 'v' refused for user 'u': connection limit (2) is reached",
            BrokerError,
            "connection limit (2) is reached): close others, or raise the limit",
        ),
        (
            530,
            "NOT_ALLOWED - connection refused: node connection limit (10) is reached",
            BrokerError,
            "accepts no more connections",
        ),
        (541, "INTERNAL_ERROR - vhost 'v' is down", ConnectionLostError, "h:5672 closed the connection: vhost 'v' is"),
    ],
)
def test_a_refused_connection_becomes_its_exception(
    code: int, text: str, kind: type[BrokerError], message: str
) -> None:
    error = reply_codes.handshake_error(code, text, user="u", vhost="v", address="h:5672")
    assert type(error) is kind
    assert message in str(error)
    assert error.reply_code == code


DOWN = BrokerUnreachableError("a is down")
WEB = ProtocolError("b speaks HTTP")
FORCED = ConnectionLostError("c is shutting down", reply_code=320)
CLOSED = VirtualHostError("d is closed to u", reply_code=530)
REFUSED = AuthenticationError("e refuses u", reply_code=403)


@pytest.mark.parametrize(
    ("failures", "kind", "message"),
    [
        ([DOWN, WEB], ProtocolError, "b speaks HTTP; a is down"),
        ([WEB, FORCED, DOWN], ConnectionLostError, "c is shutting down; b speaks HTTP; a is down"),
        ([FORCED, CLOSED], VirtualHostError, "d is closed to u; c is shutting down"),
        ([CLOSED, REFUSED, DOWN], AuthenticationError, "e refuses u; d is closed to u; a is down"),
        ([DOWN, BrokerUnreachableError("f too")], BrokerUnreachableError, "a is down; f too"),
        ([DOWN, TlsError("g is not trusted")], TlsError, "g is not trusted; a is down"),
    ],
)
def test_failures_of_several_hosts_are_summarised_under_the_most_specific_one(
    failures: list[BrokerError], kind: type[BrokerError], message: str
) -> None:
    error = reply_codes.of_hosts(failures)
    assert (type(error), str(error)) == (kind, message)
    assert error.reply_code == next(one.reply_code for one in failures if type(one) is kind)


def test_the_error_of_a_single_host_is_raised_unchanged() -> None:
    assert reply_codes.of_hosts([CLOSED]) is CLOSED


def test_an_untrusted_certificate_is_the_cause_only_if_every_host_has_one() -> None:
    untrusted = [TlsError(name) for name in ("a", "b")]
    for one in untrusted:
        one.__cause__ = ssl.SSLCertVerificationError()
    assert isinstance(reply_codes.of_hosts(untrusted).__cause__, ssl.SSLCertVerificationError)
    assert not isinstance(reply_codes.of_hosts([*untrusted, DOWN]).__cause__, ssl.SSLCertVerificationError)


@pytest.mark.parametrize(
    ("text", "exchange"),
    [
        ("NOT_FOUND - no exchange 'a.b' in vhost 't'", "a.b"),
        ("ACCESS_REFUSED - access to exchange 'e' in vhost 't' refused for user 'u'", "e"),
        ("ACCESS_REFUSED - write access to exchange 'e' in vhost 't' refused for user 'u'", "e"),
        ("ACCESS_REFUSED - access to exchange 'amq.default' in vhost 't' refused for user 'u'", ""),
        (
            "ACCESS_REFUSED - access to topic 'k' in exchange 'e' in vhost 't' refused for user 'u'",
            None,
        ),
        ("NOT_FOUND - no queue 'q' in vhost 't'", None),
        ("PRECONDITION_FAILED - user_id property set to 'a' but authenticated user was 'b'", None),
    ],
)
def test_the_exchange_of_a_refusal_is_found(text: str, exchange: str | None) -> None:
    assert reply_codes.subject(text) == exchange


def test_a_message_over_the_limit_is_recognised() -> None:
    text = "PRECONDITION_FAILED - message size 1001 is larger than configured max size 1000"
    assert reply_codes.size_limit(text) == (1001, 1000)
    assert reply_codes.size_limit("NOT_FOUND - no queue 'message size' in vhost 't'") is None
