"""Rules for messages that a process of bide delivers for their senders."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from bide.delay.protocol import (
    HEADER_EXPIRATION,
    HEADER_SET_ASIDE,
    HEADER_TO,
    ExchangeTarget,
    QueueTarget,
    Target,
)
from bide.errors import InvalidInputError

HEADER_USER: Final = "bide-user-id"
"""Header with the ``user_id`` property of a message, if that is not the user of the process."""

LONGEST_PAUSE: Final = timedelta(seconds=64)
"""The longest pause before a message is sent to a refusing target again; pauses are 1 unit, 2, 4..."""

MAX_REASON: Final = 1000
"""The maximum number of characters of the reason in the headers of an undeliverable message."""

_MAX_NAME: Final = 255


def parse_target(text: Any, routing_key: str) -> Target:
    """Parse a target ``q:<queue>`` or ``x:<exchange>``, as in the header ``bide-to``.

    Raises:
        InvalidInputError: the text is not such a target.
    """
    kind, _, name = text.partition(":") if isinstance(text, str) else ("", "", "")
    if kind not in ("q", "x") or not name or len(name.encode()) > _MAX_NAME:
        raise InvalidInputError(f"the header {HEADER_TO} is {text!r}: it names neither a queue nor an exchange")
    return QueueTarget(name) if kind == "q" else ExchangeTarget(name, routing_key)


def carry_user_id(properties: dict[str, Any], headers: dict[str, Any], user: str | None) -> None:
    """Move a ``user_id`` to a header, unless it is the user of the connection.

    The broker closes the channel for another user id.
    """
    if properties.get("user_id") not in (None, user):
        headers[HEADER_USER] = properties.pop("user_id")


def set_aside_values(values: Mapping[str, Any], reason: str | None, *, user: str | None) -> dict[str, Any]:
    """The properties of a message in a queue for messages that cannot be sent on.

    Its expiration is moved to a header, because the broker would otherwise delete the message. Without a reason, no
    header is added and the expiration is lost, so that headers that filled a frame still do.

    Args:
        values: its properties by their AMQP names.
        reason: why it cannot be sent, for the header ``bide-set-aside``; None if there is no room for this header.
        user: the user of the connection.
    """
    properties = {name: value for name, value in values.items() if name != "headers"}
    headers = dict(values.get("headers") or {})
    added: dict[str, Any] = {HEADER_SET_ASIDE: reason and reason[:MAX_REASON]}
    if (expiration := properties.pop("expiration", None)) is not None:
        added[HEADER_EXPIRATION] = expiration
    carry_user_id(properties, added, user)
    return {**properties, "headers": headers if reason is None else headers | added}
