"""The mover of schedules from the schedule log of one broker to that of another.

Each schedule is added to the other log, and then cancelled in the first one. Gates apply an operation once, however
often it is sent, and the id of the addition is made of the version of the schedule. So a run that was killed between
the two can be repeated: nothing is lost, and nothing waits twice afterwards. A schedule is cancelled only in the
version that was copied; one that was changed, cancelled or delivered meanwhile is taken back from the other log.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from hashlib import sha256
from typing import Any, Final

from bide.admin.apply import check_release, exists
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.client import connect
from bide.client.schedules import schedules_of
from bide.durations import to_milliseconds
from bide.errors import BideError, InvalidInputError
from bide.migration.lock import MigrationLock
from bide.schedules.entries import ScheduleAnswer, WaitingSchedule
from bide.schedules.names import ScheduleNames
from bide.schedules.records import AddSchedule, ChangeSchedule, Operation, ScheduleFilter
from bide.schedules.requests import RequestId
from bide.topology import Exchange, Queue, Topology

IN_FLIGHT: Final = 100
"""Schedules that are moved at the same time."""

DUE_SOON: Final = timedelta(seconds=10)
"""Schedules that are due earlier are left to the first broker: both gates could deliver them."""

RUN_SOON: Final = timedelta(seconds=0.3)
"""The same for recurring schedules, which may have a run every second."""

_PAUSE: Final = 0.5
"""Seconds between two sweeps, so that a recurring schedule with a run just now is not missed twice."""

_FAR: Final = 253_402_214_400_000
"""The end of the year 9999: the due time of a paused schedule until it is paused on the other broker too."""

_EVERYTHING: Final = ScheduleFilter()

_MAX_REASON: Final = 300


@dataclass(slots=True, kw_only=True)
class SchedulesTransferred:
    """The counts of a transfer of schedules.

    Attributes:
        moved: schedules that wait on the other broker, and no longer on the first one.
        ended: schedules that were changed, cancelled or delivered on the first broker while they were copied. The copy
            was cancelled.
        repeated: schedules that both brokers delivered.
        left: schedules that cannot be moved, and wait on the first broker, by reason.
        waiting: all schedules that wait on the first broker at the end.
        is_finished: whether the run reached its end; False if it was stopped.
    """

    moved: int = 0
    ended: int = 0
    repeated: int = 0
    left: Counter[str] = field(default_factory=Counter)
    waiting: int = 0
    is_finished: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON."""
        return {
            "moved": self.moved,
            "ended": self.ended,
            "repeated": self.repeated,
            "left": dict(self.left),
            "waiting": self.waiting,
            "finished": self.is_finished,
        }


class ScheduleTransfer:
    """Moves all schedules of a broker to another one, while gates run on both.

    A schedule keeps its key, times, rules, target and message, and stays paused if it is. It gets a new id and a new
    version. Runs that a gate has claimed stay where they are.

    Args:
        url: the URL of the broker.
        to_url: the URL of the other broker or virtual host. The targets must exist there.
        progress: called with the number of moved schedules, and the number of all that were found.

    Attributes:
        done: the counts so far.
    """

    def __init__(
        self, url: str | BrokerUrl, to_url: str | BrokerUrl, *, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self.done = SchedulesTransferred()
        self._url = url if isinstance(url, BrokerUrl) else BrokerUrl.parse(url)
        self._to_url = to_url if isinstance(to_url, BrokerUrl) else BrokerUrl.parse(to_url)
        self._progress = progress
        self._total = 0
        self._stopping = asyncio.Event()
        self._missing: dict[str, asyncio.Task[str | None]] = {}
        names = ScheduleNames()
        self._lock = MigrationLock(names.operations, f"the schedules ({names.operations})")

    def stop(self) -> None:
        """Begin no more moves, and end when those that were begun are finished."""
        self._stopping.set()

    async def count(self) -> int:
        """The number of schedules that wait on the first broker.

        Raises:
            BideError: as :meth:`run`.
        """
        async with connect(self._url, declare=False) as client:
            return await schedules_of(client).count(_EVERYTHING)

    async def run(self) -> SchedulesTransferred:
        """Move the schedules, and return the counts. Call it once.

        Raises:
            MigrationRunningError: another transfer of these schedules runs.
            InvalidInputError: both URLs lead to the same virtual host.
            NotAppliedError: the first broker has no schedule log.
            NoGateAnswerError: no gate runs on one of the brokers. Run a new transfer.
            BrokerError: a broker cannot be reached, or refuses. Run a new transfer.
        """
        async with AsyncExitStack() as stack:
            connection = await Connection.open(replace(self._url, name=f"{self._url.name} (transfer)"))
            stack.push_async_callback(connection.close)
            check_release(connection)
            await self._lock.take(await connection.channel())
            await self._lock.refuse_same(self._to_url)
            self._targets = await Connection.open(replace(self._to_url, name=f"{self._to_url.name} (targets)"))
            stack.push_async_callback(self._targets.close)
            source = await stack.enter_async_context(connect(self._url, declare=False))
            target = await stack.enter_async_context(connect(self._to_url))
            self._from, self._to = schedules_of(source), schedules_of(target)
            self._total = await self._from.count(_EVERYTHING)
            while await self._sweep() and not self._stopping.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _PAUSE)
            self.done.waiting = await self._from.count(_EVERYTHING)
            self.done.is_finished = not self._stopping.is_set()
        return self.done

    async def _sweep(self) -> int:
        """Move what waits now, and return the number of schedules that were moved, or changed meanwhile."""
        before = self.done.moved + self.done.ended
        self.done.left.clear()
        room = asyncio.Semaphore(IN_FLIGHT)

        async def move(found: WaitingSchedule) -> None:
            try:
                await self._move(found)
            finally:
                room.release()

        try:
            async with asyncio.TaskGroup() as moves, aclosing(self._from.entries(_EVERYTHING, bodies=True)) as listed:
                async for found in listed:
                    if self._is_soon(found):
                        continue
                    await room.acquire()
                    if self._stopping.is_set():
                        break
                    moves.create_task(move(found))
        except BaseExceptionGroup as group:
            raise _first(group) from group
        return self.done.moved + self.done.ended - before

    def _is_soon(self, found: WaitingSchedule) -> bool:
        margin = DUE_SOON if found.recurrence is None else RUN_SOON
        return not found.is_paused and found.due < to_milliseconds(self._from.now() + margin)

    async def _move(self, found: WaitingSchedule) -> None:
        what = f"the schedule {found.key!r}"
        if (problem := await self._problem(found)) is None:
            try:
                problem = await self._add(found, what)
            except InvalidInputError as error:
                problem = str(error)
        if problem is not None:
            self.done.left[problem[:_MAX_REASON]] += 1
            return
        result = await self._from.change("cancel", found.key, if_version=found.version)
        if result.outcome.value == "cancelled":
            self.done.moved += 1
        else:
            taken_back = await self._to.change("cancel", found.key, if_version=str(_last_request(found)))
            self.done.ended += 1
            self.done.repeated += taken_back.outcome.value != "cancelled"
        if self._progress is not None:
            self._progress(self.done.moved, max(self._total, self.done.moved))

    async def _add(self, found: WaitingSchedule, what: str) -> str | None:
        """Add a schedule to the other log; returns why that is not possible."""
        for record in _records(found):
            answer: ScheduleAnswer = await self._to.append(record, f"adding {what} to the other broker")
            if answer.outcome == "exists":
                return "a schedule waits under this key on the other broker: cancel one of the two"
            if answer.outcome not in ("scheduled", "paused", "moved") and not await self._is_there(found):
                return (
                    "an earlier transfer copied the schedule, and the copy was cancelled, changed or delivered there: "
                    "cancel it on the first broker, or change it there and run the command again"
                )
        return None

    async def _is_there(self, found: WaitingSchedule) -> bool:
        """Whether the copy of a schedule waits on the other broker, in its last version."""
        view = await self._to.view(found.key)
        return view is not None and view.version == str(_last_request(found))

    async def _problem(self, found: WaitingSchedule) -> str | None:
        """Why the target of a schedule cannot be used on the other broker; asked once for each target."""
        if found.target not in self._missing:
            self._missing[found.target] = asyncio.create_task(self._target_problem(found.target))
        return await self._missing[found.target]

    async def _target_problem(self, target: str) -> str | None:
        kind, _, name = target.partition(":")
        topology = Topology(queues=[Queue(name)]) if kind == "q" else Topology([Exchange(name)])
        if await exists(self._targets, topology):
            return None
        what = "queue" if kind == "q" else "exchange"
        return f"the {what} {name!r} does not exist on the virtual host {self._to_url.vhost!r} of the other broker"


def _session(found: WaitingSchedule) -> str:
    """The session of the operations that copy a version of a schedule: the same in every run."""
    return sha256(f"transfer {found.version}".encode()).hexdigest()[:20]


def _last_request(found: WaitingSchedule) -> RequestId:
    return RequestId(_session(found), 3 if found.is_paused else 1)


def _records(found: WaitingSchedule) -> list[Operation]:
    """The operations that copy a schedule.

    An addition is not paused. So a paused schedule is added with a due time that no gate reaches, paused, and moved to
    its due time.
    """
    first, second, third = (RequestId(_session(found), number) for number in (1, 2, 3))
    added = AddSchedule(
        request=first,
        key=found.key,
        target=found.target,
        routing_key=found.routing_key,
        nominal=found.nominal,
        due=_FAR if found.is_paused else found.due,
        recurrence=found.recurrence,
        if_absent=True,
        message=found.message,
    )
    if not found.is_paused:
        return [added]
    return [
        added,
        ChangeSchedule(request=second, action="pause", key=found.key, if_version=str(first)),
        ChangeSchedule(request=third, action="move", key=found.key, due=found.due, if_version=str(second)),
    ]


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group; one of ours, if there is any."""
    found = list(group.exceptions)
    return next((one for one in found if isinstance(one, BideError)), found[0])
