"""The applications of a history: clients that schedule, change and query, and a hostile one."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import bide
from bide.client.publish_result import PublishResult
from bide.client.schedule_requests import ScheduleRequests
from bide.errors import (
    BideError,
    BulkInDoubtError,
    NoGateAnswerError,
    PublishError,
    PublishInDoubtError,
    ScheduleLogError,
)
from tests.schedule_simulation.scenario import Scenario
from tests.schedule_simulation.world import Operation, Process, World

REQUESTS: ContextVar[list[str] | None] = ContextVar("REQUESTS", default=None)
"""The ids of the requests that an operation sends."""

EXPECTED = (NoGateAnswerError, PublishInDoubtError, ScheduleLogError, PublishError)


class Applications:
    """Applications that use the same keys, and the versions of each other's schedules."""

    def __init__(self, seed: int, scenario: Scenario, world: World) -> None:
        self.seed = seed
        self.scenario = scenario
        self.world = world
        self.versions: list[str] = ["none"]

    async def work(self, process: Process, number: int) -> None:
        rng = random.Random(self.seed * 100 + number)
        async with bide.connect(process.network.url, declare=False, timeout="20s") as client:
            process.is_connected = True
            running = set[asyncio.Task[None]]()
            for place in range(self.scenario.operations // 3):
                await asyncio.sleep(rng.random() * self.scenario.pause)  # in virtual time
                if len(running) > 5:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                task = asyncio.create_task(self.operate(client, rng, f"{number}.{place}"))
                running.add(task)
                task.add_done_callback(running.discard)
            if running:
                await asyncio.wait(running)

    async def operate(self, client: bide.Client, rng: random.Random, name: str) -> None:
        key = rng.choice(self.scenario.keys)
        version = rng.choice(self.versions[-5:]) if rng.random() < 0.1 else None
        what = rng.choices(
            ("schedule", "recurring", "cancel", "move", "pause", "resume", "run_now", "filter", "look", "forge"),
            self.scenario.weights,
        )[0]
        if asyncio.get_running_loop().time() < self.world.outage_until:
            what, version = "burst", None
        if what == "forge":
            await (self.world.forge(rng) if rng.random() < 0.5 else self.world.stray(rng))
            return
        if self.scenario.has_bulk and what in ("schedule", "move", "filter") and rng.random() < 0.3:
            what = "bulk" if what == "schedule" else "move_filter"
        if what == "bulk":
            await self.call_bulk(client, rng, name)
            return
        delay = rng.random() * self.scenario.span
        if self.scenario.is_small and rng.random() < 0.01:
            # These wait for so long that retention removes their records, and nothing replaces what a gate has missed.
            key, delay = rng.choice(self.scenario.rare_keys), rng.random() * 60
        await self.call(client, rng, name, what, key, version, delay)
        if self.scenario.is_aimed and what in ("schedule", "move"):
            await asyncio.sleep(max(delay + rng.uniform(-0.07, 0.03), 0))  # in virtual time
            change = rng.choice(("cancel", "cancel", "move", "pause", "schedule"))
            await self.call(client, rng, f"{name}a", change, key, None, rng.random() * self.scenario.span)

    async def call(
        self,
        client: bide.Client,
        rng: random.Random,
        name: str,
        what: str,
        key: str,
        version: str | None,
        seconds: float,
    ) -> None:
        operation = Operation(what=what, key=key, begun=len(self.world.history))
        self.world.operations.append(operation)
        REQUESTS.set(operation.requests)
        delay = f"{seconds:.3f}s"
        body = f"{name} ".ljust(self.scenario.body_size)
        try:
            match what:
                case "schedule" | "burst":
                    operation.result = await client.schedule(
                        body,
                        key=key,
                        to=rng.choice(self.scenario.targets),
                        delay=delay,
                        if_absent=what == "schedule" and version is None and rng.random() < 0.1,
                        if_version=version,
                    )
                case "recurring":
                    first = client.now() + bide.durations.parse_delay(delay)
                    if rng.random() < 0.5:
                        # The same moment under the same key, as with cron expressions.
                        first = first.replace(microsecond=0)
                    operation.result = await client.schedule(
                        body,
                        key=key,
                        to=rng.choice(self.scenario.targets),
                        every=rng.choice(("1s", "3s", "7s")),
                        first_run=first,
                        last_run=first + bide.durations.parse_delay("20s"),
                        catch_up=rng.choice(("last", "all", "none")),
                    )
                case "move":
                    operation.result = await client.reschedule(key, delay=delay, if_version=version)
                case "filter":
                    until = client.now() + bide.durations.parse_delay(delay)
                    operation.result = await client.cancel_scheduled(
                        prefix=key, due_before=until if rng.random() < 0.7 else None
                    )
                case "move_filter":
                    since = client.now() if rng.random() < 0.3 else None
                    operation.result = await client.move_scheduled(prefix=key, due_from=since, delay=delay)
                case "look":
                    operation.result = await client.scheduled(key)
                case _:
                    operation.result = await getattr(client, what)(key, if_version=version)
        except EXPECTED as error:
            operation.error = error
            if isinstance(error, ScheduleLogError):
                # An application that is refused tries again later.
                await asyncio.sleep(rng.random() * 5)  # in virtual time
        except BideError as error:
            self.world.problems.append(f"{what} of {key} raised {error!r}")
        operation.ended = len(self.world.history)
        if isinstance(operation.result, bide.Scheduled) and operation.result.version is not None:
            self.versions.append(operation.result.version)

    async def call_bulk(self, client: bide.Client, rng: random.Random, name: str) -> None:
        """Schedule several messages at once. Each is an operation."""
        messages = [
            bide.OutgoingSchedule(
                f"{name}.{place} ".ljust(self.scenario.body_size),
                key=rng.choice(self.scenario.keys),
                to=rng.choice(self.scenario.targets),
                delay=f"{rng.random() * self.scenario.span:.3f}s",
            )
            for place in range(rng.choice((1, 3) if self.scenario.is_small else (1, 3, 20)))
        ]
        begun, results = len(self.world.history), list[PublishResult]()
        requests = list[str]()
        REQUESTS.set(requests)
        try:
            async for one in client.publish_many(messages):
                results.append(one)
        except BulkInDoubtError as error:
            results += [*error.in_doubt, *error.unsent]
        except BideError as error:
            self.world.problems.append(f"a bulk publish raised {error!r}")
            return
        for one in results:
            key = messages[one.position].key
            operation = Operation(what="bulk", key=key, begun=begun, ended=len(self.world.history))
            operation.requests.append(requests[one.position])
            operation.error = one.error
            if one.error is None:
                assert one.schedule_id is not None
                operation.result = bide.Scheduled(
                    key=key, id=one.schedule_id, version=one.schedule_id, due_time=one.due
                )
                self.versions.append(one.schedule_id)
            elif not isinstance(one.error, EXPECTED):
                self.world.problems.append(f"bulk of {key} raised {one.error!r}")
            self.world.operations.append(operation)
        if len(results) != len(messages):
            self.world.problems.append(f"a bulk publish of {len(messages)} had {len(results)} results")
        if any(isinstance(one.error, ScheduleLogError) for one in results):
            await asyncio.sleep(rng.random() * 5)  # in virtual time


def note_requests(stack: ExitStack) -> None:
    """Append the ids of requests to :data:`REQUESTS` until the stack is closed."""
    append, numbered = ScheduleRequests.append, ScheduleRequests.numbered

    async def noting(self: ScheduleRequests, partition: int, what: str, make: Any, *, needs_answer: bool) -> Any:
        requests = REQUESTS.get()

        def noted(request: Any) -> Any:
            if requests is not None:
                requests.append(str(request))
            return make(request)

        return await append(self, partition, what, noted, needs_answer=needs_answer)

    def numbering(self: ScheduleRequests, partition: int) -> Any:
        number = numbered(self, partition)
        requests = REQUESTS.get()
        if requests is not None:
            requests.append(str(number))
        return number

    stack.enter_context(patch.object(ScheduleRequests, "append", noting))
    stack.enter_context(patch.object(ScheduleRequests, "numbered", numbering))
