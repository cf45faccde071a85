"""The quorum queues of bide's delay infrastructures, which never drop a message."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Final

from bide.topology import Argument, Queue

_REFUSING: Final[Mapping[str, Argument]] = {"x-overflow": "reject-publish"}
"""Dead-lettering at least once works with no other way to overflow: a full queue drops its oldest messages else."""

_BALANCED: Final[Mapping[str, Argument]] = {"x-queue-leader-locator": "balanced"}
"""Where many queues are declared by one client, their leaders would all be on its node."""


def safe_queue(name: str, arguments: Mapping[str, Argument]) -> Queue:
    """A queue that refuses rather than drops, and gives a dead letter away only when the next queue has it."""
    return Queue.quorum(name, {"x-dead-letter-strategy": "at-least-once", **_REFUSING, **_BALANCED, **arguments})


def waiting_queue(
    name: str, wait: timedelta, dead_letter_exchange: str, *, dead_letter_key: str | None = None
) -> Queue:
    """A queue that holds every message for the same time, and then dead-letters it.

    Args:
        dead_letter_key: the routing key from then on. Below RabbitMQ 4.0 the broker removes the CC header with it
            (``rabbit_dead_letter:make_msg``). None keeps the keys that the message came with.
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
    return Queue.quorum(name, {**_REFUSING, **_BALANCED})
