"""AMQP reply codes as exceptions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from bide.errors import (
    AccessRefusedError,
    AuthenticationError,
    BrokerError,
    BrokerUnreachableError,
    ConnectionLostError,
    DeclarationMismatchError,
    NotEmptyError,
    NotModelledError,
    ProtocolError,
    TargetNotFoundError,
    TlsError,
    UnsupportedBrokerError,
    VirtualHostError,
)

CONNECTION_FORCED: Final = 320
ACCESS_REFUSED: Final = 403
NOT_FOUND: Final = 404
RESOURCE_LOCKED: Final = 405
PRECONDITION_FAILED: Final = 406
NOT_ALLOWED: Final = 530
NOT_IMPLEMENTED: Final = 540

NOT_MODELLED: Final = "the memory broker does not model "
"""The start of a reply text of the in-memory broker for a feature that RabbitMQ has and the in-memory broker lacks."""

_INEQUIVALENT: Final = re.compile(
    r"inequivalent arg '(?P<argument>[^']*)' for (?P<kind>exchange|queue) '(?P<name>.*)' in vhost '[^']*':"
    r" received (?P<wanted>.*?) but current is (?P<found>.*)",
    re.DOTALL,
)
_INEQUIVALENT_TRUNCATED: Final = re.compile(
    r"inequivalent arg '(?P<argument>[^']*)' for (?P<kind>exchange|queue) '(?P<name>.*)\.\.\.", re.DOTALL
)
"""As ``_INEQUIVALENT``, for a reply text that the broker truncated at 255 bytes because of long names."""

_NOT_EMPTY: Final = re.compile(r"queue '(?P<name>.*)' in vhost '[^']*' (?:is )?not empty")
_EXCHANGE: Final = re.compile(r"exchange '(?P<name>.*)' in vhost", re.DOTALL)
_LIMIT_REACHED: Final = re.compile(r"limit \(\d+\) is reached")
_TOO_LARGE: Final = re.compile(r"message size (?P<size>\d+) is larger than configured max size (?P<limit>\d+)")


def channel_error(code: int, text: str) -> BrokerError:
    """The error for a channel that the broker closed."""
    reason = text.partition(" - ")[2] or text
    if code == ACCESS_REFUSED and "reserved prefix" in reason:
        return AccessRefusedError(f"{reason}: choose another name", reply_code=code)
    if code == ACCESS_REFUSED and "exclusive use" in reason:
        return AccessRefusedError(f"{reason}: another consumer uses it exclusively; wait for its end", reply_code=code)
    if code == ACCESS_REFUSED:
        return AccessRefusedError(f"{reason}: give this user the permission, or use another", reply_code=code)
    if code == NOT_FOUND:
        return TargetNotFoundError(f"{reason}: declare it first", reply_code=code)
    if code == PRECONDITION_FAILED:
        return _precondition(code, reason)
    if code == RESOURCE_LOCKED:
        return AccessRefusedError(f"{reason}: it is exclusive to another connection", reply_code=code)
    if code == NOT_IMPLEMENTED and reason.startswith(NOT_MODELLED):
        return NotModelledError(reason, reply_code=code)
    if code == NOT_IMPLEMENTED:
        return UnsupportedBrokerError(f"the broker does not implement this: {reason}", reply_code=code)
    return BrokerError(f"the broker closed the channel: {reason} ({code})", reply_code=code)


def _precondition(code: int, reason: str) -> BrokerError:
    found = _INEQUIVALENT.search(reason)
    if found:
        kind, name, argument = found["kind"], found["name"], found["argument"]
        wanted, current = _value_in(found["wanted"]), _value_in(found["found"])
        return DeclarationMismatchError(
            f"the {kind} {name!r} exists with {argument} = {current}, not with {wanted} as declared: delete the "
            f"{kind}, or declare it as it is",
            kind=kind,
            name=name,
            argument=argument,
            wanted=wanted,
            found=current,
            reply_code=code,
        )
    cut = _INEQUIVALENT_TRUNCATED.fullmatch(reason)
    if cut:
        kind, argument = cut["kind"], cut["argument"]
        start = cut["name"].partition("'")[0]
        return DeclarationMismatchError(
            f"the {kind} {start!r}... exists with another {argument} than declared: delete the {kind}, or declare it "
            "as it is",
            kind=kind,
            name="",
            argument=argument,
            reply_code=code,
        )
    not_empty = _NOT_EMPTY.search(reason)
    if not_empty:
        name = not_empty["name"]
        return NotEmptyError(
            f"the queue {name!r} still holds messages: wait, purge it, or delete it by force",
            counts={name: 1},
            reply_code=code,
        )
    return BrokerError(f"the broker refused: {reason}", reply_code=code)


def _value_in(text: str) -> str:
    """The value in a reply text of RabbitMQ, such as ``the value '5' of type 'signedint'`` or ``none``."""
    quoted = re.search(r"'(.*)' of type", text) or re.fullmatch(r"'(.*)'", text.strip())
    return quoted[1] if quoted else "(absent)" if text.strip() == "none" else text.strip()


def connection_error(code: int, text: str, *, broker: str = "the broker") -> BrokerError:
    """The error for an open connection that the broker closed."""
    reason = text.partition(" - ")[2] or text
    if 500 < code < 530:
        return ProtocolError(f"{broker} closed the connection: {text} ({code})", reply_code=code)
    return ConnectionLostError(f"{broker} closed the connection: {reason} ({code})", reply_code=code)


def is_refusal(error: BrokerError) -> bool:
    """Whether the broker closed the connection because of a call, which would fail again, and not because it stops."""
    return error.reply_code is not None and error.reply_code > CONNECTION_FORCED


def handshake_error(
    code: int, text: str, *, user: str, vhost: str, address: str, external: bool = False
) -> BrokerError:
    """The error for a connection that the broker refused to open.

    Args:
        external: whether the login was by certificate, so that the broker chose the user name.
    """
    if code == ACCESS_REFUSED and external:
        return AuthenticationError(
            f"the broker at {address} has no user with the name in the client certificate, or got no certificate: give "
            "certfile and keyfile in the URL, create the user, and enable logins by certificate",
            reply_code=code,
        )
    if code == ACCESS_REFUSED:
        return AuthenticationError(
            f"the broker at {address} does not accept the user {user!r} with this password: check both",
            reply_code=code,
        )
    if code == NOT_ALLOWED and "not found" in text:
        return VirtualHostError(
            f"the broker at {address} has no virtual host {vhost!r}: create it, or name another in the URL",
            reply_code=code,
        )
    if code == NOT_ALLOWED and _LIMIT_REACHED.search(text):
        return BrokerError(
            f"the broker at {address} accepts no more connections ({text}): close others, or raise the limit",
            reply_code=code,
        )
    if code == NOT_ALLOWED:
        return VirtualHostError(
            f"the user {user!r} may not enter the virtual host {vhost!r} of the broker at {address} ({text}): "
            "grant the permission, or name another in the URL",
            reply_code=code,
        )
    return connection_error(code, text, broker=f"the broker at {address}")


_SPECIFICITY: Final[dict[type[BrokerError], int]] = {
    BrokerUnreachableError: 0,
    ProtocolError: 1,
    TlsError: 2,
    BrokerError: 3,
    VirtualHostError: 4,
    AuthenticationError: 5,
}
"""How specific an error is about what keeps a connection from opening; higher is more specific."""


def of_hosts(failures: Sequence[BrokerError]) -> BrokerError:
    """The error if none of several hosts accepts: it has the class of the most specific error, whose text is first."""
    if len(failures) == 1:
        return failures[0]
    main = max(failures, key=_specificity)
    others = [one for one in failures if one is not main]
    error = type(main)("; ".join(map(str, (main, *others))), reply_code=main.reply_code)
    # Callers do not retry for some causes, such as a bad certificate. Keep the cause only if every host failed alike.
    error.__cause__ = main.__cause__ if all(type(one) is type(main) for one in others) else main
    return error


def _specificity(failure: BrokerError) -> int:
    return _SPECIFICITY.get(type(failure), _SPECIFICITY[BrokerError])


def subject(text: str) -> str | None:
    """The exchange that a reply text refuses access to, or reports as missing.

    Empty for the default exchange. None for other reply texts, and for a refusal that also depends on the routing key.
    """
    if "access to topic" in text:
        return None
    found = _EXCHANGE.search(text)
    if found is None:
        return None
    return "" if found["name"] == "amq.default" else found["name"]


def size_limit(text: str) -> tuple[int, int] | None:
    """Size and limit in bytes, if a reply text says that a message was too large."""
    found = _TOO_LARGE.search(text)
    return (int(found["size"]), int(found["limit"])) if found else None
