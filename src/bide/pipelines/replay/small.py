"""Choice of the messages of a replay, in this process.

The messages and their due times are those that :mod:`bide.pipelines.replay.run` computes with Spark.
"""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import floor

from bide.client.sync import connect_sync
from bide.durations import MICROSECOND, from_microseconds, to_microseconds
from bide.error_queues import ErrorQueue
from bide.pipelines.replay.condition import TextCondition
from bide.pipelines.replay.queue import FailedIn, key_of


@dataclass(frozen=True, slots=True)
class ChosenMessage:
    """A message of an error queue.

    Attributes:
        key: the key; see :func:`bide.pipelines.replay.queue.key_of`.
        queue: the queue on which it failed; None if unknown.
    """

    key: str
    queue: str | None


def choose(
    source: FailedIn, *, condition: TextCondition | None = None, limit: int | None = None
) -> list[ChosenMessage]:
    """Choose messages of an error queue, in its order; they remain in the queue.

    Raises:
        BrokerError: the broker cannot be reached, or refuses.
    """

    async def browse() -> list[ChosenMessage]:
        found: list[ChosenMessage] = []
        queue = ErrorQueue(client.client, source.queue, management_url=source.management_url, audit=False)
        async with aclosing(queue.messages()) as messages:
            async for one in messages:
                if condition is None or condition.holds(one):
                    found.append(ChosenMessage(key_of(one), one.queue))
                if limit is not None and len(found) == limit:
                    break
        return found

    with connect_sync(source.url, declare=False) as client:
        return client.wait_for(browse())


def spread(count: int, over: timedelta, *, begin: datetime) -> list[int]:
    """Due times that are spread evenly, in microseconds since the Unix epoch."""
    start, length = to_microseconds(begin), over // MICROSECOND
    return [start + floor(length * (number / count)) for number in range(count)]


def due_times(dues: list[int], every: timedelta) -> list[tuple[datetime, int]]:
    """Count messages by due time; see :func:`bide.pipelines.schedule.run.due_times`."""
    width = every // MICROSECOND
    counts = Counter(due - due % width for due in dues)
    return [(from_microseconds(due), count) for due, count in sorted(counts.items())]
