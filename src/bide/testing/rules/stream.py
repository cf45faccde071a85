"""Streams, which can only be declared."""

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
        super().__init__(definition, surroundings, owner=None, order=ByPriority(), keeps_turn=True)

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

    def counts(self, entry: Entry, *, by_get: bool) -> dict[str, int]:
        """Refuse."""
        self.refuse()

    def _return_from_lost(self, entries: Sequence[Entry]) -> None:
        """Do nothing: a stream has no deliveries."""

    def _changed(self) -> None:
        """Do nothing: a stream has no deliveries."""

    def _count_after_get(self) -> int:
        self.refuse()

    def refuse(self) -> NoReturn:
        """Refuse the use of the stream.

        Raises:
            NotModelledError: always.
        """
        not_modelled(f"reading and writing streams such as {self.name!r}: use a real broker")
