"""The names of the exchanges and queues of ``WaitingHall``."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from bide.delay.protocol import owned_by
from bide.durations import MILLISECOND

LAYOUT_VERSION: Final = "v1"
UNIT: Final = timedelta(seconds=1)
"""The resolution of a hall whose names do not mention it."""


class HallNames:
    """The names of exchanges and queues.

    Attributes:
        prefix: starts every name.
        levels: the number of levels.
        resolution: the wait of the lowest level.
    """

    __slots__ = ()

    prefix: str
    levels: int
    resolution: timedelta

    @property
    def base(self) -> str:
        """The start of all names."""
        if self.resolution == UNIT:
            return f"{self.prefix}.hall.{LAYOUT_VERSION}"
        return f"{self.prefix}.hall-{self.resolution // MILLISECOND}ms.{LAYOUT_VERSION}"

    @property
    def check_in(self) -> str:
        """The fanout exchange that messages are published to, and return to from the meditating queue."""
        return f"{self.base}.check-in"

    @property
    def receiving_queue(self) -> str:
        """The queue from which the relay sends messages to the meditating queue or to the levels."""
        return f"{self.base}.receiving"

    @property
    def meditating(self) -> str:
        """The name of the fanout exchange and queue in which messages wait for one round.

        The level is part of the name, so that halls with other levels have another queue.
        """
        return f"{self.base}.meditating-{self.levels - 1:02}"

    @property
    def released_exchange(self) -> str:
        """The fanout exchange that every message passes after the levels."""
        return f"{self.base}.released"

    @property
    def distributing_queue(self) -> str:
        """The queue from which the relay sends messages to their targets."""
        return f"{self.base}.distributing"

    @property
    def delivery_exchange(self) -> str:
        """The pick-up exchange, a topic exchange: the target of messages that name no other."""
        return f"{self.base}.pick-up"

    @property
    def undeliverable(self) -> str:
        """The name of the exchange and queue for undeliverable messages."""
        return f"{self.base}.undeliverable"

    @property
    def relay_queues(self) -> tuple[str, str]:
        """The queues that a relay consumes from."""
        return self.receiving_queue, self.distributing_queue

    def level_name(self, level: int) -> str:
        """The name of a level's exchange and queue; 0 is the lowest level."""
        return f"{self.base}.level-{level:02}"

    def owns(self, name: str) -> bool:
        """Whether an exchange or queue of this name belongs to this infrastructure."""
        return owned_by(self.base, name)
