"""Compiled routes of ``Clock``: tables of the encoded keys of all digits."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from bide.delay.clock_digits import LEVELS, RESOLUTION
from bide.delay.clock_keys import digit_key
from bide.durations import MICROSECOND

if TYPE_CHECKING:
    from bide.delay.compiled import WireFormat

_UNITS: Final = tuple(level.unit // RESOLUTION for level in LEVELS)

KeyTable = Sequence[Sequence[bytes | None]]
"""The encoded keys by level and digit; None for a digit that is not ready."""


class ClockRoute:
    """See :class:`bide.delay.compiled.CompiledRoute`.

    Args:
        routing_key: the message's own routing key.
        entries: the exchange that publishers use to enter each level.
        tables: the keys of each lane.
        carrier: the header for the digits.
        target_key: the key that the delivery exchange routes to the target.
        to: the name of the header ``bide-to``, and its value.
        target_hops: the number of queues after the digits.
    """

    def __init__(
        self,
        wire: WireFormat,
        *,
        routing_key: str,
        entries: Sequence[str],
        tables: Sequence[KeyTable],
        resolution: timedelta,
        max_delay: timedelta,
        carrier: str,
        target_key: str,
        to: tuple[str, str],
        target_hops: int,
    ) -> None:
        self.routing_key = routing_key
        self.names = frozenset[str]()
        # One entry per lane; the lists in the tables change as digits become ready.
        self._lanes = [tuple(zip(_UNITS, entries, table, strict=True)) for table in tables]
        self._resolution_microseconds = resolution // MICROSECOND
        self._steps_per_resolution = resolution // RESOLUTION
        self._max_steps = max_delay // RESOLUTION
        self._encode_array = wire.array
        self._carrier = wire.short_string(carrier)
        self._target_key = wire.field_value(target_key)
        self._to_header = wire.table_items({to[0]: to[1]})
        self._target_hops = target_hops

    def after(self, wait: int, message_id: str) -> tuple[str, str, bytes, int] | None:
        """See :meth:`bide.delay.compiled.CompiledRoute.after`."""
        wait = -(-wait // self._resolution_microseconds) * self._steps_per_resolution
        if wait > self._max_steps:
            return None
        lanes = self._lanes
        hops, entry = self._target_hops, ""
        keys: list[bytes | None] = []
        for unit, exchange, encoded in lanes[zlib.crc32(message_id.encode()) % len(lanes) if len(lanes) > 1 else 0]:
            if not entry:
                if wait < unit:
                    continue
                entry = exchange
            digit, wait = divmod(wait, unit)
            if digit:
                hops += 1
            keys.append(encoded[digit])
        keys.append(self._target_key)
        try:
            array = b"".join(keys)  # type: ignore[arg-type]  # None raises, see below
        except TypeError:
            # A key is None. Catching the error costs nothing for the other messages; a check would cost each of them.
            return None
        return entry, self.routing_key, self._carrier + self._encode_array(array) + self._to_header, hops


@lru_cache(maxsize=256)
def all_keys(padding: str, lane: int, encode: Callable[[Any], bytes]) -> KeyTable:
    """The encoded keys of all digits of all levels."""
    return tuple(
        tuple(encode(padding + digit_key(level, digit, lane if digit else 0)) for digit in range(level.highest + 1))
        for level in LEVELS
    )
