"""Quorum queues of bide's delay infrastructures, which never drop a message."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Final

from bide.topology import Argument, Queue

_REJECT_WHEN_FULL: Final[Mapping[str, Argument]] = {"x-overflow": "reject-publish"}
"""At-least-once dead-lettering requires this overflow. With ``drop-head``, a full queue drops its oldest messages."""

_BALANCED_LEADERS: Final[Mapping[str, Argument]] = {"x-queue-leader-locator": "balanced"}
"""Without this, the leaders of all queues that one client declares would be on that client's node."""


def safe_queue(name: str, arguments: Mapping[str, Argument]) -> Queue:
    """A queue that rejects messages when full, and dead-letters at least once."""
    return Queue.quorum(
        name, {"x-dead-letter-strategy": "at-least-once", **_REJECT_WHEN_FULL, **_BALANCED_LEADERS, **arguments}
    )


def waiting_queue(
    name: str, wait: timedelta, dead_letter_exchange: str, *, dead_letter_key: str | None = None
) -> Queue:
    """A queue that holds every message for the same time, and then dead-letters it.

    Args:
        dead_letter_key: the dead-letter routing key. Before RabbitMQ 4.0 the broker then also removes the CC header
            (``rabbit_dead_letter:make_msg``). None keeps the message's routing keys.
    """
    arguments: dict[str, Argument] = {
        "x-message-ttl": wait // timedelta(milliseconds=1),
        "x-dead-letter-exchange": dead_letter_exchange,
    }
    if dead_letter_key is not None:
        arguments["x-dead-letter-routing-key"] = dead_letter_key
    return safe_queue(name, arguments)


def final_queue(name: str) -> Queue:
    """A queue that holds messages until they are consumed."""
    return Queue.quorum(name, {**_REJECT_WHEN_FULL, **_BALANCED_LEADERS})
