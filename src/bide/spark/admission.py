"""Admission control of a streaming query: the size of micro-batches and their delay."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from bide.spark.offsets import limited

DEFAULT_MAX_DELAY: Final = timedelta(minutes=15)
"""The default of Spark's Kafka source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerLimits:
    """The limits of a query.

    Attributes:
        max_offsets: the largest number of offsets in a micro-batch; None without a limit.
        max_bytes: the approximate size of a micro-batch in bytes, as stored in the streams; None without a limit.
        min_offsets: wait until this number of offsets is available; None to accept any number.
        max_delay: start a micro-batch with fewer offsets if the last one was this long ago.
    """

    max_offsets: int | None = None
    max_bytes: int | None = None
    min_offsets: int | None = None
    max_delay: timedelta = DEFAULT_MAX_DELAY

    @property
    def is_set(self) -> bool:
        """Whether there is any limit."""
        return any(limit is not None for limit in (self.max_offsets, self.max_bytes, self.min_offsets))


@dataclass(slots=True)
class Admission:
    """Applies the limits of a query, and measures the rate at which messages arrive.

    Args:
        limits: the limits of the query.
        clock: returns the time of a monotonic clock in seconds.
    """

    limits: TriggerLimits
    clock: Callable[[], float] = time.monotonic
    _last_batch: float | None = field(default=None, init=False)
    _last_ends: tuple[float, Mapping[str, int]] | None = field(default=None, init=False)
    _rate: float | None = field(default=None, init=False)

    def must_wait(self, begin: Mapping[str, int], ends: Mapping[str, int]) -> bool:
        """Whether to wait for more messages. As with Kafka, the first batch of a run does not wait."""
        now = self.clock()
        least = self.limits.min_offsets
        if (
            least is not None
            and self._last_batch is not None
            and _backlog(begin, ends) < least
            and now - self._last_batch < self.limits.max_delay.total_seconds()
        ):
            return True
        if _backlog(begin, ends):
            self._last_batch = now
        return False

    def limit(
        self, begin: Mapping[str, int], ends: Mapping[str, int], message_size: Callable[[str, int], float]
    ) -> dict[str, int]:
        """The end of the next batch, within the limits. The batch has at least one offset if any are available.

        Args:
            message_size: returns the mean size of the messages at an offset of a stream, in bytes.
        """
        most = self.limits.max_offsets
        total = _backlog(begin, ends)
        if self.limits.max_bytes is not None and total:
            size = sum(
                (end - begin[stream]) * message_size(stream, begin[stream])
                for stream, end in ends.items()
                if end > begin[stream]
            )
            if size > self.limits.max_bytes:
                by_size = max(1, int(self.limits.max_bytes * total / size))
                most = by_size if most is None else min(most, by_size)
        return dict(ends) if most is None else limited(begin, ends, most)

    def observe(self, ends: Mapping[str, int]) -> None:
        """Measure the rate at which messages arrive, from the ends of the streams."""
        now = self.clock()
        if self._last_ends is not None and now > self._last_ends[0]:
            since, last = self._last_ends
            arrived = sum(max(0, end - last[stream]) for stream, end in ends.items() if stream in last)
            self._rate = arrived / (now - since)
        self._last_ends = now, dict(ends)

    @property
    def arriving_per_second(self) -> float | None:
        """Offsets that were added per second, between the last two observations; None before the second one."""
        return None if self._rate is None else round(self._rate, 1)


def _backlog(begin: Mapping[str, int], ends: Mapping[str, int]) -> int:
    return sum(max(0, end - begin[stream]) for stream, end in ends.items())
