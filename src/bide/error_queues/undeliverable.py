"""Resending of messages in the undeliverable queue, once their targets exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from bide.client.client import Client
from bide.client.message import Message
from bide.client.received_message import KEPT_PROPERTIES
from bide.delay.allowed_targets import AllowedTargets
from bide.delay.forwarding import parse_target
from bide.delay.protocol import (
    HEADER_DUE,
    HEADER_EXPIRATION,
    HEADER_PRIORITY,
    HEADER_SET_ASIDE,
    HEADER_TO,
    QueueTarget,
)
from bide.delay.received import OWN_PREFIX
from bide.delay.recognition import part_of
from bide.error_queues.browser import browse
from bide.error_queues.delivery_count import DeliveryCountReset
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
from bide.schedules.names import ScheduleNames

_PROPERTIES: Final = (*KEPT_PROPERTIES, "priority", "expiration")

_TARGET_ERRORS: Final = (
    AccessRefusedError,
    DeclarationMismatchError,
    InvalidInputError,
    PublishRefusedError,
    TargetNotFoundError,
    UnroutableError,
)
"""Errors that concern one message or its target, and not other messages."""

_REPLACED_HEADERS: Final = frozenset({HEADER_TO, HEADER_DUE, HEADER_EXPIRATION, HEADER_PRIORITY, HEADER_SET_ASIDE})
"""Headers that publishing sets again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resent:
    """The result of resending undeliverable messages.

    Attributes:
        sent: number of messages that reached their target.
        kept: number of messages that stay in the queue, by target and error.
    """

    sent: int
    kept: Mapping[str, int]


async def resend(
    client: Client, *, allow: Iterable[str], queue: str | None = None, management_url: str | None = None
) -> Resent:
    """Send every message of the undeliverable queue to its target, once.

    Overdue messages are delivered immediately; others wait for the rest of their delay. A message is acknowledged after
    its copy was confirmed, so a crash loses none, and repeats only the messages of the last hundredths of a second,
    whose acknowledgements were not sent yet. Messages that cannot be sent stay in the queue. This does not count
    against the queue's delivery limit: see :class:`bide.error_queues.ErrorQueue`.

    Args:
        allow: patterns of the targets that messages may be sent to; see :class:`bide.Relay`. Every client that may
            write to the delay infrastructure can bring messages with any target into this queue. The schedule log is
            never a target.
        queue: the undeliverable queue; None for the one of the client's delay infrastructure. The undeliverable queue
            of the schedule log is ``bide.v1.schedule.undeliverable``.
        management_url: URL of the management API, for reading the queue's delivery limit; see :class:`bide.Endpoint`.

    Raises:
        InvalidInputError: a pattern is invalid, or *queue* is not an undeliverable queue.
        TargetNotFoundError: there is no undeliverable queue.
    """
    allowed = AllowedTargets.of(allow)
    if queue is None:
        queue = (await client.infrastructure()).undeliverable
    elif part_of(queue) != "undeliverable":
        raise InvalidInputError(
            f"the queue {queue!r} is not an undeliverable queue: name one such as {ScheduleNames().undeliverable!r}, "
            "or use ErrorQueue.retry(...) for an error queue"
        )
    count_reset = await DeliveryCountReset.of(client, queue, management_url)
    kept: Counter[str] = Counter()
    sent = 0
    async with browse(client.url, queue, count_reset) as browser:
        async for held in browser:
            message = Message(held.delivery, None, client.now())
            try:
                copy = _copy_for_target(message)
                allowed.check_delivery(copy.target)
                await client.forward(copy)
            except _TARGET_ERRORS as error:
                kept[f"{_target(message)}: {type(error).__name__}"] += 1
                await browser.release(held)
            else:
                browser.ack(held)
                sent += 1
    return Resent(sent=sent, kept=dict(kept))


def _target(message: Message) -> str:
    return str((message.raw.values.get("headers") or {}).get(HEADER_TO, "(nowhere)"))


def _copy_for_target(message: Message) -> PreparedMessage:
    """Copy a message for its target. The copy keeps the headers that record earlier attempts."""
    target = parse_target(_target(message), message.routing_key)
    address: dict[str, Any] = (
        {"to": target.queue}
        if isinstance(target, QueueTarget)
        else {"exchange": target.exchange, "routing_key": target.routing_key}
    )
    headers = {header: value for header, value in message.headers.items() if header not in ("CC", "BCC")}
    properties = {one: getattr(message, one) for one in _PROPERTIES}
    checked = check_message(
        OutgoingMessage(message.body, **address, **properties, headers=headers, deliver_at=message.due)
    )
    raw: Mapping[str, Any] = message.raw.values.get("headers") or {}
    kept = {
        header: value
        for header, value in raw.items()
        if header.startswith(OWN_PREFIX) and header not in _REPLACED_HEADERS
    }
    return replace(
        checked, values={**checked.values, "headers": {**checked.headers, **kept}}, template=None, is_copy=True
    )
