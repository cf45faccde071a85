"""Limits for the messages in flight to each target, so that a slow one holds up no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

WINDOW: Final = 30
"""The maximum number of messages in flight to one target. From 32 unanswered commands to a quorum queue on, RabbitMQ
blocks the channel, and then the connection, until the queue answers (``quorum_commands_soft_limit``,
``rabbit_fifo_client``)."""


class TargetWindows:
    """Places for messages in flight, by target, for all partitions of a gate."""

    def __init__(self) -> None:
        self._in_flight = Counter[str]()
        self._waiting: dict[str, dict[Callable[[str], None], None]] = {}

    def enter(self, target: str, on_place: Callable[[str], None]) -> bool:
        """Take a place, if there is one.

        Args:
            on_place: called once with the target, when there may be a place again. It is not called if this call
                returned True.
        """
        if self._in_flight[target] >= WINDOW:
            self._waiting.setdefault(target, {})[on_place] = None
            return False
        self._in_flight[target] += 1
        return True

    def leave(self, target: str) -> None:
        """Give a place back."""
        self._in_flight[target] -= 1
        if not self._in_flight[target]:
            del self._in_flight[target]
        for on_place in self._waiting.pop(target, ()):
            on_place(target)
