"""How a broker says no: with a reply code and a text, which close the channel."""

from __future__ import annotations

from typing import Any, NoReturn

from bide.errors import BrokerError, NotModelledError


def refusal(code: int, text: str) -> BrokerError:
    """The error for which the broker closes a channel.

    Args:
        code: the AMQP 0-9-1 reply code.
        text: in RabbitMQ's form, so that clients read it as RabbitMQ's own.
    """
    return BrokerError(text, reply_code=code)


def not_modelled(feature: str) -> NoReturn:
    """Refuse what the memory broker has no rules for.

    Args:
        feature: in words; a way out after a colon.

    Raises:
        NotModelledError: always.
    """
    raise NotModelledError(f"the memory broker does not model {feature}", reply_code=540)


def not_found(kind: str, name: str, vhost: str) -> BrokerError:
    """There is no such exchange or queue."""
    return refusal(404, f"NOT_FOUND - no {kind} '{name}' in vhost '{vhost}'")


def precondition_failed(reason: str) -> BrokerError:
    """What is asked for contradicts what there is, or itself."""
    return refusal(406, f"PRECONDITION_FAILED - {reason}")


def inequivalent(kind: str, name: str, argument: str, vhost: str, *, wanted: Any, found: Any) -> BrokerError:
    """It exists with another property or argument."""
    return precondition_failed(
        f"inequivalent arg '{argument}' for {kind} '{name}' in vhost '{vhost}': received {_described(wanted)} but "
        f"current is {_described(found)}"
    )


def locked(name: str, vhost: str) -> BrokerError:
    """The queue is another connection's."""
    reason = f"cannot obtain exclusive access to locked queue '{name}' in vhost '{vhost}'"
    return refusal(405, f"RESOURCE_LOCKED - {reason}")


def access_refused(reason: str) -> BrokerError:
    """Nobody may do that."""
    return refusal(403, f"ACCESS_REFUSED - {reason}")


def _described(value: Any) -> str:
    """A value in RabbitMQ's wording."""
    if value is None:
        return "none"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    kind = "bool" if isinstance(value, bool) else "longstr" if isinstance(value, str) else "signedint"
    return f"the value '{text}' of type '{kind}'"
