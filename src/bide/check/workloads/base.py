"""The base classes of workloads: pace, messages, publishing and receiving."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Final

from bide.check.processes import CommandProcess
from bide.check.recorder import Draft, Recorder
from bide.client.client import Client
from bide.delay.protocol import DelayInfrastructure
from bide.errors import (
    BideError,
    DeliveryLostError,
    InvalidInputError,
    PublishError,
    PublishInDoubtError,
    PublishRefusedError,
    TargetNotFoundError,
    UnroutableError,
    UnsentError,
)
from bide.topology import Queue, Topology

PREFETCH: Final = 500
_MAX_IN_FLIGHT: Final = 2_000
_MAX_BODY: Final = 300
_STEP: Final = 50
"""Milliseconds. Delays are multiples of this value, so that a ``Clock`` needs few queues."""

_REFUSED: Final = (InvalidInputError, PublishRefusedError, TargetNotFoundError, UnroutableError, UnsentError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The surroundings of a workload: broker, client, recorder and limits.

    Attributes:
        url: the AMQP URL with all nodes.
        management_url: the URL of the management API of one node; None for the default one of *url*.
        rate: messages per second of this workload.
        longest: the longest delay of a message.
        ending: set when the workload has to stop sending.
        folder: the folder for logs and state of gates and relays.
    """

    url: str
    management_url: str | None
    client: Client
    infrastructure: DelayInfrastructure
    recorder: Recorder
    rng: random.Random
    rate: float
    longest: timedelta
    ending: asyncio.Event
    folder: Path


class CheckWorkload(ABC):
    """Messages of one kind.

    Attributes:
        name: the name on the command line and in the history.
        processes: the gates or relays that the workload needs. Faults may kill them.
    """

    name: ClassVar[str]

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.processes: list[CommandProcess] = []
        self._sent = 0

    @property
    def queues(self) -> Sequence[str]:
        """The queues that the workload receives from."""
        return [f"check.{self.name}.{number}" for number in range(3)]

    def topology(self) -> Topology:
        """The topology that the workload declares."""
        return Topology(queues=[Queue.quorum(name) for name in self.queues])

    @abstractmethod
    async def send(self) -> None:
        """Send at the rate of the stage until ``ending`` is set, and record the results."""

    async def receive(self) -> None:
        """Receive from all queues until this coroutine is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for queue in self.queues:
                tasks.create_task(self.receive_from(queue))

    async def receive_from(self, queue: str) -> None:
        """Receive from a queue until this coroutine is cancelled."""
        async with self.stage.client.consume(queue, prefetch=PREFETCH) as messages:
            async for message in messages:
                self.stage.recorder.add_delivered(message, queue)
                try:
                    await message.ack()
                except DeliveryLostError:
                    continue

    async def prepare(self) -> None:  # noqa: B027 (optional)
        """Fill ``processes``, before they are started."""

    async def warm_up(self) -> None:  # noqa: B027 (optional)
        """Wait until the processes work, before the first fault."""

    async def finish(self) -> None:  # noqa: B027 (optional)
        """Let blocked messages arrive, after the last message was sent."""

    async def close(self) -> None:  # noqa: B027 (optional)
        """End what the workload started, also after an error."""

    @classmethod
    def missing(cls) -> str | None:
        """What this machine lacks for the workload, and how to install it, in one sentence; None if nothing."""
        return None

    async def pace(self) -> AsyncIterator[int]:
        """Yield message numbers at the rate of the stage, without catching up after a pause."""
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        while not self.stage.ending.is_set():
            yield self._sent
            self._sent += 1
            next_at = max(next_at + 1 / self.stage.rate, loop.time())
            await asyncio.sleep(next_at - loop.time())  # the rate of the plan

    def random_delay(self) -> timedelta:
        """A delay from 50 ms to the longest delay of the stage."""
        steps = self.stage.longest // timedelta(milliseconds=_STEP)
        return timedelta(milliseconds=_STEP * self.stage.rng.randint(1, steps))

    def draft(self, number: int, *, routing_key: str = "", suffix: str = "") -> Draft:
        """A message with a random body and random headers."""
        rng = self.stage.rng
        headers: dict[str, Any] = {"check-number": number, "check-text": f"ü{rng.randrange(1_000_000)}"}
        return self.stage.recorder.draft(
            f"{self.stage.recorder.run}-{self.name}-{number}{suffix}",
            self.name,
            rng.randbytes(rng.randint(0, _MAX_BODY)),
            headers,
            routing_key=routing_key,
        )


class SingleMessageWorkload(CheckWorkload):
    """Messages of one kind that are sent one by one."""

    async def send(self) -> None:
        """Send at the rate of the stage until ``ending`` is set, and record the results."""
        slots = asyncio.Semaphore(_MAX_IN_FLIGHT)
        async with asyncio.TaskGroup() as tasks:
            async for number in self.pace():
                await slots.acquire()
                tasks.create_task(self.send_one(number)).add_done_callback(lambda _: slots.release())

    @abstractmethod
    async def send_one(self, number: int) -> None:
        """Send a message, and record its result."""

    async def publish(
        self,
        draft: Draft,
        places: Sequence[str],
        *,
        role: str = "message",
        client: Client | None = None,
        **target: Any,
    ) -> None:
        """Publish a message with the arguments *target*, and record its result."""
        recorder = self.stage.recorder
        try:
            receipt = await (client or self.stage.client).publish(
                draft.body, headers=draft.headers, message_id=draft.id, **target
            )
        except BideError as error:
            name, expected = type(error).__name__, expected_after(error)
            recorder.add_sent(draft, places, outcome=name, expected=expected, role=role, is_call=True)
        else:
            recorder.add_sent(
                draft,
                places,
                outcome="confirmed",
                expected="delivered",
                due=receipt.due,
                attempts=receipt.attempts,
                role=role,
                is_call=True,
            )


def expected_after(error: BideError) -> str:
    """What to expect after a publish raised this error: ``nothing`` arrives, or the result is ``unknown``."""
    is_refused = isinstance(error, _REFUSED) or type(error) is PublishError  # no subclass: it was not sent in time
    return "nothing" if is_refused and not isinstance(error, PublishInDoubtError) else "unknown"
