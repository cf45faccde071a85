"""Errors of the broker in memory, with RabbitMQ's reply codes and texts."""

from __future__ import annotations

from typing import Any, NoReturn

from bide.errors import BrokerError, NotModelledError


def channel_error(code: int, text: str) -> BrokerError:
    """The error with which the broker closes a channel.

    Args:
        code: the AMQP 0-9-1 reply code.
        text: the text in RabbitMQ's form, which clients parse.
    """
    return BrokerError(text, reply_code=code)


def not_modelled(feature: str) -> NoReturn:
    """Refuse a feature that the memory broker has no rules for.

    Args:
        feature: a description, and after a colon what to do instead.

    Raises:
        NotModelledError: always.
    """
    raise NotModelledError(f"the memory broker does not model {feature}", reply_code=540)


def not_found(kind: str, name: str, vhost: str) -> BrokerError:
    """The error for an exchange or queue that does not exist."""
    return channel_error(404, f"NOT_FOUND - no {kind} '{name}' in vhost '{vhost}'")


def precondition_failed(reason: str) -> BrokerError:
    """The error for an invalid request, or one that contradicts what exists."""
    return channel_error(406, f"PRECONDITION_FAILED - {reason}")


def inequivalent(kind: str, name: str, argument: str, vhost: str, *, wanted: Any, found: Any) -> BrokerError:
    """The error for a declaration that differs from what exists."""
    return precondition_failed(
        f"inequivalent arg '{argument}' for {kind} '{name}' in vhost '{vhost}': received {_described(wanted)} but "
        f"current is {_described(found)}"
    )


def locked(name: str, vhost: str) -> BrokerError:
    """The error for a queue that is exclusive to another connection."""
    reason = f"cannot obtain exclusive access to locked queue '{name}' in vhost '{vhost}'"
    return channel_error(405, f"RESOURCE_LOCKED - {reason}")


def access_refused(reason: str) -> BrokerError:
    """The error for a request that is not permitted."""
    return channel_error(403, f"ACCESS_REFUSED - {reason}")


def _described(value: Any) -> str:
    """Format a value like RabbitMQ."""
    if value is None:
        return "none"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    kind = "bool" if isinstance(value, bool) else "longstr" if isinstance(value, str) else "signedint"
    return f"the value '{text}' of type '{kind}'"
