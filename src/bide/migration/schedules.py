"""Transfer of schedules from the schedule log of one broker to the log of another.

Each schedule is added to the other log, and then cancelled in the first one. Gates apply an operation once, however
often it is sent, and the ids of both operations are derived from the version of the schedule. So a run that was killed
between the two can be repeated, even while its operations still take effect: no schedule is lost, and none waits twice
afterwards. A schedule is cancelled only in the version that was copied. If it was changed, cancelled or delivered in
the meantime, its copy is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from hashlib import sha256
from itertools import count
from typing import Any, Final

from bide.admin.apply import check_release, exists
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.client import connect
from bide.client.schedule_methods import schedules_of
from bide.client.schedule_result import ScheduleOutcome
from bide.durations import to_milliseconds
from bide.errors import BideError, InvalidInputError
from bide.migration.lock import MigrationLock
from bide.runtime.logs import logger
from bide.schedules.entries import ScheduleAnswer, WaitingSchedule
from bide.schedules.names import ScheduleNames
from bide.schedules.records import AddSchedule, ChangeSchedule, Operation, ScheduleFilter
from bide.schedules.requests import RequestId
from bide.topology import Exchange, Queue, Topology

log = logger(__name__)

IN_FLIGHT: Final = 100
"""Schedules that are moved at the same time."""

DUE_SOON: Final = timedelta(seconds=10)
"""A schedule that is due within this time stays on the first broker, because both gates could deliver it."""

RUN_SOON: Final = timedelta(seconds=0.3)
"""The limit for cron expressions with seconds, instead of :data:`DUE_SOON`.

For an interval, the limit is a third of the interval, at least this and at most :data:`DUE_SOON`.
"""

_PAUSE: Final = 0.5
"""Seconds between two sweeps, so that the second one can move a recurring schedule whose run was due in the first."""

_FAR: Final = 253_402_214_400_000
"""The end of the year 9999: the due time of a paused schedule until it is paused on the other broker too."""

_EVERYTHING: Final = ScheduleFilter()

_MAX_REASON: Final = 300

_CRON_FIELDS: Final = 5
"""Fields of a cron expression without seconds."""


@dataclass(slots=True, kw_only=True)
class SchedulesTransferred:
    """The counts of a transfer of schedules.

    Attributes:
        moved: schedules that wait on the other broker, and no longer on the first one.
        ended: schedules that were changed, cancelled or delivered on the first broker while they were copied. Their
            copies were cancelled, except those in ``kept`` and ``repeated``.
        kept: ended schedules whose copies were changed or delivered on the other broker. Log lines name their keys.
        repeated: schedules that both brokers deliver, and recurring schedules of which both deliver a run, because it
            fell due between the copy and the cancel. Runs that the first broker had already finished are not counted.
        left: schedules that cannot be moved, and wait on the first broker, by reason.
        waiting: all schedules that wait on the first broker at the end.
        is_finished: whether the run reached its end; False if it was stopped.
    """

    moved: int = 0
    ended: int = 0
    kept: int = 0
    repeated: int = 0
    left: Counter[str] = field(default_factory=Counter)
    waiting: int = 0
    is_finished: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON."""
        return {
            "moved": self.moved,
            "ended": self.ended,
            "kept": self.kept,
            "repeated": self.repeated,
            "left": dict(self.left),
            "waiting": self.waiting,
            "finished": self.is_finished,
        }


class ScheduleTransfer:
    """Moves all schedules of a broker to another one, while gates run on both.

    A schedule keeps its key, times, rules, target and message, and a paused one stays paused. It gets a new id and a
    new version. Runs that a gate has claimed stay on the first broker.

    Args:
        url: the URL of the broker.
        to_url: the URL of the other broker or virtual host. The targets must exist there.
        progress: called with the number of moved schedules, and the number found at the start.

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
        self._exists: dict[str, asyncio.Task[bool]] = {}
        names = ScheduleNames()
        self._lock = MigrationLock(names.operations, f"the schedules ({names.operations})")

    def stop(self) -> None:
        """Start no more moves, and end when the moves under way are finished."""
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
            BrokerError: a broker cannot be reached, or refuses, or the connection with the lock was lost. Run a new
                transfer.
        """
        async with AsyncExitStack() as stack:
            self._locked = await Connection.open(replace(self._url, name=f"{self._url.name} (transfer)"))
            stack.push_async_callback(self._locked.close)
            check_release(self._locked)
            await self._lock.take(await self._locked.channel())
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
            await self._lock.release(self._locked)
        return self.done

    async def _sweep(self) -> int:
        """Move the schedules that wait now, and return how many were moved or had ended."""
        before = self.done.moved + self.done.ended
        self.done.left.clear()
        room = asyncio.Semaphore(IN_FLIGHT)
        errors = list[BideError]()

        async def move(found: WaitingSchedule) -> None:
            try:
                await self._move(found)
            except BideError as error:
                errors.append(error)
            finally:
                room.release()

        # After an error, the moves under way continue: a move that stops between copy and cancel leaves two schedules.
        async with asyncio.TaskGroup() as moves:
            try:
                async with aclosing(self._from.entries(_EVERYTHING, bodies=True)) as listed:
                    async for found in listed:
                        await room.acquire()
                        if errors or self._locked.lost.done() or self._stopping.is_set():
                            break
                        moves.create_task(move(found))
            except BideError as error:
                errors.append(error)
        if self._locked.lost.done():
            errors.insert(0, self._locked.lost.result())
        if errors:
            raise errors[0]
        return self.done.moved + self.done.ended - before

    def _is_soon(self, found: WaitingSchedule) -> bool:
        return not found.is_paused and found.due < to_milliseconds(self._from.now() + _margin(found))

    async def _move(self, found: WaitingSchedule) -> None:
        try:
            await self._check_target(found)
            # Checked after the target, because that check may have waited for the other broker.
            if self._is_soon(found):
                return
            version = await self._add(found)
        except InvalidInputError as error:
            self.done.left[str(error)[:_MAX_REASON]] += 1
            return
        answer = await self._cancel(found)
        # "forgotten": the cancel was repeated after more than an hour, as on a computer that was asleep. The schedule
        # may have been cancelled the first time, so the copy is kept.
        if answer.outcome in ("cancelled", "forgotten"):
            self.done.moved += 1
            self.done.repeated += found.occurrence in answer.under_way
        else:
            self.done.ended += 1
            await self._take_back(found.key, version, answer)
        if self._progress is not None:
            self._progress(self.done.moved, max(self._total, self.done.moved))

    async def _take_back(self, key: str, version: str, ending: ScheduleAnswer) -> None:
        """Cancel the copy of a schedule that was changed, cancelled or delivered on the first broker."""
        outcome = (await self._to.change("cancel", key, if_version=version)).outcome
        if outcome is ScheduleOutcome.TOO_LATE and ending.outcome == "too-late":
            self.done.repeated += 1
        elif outcome in (ScheduleOutcome.TOO_LATE, ScheduleOutcome.CHANGED):
            self.done.kept += 1
            log.warning(
                "the schedule %r was %s on the other broker during its move, and its cancel on the first broker was "
                "answered with %r: check both brokers",
                key,
                "changed" if outcome is ScheduleOutcome.CHANGED else "delivered",
                ending.outcome,
            )

    async def _cancel(self, found: WaitingSchedule) -> ScheduleAnswer:
        """Cancel a schedule on the first broker in the version that was copied.

        The id of this operation is the same in every run. So if the cancel of an earlier run took effect after the
        schedule was listed, the answer is still that the schedule was cancelled, and the copy is kept.
        """
        record = ChangeSchedule(
            request=RequestId(_session(found, 0), 4), action="cancel", key=found.key, if_version=found.version
        )
        return await self._from.append(record, f"cancelling {found.key!r}")

    async def _add(self, found: WaitingSchedule) -> str:
        """Add a schedule to the other log, and return the version of the copy.

        Raises:
            InvalidInputError: the schedule cannot be added.
        """
        for attempt in count():
            records = _records(found, attempt)
            version = str(records[-1].request)
            answers = [await self._to.append(one, f"adding the schedule {found.key!r}") for one in records]
            if not {one.outcome for one in answers} - {"scheduled", "paused", "moved"}:
                return version
            waiting = await self._to.view(found.key)
            if waiting is not None and waiting.version == version:
                return version
            if answers[0].outcome != "exists":
                raise InvalidInputError(
                    "an earlier transfer copied the schedule, and the copy was delivered, cancelled or changed there: "
                    "cancel the schedule on the first broker, or move it there and run the transfer again"
                )
            if waiting is not None and waiting.version is not None:
                raise InvalidInputError(
                    "another schedule waits under this key on the other broker: cancel one of the two"
                )
            # The operation was answered in an earlier run, and the schedule that existed then is gone: use new ids.
        raise AssertionError

    async def _check_target(self, found: WaitingSchedule) -> None:
        """Check that the target of a schedule exists on the other broker. Each target is checked once.

        Raises:
            InvalidInputError: the target does not exist.
        """
        if found.target not in self._exists:
            self._exists[found.target] = asyncio.create_task(self._target_exists(found.target))
        if not await self._exists[found.target]:
            kind, _, name = found.target.partition(":")
            raise InvalidInputError(
                f"the {'queue' if kind == 'q' else 'exchange'} {name!r} does not exist on the virtual host "
                f"{self._to_url.vhost!r} of the other broker"
            )

    async def _target_exists(self, target: str) -> bool:
        kind, _, name = target.partition(":")
        topology = Topology(queues=[Queue(name)]) if kind == "q" else Topology([Exchange(name)])
        return await exists(self._targets, topology)


def _records(found: WaitingSchedule, attempt: int) -> list[Operation]:
    """The operations that copy a schedule, with the same ids in every run.

    A schedule cannot be added as paused. So a paused schedule is added with a due time that no gate reaches, then
    paused, and then moved to its due time.
    """
    first, second, third = (RequestId(_session(found, attempt), number) for number in (1, 2, 3))
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


def _margin(found: WaitingSchedule) -> timedelta:
    """How long before its due time a schedule is no longer moved."""
    if found.recurrence is None:
        return DUE_SOON
    interval = found.recurrence.get("interval")
    if interval is not None:
        return max(RUN_SOON, min(DUE_SOON, timedelta(milliseconds=interval) / 3))
    has_seconds = len(str(found.recurrence.get("cron")).split()) > _CRON_FIELDS
    return RUN_SOON if has_seconds else DUE_SOON


def _session(found: WaitingSchedule, attempt: int) -> str:
    return sha256(f"transfer {found.version} {attempt}".encode()).hexdigest()[:20]
