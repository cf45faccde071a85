"""The names of the exchanges and queues of ``Clock``."""

from __future__ import annotations

from typing import Final

from bide.delay.clock_digits import LEVELS, Level
from bide.delay.clock_keys import digit_name
from bide.delay.protocol import owned_by
from bide.topology import Exchange

LAYOUT_VERSION: Final = "v1"


class ClockNames:
    """The names of exchanges and queues.

    Attributes:
        prefix: starts every name.
    """

    __slots__ = ()

    prefix: str

    @property
    def base(self) -> str:
        """The start of all names."""
        return f"{self.prefix}.{LAYOUT_VERSION}"

    @property
    def delivery_exchange(self) -> str:
        """The exchange that targets are bound to."""
        return f"{self.base}.delivery"

    @property
    def released_exchange(self) -> str:
        """The fanout exchange that every message passes at its due time."""
        return f"{self.base}.released"

    @property
    def undeliverable(self) -> str:
        """The name of the exchange and queue for undeliverable messages."""
        return f"{self.base}.undeliverable"

    def owns(self, name: str) -> bool:
        """Whether an exchange or queue of this name belongs to this infrastructure."""
        return owned_by(self.base, name)

    def level_exchange(self, level: Level) -> str:
        """The direct exchange of a level."""
        return f"{self.base}.{level.letter}"

    def entry_exchange(self, level: Level) -> str:
        """The fanout exchange that publishers use to enter a level."""
        return f"{self.base}.in.{level.letter}"

    def digit_queue(self, level: Level, digit: int, lane: int = 0) -> str:
        """The queue in which messages wait for one digit."""
        return f"{self.base}.{digit_name(level, digit, lane)}"

    @property
    def complete_mark(self) -> Exchange:
        """The exchange that ``bide delay apply`` declares last: if it exists, the whole topology was declared.

        It is not part of :meth:`topology`, because it is declared only after the queues are bound.
        """
        return Exchange(f"{self.base}.complete", "fanout")

    def exchange_below(self, level: Level) -> str:
        """The exchange after a level."""
        index = LEVELS.index(level) + 1
        return self.level_exchange(LEVELS[index]) if index < len(LEVELS) else self.released_exchange
