"""Streams: they may be declared, and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from bide.testing.rules.consumers import BrokerConsumer
from bide.testing.rules.entry import ByPriority, Entry
from bide.testing.rules.errors import not_modelled
from bide.testing.rules.message import StoredMessage
from bide.testing.rules.queue import BrokerQueue, Surroundings
from bide.topology import Queue


class StreamQueue(BrokerQueue):
    """A stream, whose use is not modelled."""

    def __init__(self, definition: Queue, surroundings: Surroundings) -> None:
        super().__init__(definition, surroundings, owner=None, order=ByPriority(), keeps_place=True)

    def publish(self, message: StoredMessage, publisher: object | None) -> bool:
        """Refuse."""
        self.refuse()

    def consume(self, consumer: BrokerConsumer) -> None:
        """Refuse."""
        self.refuse()

    def get(self) -> tuple[Entry, int] | None:
        """Refuse."""
        self.refuse()

    def requeue(self, entries: Sequence[Entry], *, failed: bool) -> None:
        """Refuse."""
        self.refuse()

    def discard(self, entries: Sequence[Entry]) -> None:
        """Refuse."""
        self.refuse()

    def counts(self, entry: Entry, *, asked_for: bool) -> dict[str, int]:
        """Refuse."""
        self.refuse()

    def _take_back(self, entries: Sequence[Entry]) -> None:
        """Nothing is ever given away."""

    def _changed(self) -> None:
        """Nothing ever does."""

    def _left_behind(self) -> int:
        self.refuse()

    def refuse(self) -> NoReturn:
        """Say that it cannot be used.

        Raises:
            NotModelledError: always.
        """
        not_modelled(f"streams, and {self.name!r} is one: use a real broker for what is written to it or read from it")
