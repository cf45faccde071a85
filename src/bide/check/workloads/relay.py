"""Messages through a waiting hall, and the relays that pass them on."""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar, Final

from bide.check.processes import CommandProcess
from bide.check.workloads.base import SingleMessageWorkload
from bide.client.client import connect
from bide.delay.waiting_hall import WaitingHall

_RELAYS: Final = 2
_LEVELS: Final = 3


class RelayWorkload(SingleMessageWorkload):
    """Messages to three queues through a waiting hall, and two relays. Long delays take several rounds."""

    name: ClassVar = "relay"

    async def prepare(self) -> None:
        """Prepare the relays, which declare the waiting hall."""
        self._hall = WaitingHall(levels=_LEVELS)
        for number in range(1, _RELAYS + 1):
            arguments = ["relay", "--levels", str(_LEVELS), "--allow", "check.relay.*"]
            self.processes.append(CommandProcess(f"relay-{number}", arguments, self.stage.url, self.stage.folder))

    async def warm_up(self) -> None:
        """Wait until a relay passes messages on."""
        async with connect(self.stage.url, infrastructure=self._hall) as client:
            queue = self.queues[0]
            draft = self.draft(0, routing_key=queue, suffix="/warm-up")
            await self.publish(draft, [queue], client=client, role="blocked", to=queue, delay=timedelta(seconds=1))
        await self.stage.recorder.until_complete()

    async def send(self) -> None:
        """Send with a client that uses the waiting hall."""
        async with connect(self.stage.url, infrastructure=self._hall) as self._client:
            await super().send()

    async def send_one(self, number: int) -> None:
        """Send a message."""
        queue = self.stage.rng.choice(self.queues)
        draft = self.draft(number, routing_key=queue)
        await self.publish(draft, [queue], client=self._client, to=queue, delay=self.random_delay())
