"""Send on what ended in the undeliverable queue, once its target is back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from bide.client.client import Client
from bide.client.message import KEPT_PROPERTIES, Message
from bide.delay.allowed_targets import AllowedTargets
from bide.delay.protocol import HEADER_DUE, HEADER_EXPIRATION, HEADER_PRIORITY, HEADER_SET_ASIDE, HEADER_TO
from bide.delay.received import OWN_PREFIX
from bide.errors import (
    AccessRefusedError,
    DeclarationMismatchError,
    InvalidInputError,
    PublishRefusedError,
    TargetNotFoundError,
    UnroutableError,
)
from bide.messages.outgoing import OutgoingMessage
from bide.messages.prepared import PreparedMessage, check_message

QUIET: Final = 1.0
"""Seconds without a message after which the queue counts as worked through."""

PREFETCH: Final = 10_000
"""So many messages may stay in the queue, at most, for the rest to be reached."""

_PROPERTIES: Final = (*KEPT_PROPERTIES, "priority", "expiration")

_OF_ONE_TARGET: Final = (
    AccessRefusedError,
    DeclarationMismatchError,
    InvalidInputError,
    PublishRefusedError,
    TargetNotFoundError,
    UnroutableError,
)
"""Errors that say something about a message or its target, and nothing about the messages behind it."""

_RENEWED: Final = frozenset({HEADER_TO, HEADER_DUE, HEADER_EXPIRATION, HEADER_PRIORITY, HEADER_SET_ASIDE})
"""Headers that are written anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resent:
    """What became of the messages in the undeliverable queue.

    Attributes:
        sent: messages that reached their target.
        kept: target and error -> messages that stay in the queue.
    """

    sent: int
    kept: Mapping[str, int]


async def resend(client: Client, *, allow: Iterable[str]) -> Resent:
    """Send every message of the undeliverable queue to the target that it was meant for, once.

    What is overdue goes at once, what is not waits the rest. Each message is acknowledged after its successor was
    confirmed, so that a crash repeats at most one and loses none. What cannot be sent stays in the queue.

    Args:
        allow: patterns of the targets that messages are sent to; see :class:`bide.Relay`. Anybody who may write to the
            delay infrastructure can have a message end in this queue, with any target in its headers.

    Raises:
        InvalidInputError: a pattern cannot be used.
        TargetNotFoundError: there is no undeliverable queue.
    """
    allowed = AllowedTargets.of(allow)
    infrastructure = await client.infrastructure()
    kept: Counter[str] = Counter()
    sent = 0
    async with client.consume(infrastructure.undeliverable, prefetch=PREFETCH) as messages:
        while True:
            try:
                async with asyncio.timeout(QUIET):
                    message = await anext(messages)
            except TimeoutError:
                break
            try:
                copy = _again(message)
                allowed.check(copy.target)
                await client.forward(copy)
            except _OF_ONE_TARGET as error:
                kept[f"{_target(message)}: {type(error).__name__}"] += 1
                # Unsettled until the consumer closes, for otherwise it would come again at once.
                if kept.total() == PREFETCH:
                    break
            else:
                await message.ack()
                sent += 1
    return Resent(sent=sent, kept=dict(kept))


def _target(message: Message) -> str:
    return str((message.raw.values.get("headers") or {}).get(HEADER_TO, "(nowhere)"))


def _again(message: Message) -> PreparedMessage:
    """The same message for its target once more. What is told of attempts behind it stays on it."""
    kind, _, name = _target(message).partition(":")
    if kind not in ("q", "x"):
        raise InvalidInputError(f"the message {message.message_id!r} does not say where it should go")
    address: dict[str, Any] = {"to": name} if kind == "q" else {"exchange": name, "routing_key": message.routing_key}
    headers = {header: value for header, value in message.headers.items() if header not in ("CC", "BCC")}
    properties = {one: getattr(message, one) for one in _PROPERTIES}
    checked = check_message(
        OutgoingMessage(message.body, **address, **properties, headers=headers, deliver_at=message.due)
    )
    raw: Mapping[str, Any] = message.raw.values.get("headers") or {}
    kept = {header: value for header, value in raw.items() if header.startswith(OWN_PREFIX) and header not in _RENEWED}
    return replace(checked, values={**checked.values, "headers": {**checked.headers, **kept}}, kind=None, is_copy=True)
