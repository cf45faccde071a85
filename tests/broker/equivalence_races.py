"""A search for cases whose outcome depends on a race, in memory.

Where two messages come to a queue at the same time by different ways, a real broker puts them in either order. And
where one comes when another expires there, it finds the queue with that one or without. Where two messages that do not
wait for each other expire at the same time in a queue, the broker dead-letters them in either order. Such a case
compares nothing, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, pairwise
from typing import Any, Final
from unittest.mock import patch

import bide.testing
from bide.amqp.connection import Connection
from bide.testing.rules.classic import ClassicQueue
from bide.testing.rules.clock import Timer
from bide.testing.rules.entry import Entry
from bide.testing.rules.message import X_DEATH, StoredMessage
from bide.testing.rules.queue import BrokerQueue
from bide.testing.rules.quorum import QuorumQueue
from bide.testing.rules.stream import StreamQueue
from tests.broker.equivalence_cases import Case
from tests.broker.equivalence_pace import VirtualTime
from tests.broker.equivalence_play import Player

FIFTH: Final = 60
"""Milliseconds. The pace does not matter here; the margins are given by it."""

_CLOSE: Final = FIFTH // 2
"""Milliseconds between two things that a real broker may do in either order."""

_RETURNED: Final = -1
"""Stands for a priority: returned messages wait in a line of their own."""


class Arrivals:
    """Messages that reached the queues, and events without a client action."""

    def __init__(self) -> None:
        self._by_queue: dict[str, list[tuple[int, str]]] = {}
        self._expiries: dict[str, set[int]] = {}
        self._expired: dict[str, list[tuple[int, int]]] = {}
        self._timers: list[int] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Write down all that comes to queues."""

        def watch(kind: type[BrokerQueue]) -> Any:
            publish = kind.publish

            def watched(queue: BrokerQueue, message: StoredMessage, publisher: object | None) -> bool:
                came = (queue._clock.milliseconds, _way(message))
                self._by_queue.setdefault(queue.name, []).append(came)
                taken = publish(queue, message, publisher)
                if _is_bounded_or_sorted(queue):
                    # Also those of which another comes before them just then, so that they do not expire.
                    due = {one.expires_at // 1000 for one in queue._ready if one.expires_at is not None}
                    self._expiries.setdefault(queue.name, set()).update(due)
                return taken

            return patch.object(kind, "publish", watched)

        take_expired = QuorumQueue._take_expired

        def watched_take_expired(queue: QuorumQueue) -> list[Entry]:
            returned = set(queue._returns)
            expired = take_expired(queue)
            if _expires_in_lines(queue):
                left = ((queue._clock.milliseconds, _RETURNED if one in returned else one.level) for one in expired)
                self._expired.setdefault(queue.name, []).extend(left)
            return expired

        run = Timer.run

        def watched_run(timer: Timer) -> None:
            self._timers.append(timer.at // 1000)
            run(timer)

        with ExitStack() as stack:
            for kind in (ClassicQueue, QuorumQueue, StreamQueue):
                stack.enter_context(watch(kind))
            stack.enter_context(patch.object(QuorumQueue, "_take_expired", watched_take_expired))
            stack.enter_context(patch.object(Timer, "run", watched_run))
            yield

    def races(self, acts: list[int]) -> bool:
        """Whether something came too close to something else.

        Args:
            acts: when the player did something, last of all empty the queues.
        """
        if any(came[-1][0] >= acts[-1] for came in self._by_queue.values()):
            # What emptying one queue sets free comes to another before or after that is emptied.
            return True
        lines: Iterator[list[tuple[int, Any]]] = chain(self._by_queue.values(), self._expired.values())
        for line in lines:
            for (earlier, one), (later, other) in pairwise(line):
                if later - earlier < _CLOSE and one != other:
                    return True
        for name, expiries in self._expiries.items():
            came_when = [when for when, _ in self._by_queue.get(name, ())]
            if any(abs(when - due) < _CLOSE for when in came_when for due in expiries):
                return True
        return any(abs(timer - act) < _CLOSE for timer in self._timers for act in acts)


def _is_bounded_or_sorted(queue: BrokerQueue) -> bool:
    """Whether it matters to what comes if something else is there still, or has expired already."""
    arguments = queue.definition.arguments
    limits = {"x-max-length", "x-max-length-bytes", "x-max-priority"}
    has_two_classes = queue.definition.type == "quorum" and (4, 0) <= queue._surroundings.release < (4, 3)
    return has_two_classes or not limits.isdisjoint(arguments)


def _expires_in_lines(queue: QuorumQueue) -> bool:
    """Whether expiries of the queue depend on the times of arrival in the broker, to the millisecond.

    From 4.3 on (``rabbit_fifo:expire_batch``), the head of each priority and the head of the returned messages expire
    at their own times. Below, only the message that would be delivered next expires, so that one order is possible.
    """
    return queue._surroundings.release >= (4, 3) and queue.dead_letter_exchange is not None


def _way(message: StoredMessage) -> str:
    """The queue that a message died in last; empty for one that was just published."""
    if message.deaths:
        return message.deaths[0].queue
    deaths = (message.properties.get("headers") or {}).get(X_DEATH)
    return str(deaths[0]["queue"]) if deaths and "time" in deaths[0] else ""


async def play_in_memory(case: Case, prefix: str, *, release: tuple[int, ...]) -> tuple[dict[str, Any], bool]:
    """The result of a case in memory, and whether it depends on a race.

    Args:
        prefix: of the names, which decide where a consistent hash exchange sends messages.
    """
    arrivals = Arrivals()
    async with bide.testing.broker(release=release) as broker:
        connection = await Connection.open(broker.url)
        pace = VirtualTime(broker, FIFTH)
        with arrivals.watched():
            seen = await Player(case, connection, pace, prefix).play()
        await connection.close()
    return seen, pace.more_to_come or arrivals.races(pace.acts)
