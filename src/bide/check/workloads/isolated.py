"""Delayed messages to a full queue, and to its neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar, Final

from bide.check.workloads.base import SingleMessageWorkload
from bide.topology import Queue, Topology

_BAD: Final = "check.isolated.full"
_ROOM: Final = 10
"""Messages that fit into the bad target."""

_ONE_IN: Final = 10
"""One message in this many goes to the bad target."""


class IsolatedWorkload(SingleMessageWorkload):
    """Messages to three queues (the neighbours), and isolated messages to a full queue (the bad target).

    The bad target is emptied at the end. Every hundredth message goes to it without a delay, and is refused.
    """

    name: ClassVar = "isolated"

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]  # the same parameters
        self._is_open = asyncio.Event()

    @property
    def queues(self) -> Sequence[str]:
        """The neighbours, and the bad target."""
        return [*super().queues, _BAD]

    def topology(self) -> Topology:
        """The neighbours, and a bad target with little room."""
        bad = Queue.quorum(_BAD, arguments={"x-max-length": _ROOM, "x-overflow": "reject-publish"})
        return Topology(queues=[*(Queue.quorum(name) for name in self.queues[:-1]), bad])

    async def send_one(self, number: int) -> None:
        """Send a message."""
        if number % _ONE_IN:
            queue = self.stage.rng.choice(self.queues[:-1])
            draft = self.draft(number, routing_key=queue)
            await self.publish(draft, [queue], role="neighbour", to=queue, delay=self.random_delay())
            return
        delay = self.random_delay() if number % _ONE_IN**2 else None
        draft = self.draft(number, routing_key=_BAD)
        await self.publish(draft, [_BAD], role="blocked", to=_BAD, delay=delay, isolated=delay is not None)

    async def receive_from(self, queue: str) -> None:
        """Receive from a queue, but from the bad target only at the end."""
        if queue == _BAD:
            await self._is_open.wait()
        await super().receive_from(queue)

    async def finish(self) -> None:
        """Empty the bad target."""
        self._is_open.set()
