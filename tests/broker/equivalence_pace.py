"""The clock of a generated case: real time on RabbitMQ, virtual time in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import bide.testing


class Pace(Protocol):
    """The time that a case is played in."""

    fifth: int
    """Milliseconds of a fifth of a step."""

    async def until(self, steps: float) -> None:
        """Wait until this number of steps has passed since the beginning."""

    async def quiet(self, count: Callable[[], int]) -> None:
        """Wait until a number does not grow any more."""


class RealTime:
    """Real time.

    Attributes:
        late: seconds by which something came too late.
    """

    def __init__(self, fifth: int) -> None:
        self.fifth = fifth
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self.late = 0.0

    async def until(self, steps: float) -> None:
        """See :class:`Pace`."""
        due = self._start + steps * self.fifth * 5 / 1000
        pause = due - self._loop.time()
        self.late = max(self.late, -pause)
        await asyncio.sleep(max(pause, 0))  # until the step is due

    async def quiet(self, count: Callable[[], int]) -> None:
        """See :class:`Pace`. What a queue holds comes in one go; only the start may take its time."""
        before = -1
        await asyncio.sleep(self.fifth / 1000)  # for the start
        while before != count():
            before = count()
            await asyncio.sleep(self.fifth / 2000)  # for more


class VirtualTime:
    """Time of a broker in memory.

    Attributes:
        acts: when the player did something, in milliseconds.
        more_to_come: whether something would have happened by itself while the player looked at what there was.
    """

    def __init__(self, broker: bide.testing.MemoryBroker, fifth: int) -> None:
        self.fifth = fifth
        self._broker = broker
        self._start = broker.clock.milliseconds
        self.acts: list[int] = []
        self.more_to_come = False

    async def until(self, steps: float) -> None:
        """See :class:`Pace`."""
        await settle_down()
        due = self._start + round(steps * self.fifth * 5)
        self._broker.clock.advance(f"{max(0, due - self._broker.clock.milliseconds)}ms")
        self.acts.append(self._broker.clock.milliseconds)
        await settle_down()

    async def quiet(self, count: Callable[[], int]) -> None:
        """See :class:`Pace`."""
        await settle_down()
        clock = self._broker.clock
        due = clock.next_due
        self.more_to_come = due is not None and due < clock.now() + timedelta(milliseconds=5 * self.fifth)


async def settle_down() -> None:
    """Let everything happen that happens at once in a broker in memory and its clients: a few turns of the loop."""
    for _ in range(10):
        await asyncio.sleep(0)
