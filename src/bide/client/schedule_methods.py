"""The methods of a client for schedules."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import TYPE_CHECKING

from bide.client.publisher import Publisher, Stamp
from bide.durations import DelayLike, DueTimeLike
from bide.errors import InvalidInputError
from bide.messages.outgoing import takes
from bide.schedules.outgoing import OutgoingSchedule, ScheduleConditions, ScheduleListing, ScheduleMove

if TYPE_CHECKING:
    from bide.client.bulk.schedules import BulkSchedules
    from bide.client.schedule_result import FilterResult, Scheduled, ScheduleResult, ScheduleView
    from bide.client.schedules import Schedules
    from bide.schedules.records import ScheduleFilter


class ScheduleMethods:
    """Schedule messages that can be cancelled, replaced, moved and listed by a key, while a gate is running."""

    _publisher: Publisher
    _stamp: Stamp | None
    _schedules: Schedules | None = None

    @property
    def _on_schedules(self) -> Schedules:
        if self._schedules is None:
            # Imported here, so that clients without schedules start fast.
            from bide.client.schedules import Schedules

            self._schedules = Schedules(self._publisher)
        return self._schedules

    def _bulk_schedules(self) -> BulkSchedules:
        """The schedules of a bulk publish."""
        from bide.client.bulk.schedules import BulkSchedules

        schedules = self._on_schedules
        return BulkSchedules(schedules.requests, schedules.now)

    @takes(OutgoingSchedule)
    async def schedule(self, schedule: OutgoingSchedule) -> Scheduled:
        """Schedule a message under a key, in place of the schedule that waits under it, if any. The parameters are the
        fields of :class:`bide.OutgoingSchedule`.

        ::

            await client.schedule(json=invoice, key="invoice:42", to="reminders", delay="3d")
            await client.schedule(json={}, key="digest", to="mail", every="0 8 * * MON-FRI", time_zone="Europe/Berlin")

        It returns when the broker has confirmed the schedule. With a condition (``if_absent`` or ``if_version``) it
        waits for the answer of a gate. A gate delivers the message at its due time. The schedule log is declared at the
        first use if it is missing.

        Raises:
            InvalidInputError: or a subclass of it; nothing was sent.
            MessageTooLargeError: the message is over the broker's limit.
            ScheduleLogError: the log has no room, because no gate has carried its state forward for a long time.
            NoGateAnswerError: no gate answered a schedule with a condition in time. The schedule is recorded, and a
                gate decides later whether the condition holds.
            PublishInDoubtError: the connection broke before the confirm, and could not be opened again in time.
            PublishError: the schedule was not sent in time, or the broker refused it.
            NotAppliedError: the schedule log is missing, and this client may not declare it.
            ClosedError: the client was closed before the schedule was sent.
            BrokerError: the broker cannot be reached, or refuses.
        """
        return await self._schedule(schedule)

    async def _schedule(self, schedule: OutgoingSchedule) -> Scheduled:
        from bide.schedules.prepared import check_schedule

        schedules = self._on_schedules
        prepared = check_schedule(schedule, schedules.now())
        if self._stamp is None:
            return await schedules.add(prepared)
        with self._stamp(prepared.message) as headers:
            return await schedules.add(prepared.stamped(headers))

    async def reschedule(
        self,
        key: str,
        *,
        delay: DelayLike | None = None,
        deliver_at: DueTimeLike | None = None,
        if_version: str | None = None,
    ) -> ScheduleResult:
        """Move the schedule under a key to another time. Its message and target stay the same. Of a recurring schedule,
        only the next run moves.

        Args:
            delay: the time until delivery, from now on.
            deliver_at: instead of a delay, the due time with a time zone.
            if_version: do nothing unless the schedule has this version.

        Returns:
            ``MOVED``, ``TOO_LATE``, ``NOT_FOUND`` or ``CHANGED``; see :class:`bide.ScheduleOutcome`.

        Raises:
            InvalidInputError: or a subclass of it; nothing was sent.
            NoGateAnswerError: the operation is recorded, and no gate answered in time. It takes effect when a gate
                reads it.
            BideError: as :meth:`schedule`.
        """
        return await self._on_schedules.change("move", key, if_version=if_version, delay=delay, deliver_at=deliver_at)

    async def cancel(self, key: str, *, if_version: str | None = None) -> ScheduleResult:
        """Cancel the schedule under a key.

        Args:
            if_version: do nothing unless the schedule has this version.

        Returns:
            ``CANCELLED``: no handler sees the message. A recurring schedule has no later run; the runs in
            ``under_way`` were claimed before. ``TOO_LATE``: the message was or will be delivered, or set aside as
            undeliverable. For ``NOT_FOUND`` and ``CHANGED``, see :class:`bide.ScheduleOutcome`.

        Raises:
            BideError: as :meth:`reschedule`.
        """
        return await self._on_schedules.change("cancel", key, if_version=if_version)

    async def pause(self, key: str, *, if_version: str | None = None) -> ScheduleResult:
        """Pause the schedule under a key: nothing is delivered until :meth:`resume`.

        Returns:
            ``PAUSED``, ``TOO_LATE``, ``NOT_FOUND`` or ``CHANGED``.

        Raises:
            BideError: as :meth:`reschedule`.
        """
        return await self._on_schedules.change("pause", key, if_version=if_version)

    async def resume(self, key: str, *, if_version: str | None = None) -> ScheduleResult:
        """Resume a paused schedule. A single message that became due meanwhile is delivered at once; runs of a
        recurring schedule that became due meanwhile are skipped.

        Returns:
            ``RESUMED``, ``TOO_LATE``, ``NOT_FOUND`` or ``CHANGED``.

        Raises:
            BideError: as :meth:`reschedule`.
        """
        return await self._on_schedules.change("resume", key, if_version=if_version)

    async def run_now(self, key: str, *, if_version: str | None = None) -> ScheduleResult:
        """Deliver the message of the schedule under a key now. For a recurring schedule, this is an additional run.

        Returns:
            ``RUNNING``, ``TOO_LATE``, ``NOT_FOUND`` or ``CHANGED``.

        Raises:
            BideError: as :meth:`reschedule`.
        """
        return await self._on_schedules.change("run-now", key, if_version=if_version)

    async def scheduled(self, key: str) -> ScheduleView | None:
        """The schedule under a key that waits or is being delivered; None if there is none.

        Raises:
            InvalidInputError: or a subclass of it; nothing was sent.
            NoGateAnswerError: no gate answered in time.
            BideError: as :meth:`schedule`.
        """
        return await self._on_schedules.view(key)

    @takes(ScheduleListing)
    def list_scheduled(self, listing: ScheduleListing) -> AsyncGenerator[ScheduleView, None]:
        """The schedules that wait and match all conditions, in the order of keys; all if there is no condition.

        The list is read page by page, so a schedule that changes meanwhile may be listed as before or after the change.

        Args:
            prefix: the start of the key.
            to: the target queue.
            exchange: the target exchange.
            due_from: due at this time or later.
            due_before: due before this time.
            bodies: whether to get the messages too.

        Raises:
            BideError: as :meth:`scheduled`.
        """
        return self._list(listing)

    def _list(self, listing: ScheduleListing) -> AsyncGenerator[ScheduleView, None]:
        if listing.bodies.__class__ is not bool:
            raise InvalidInputError(f"bodies is {listing.bodies!r}: give True or False")
        return self._on_schedules.views(_filter(listing), bodies=listing.bodies)

    @takes(ScheduleConditions)
    async def count_scheduled(self, conditions: ScheduleConditions) -> int:
        """The number of schedules that wait and match all conditions; see :meth:`list_scheduled`.

        Raises:
            BideError: as :meth:`scheduled`.
        """
        return await self._count(conditions)

    async def _count(self, conditions: ScheduleConditions) -> int:
        return await self._on_schedules.count(_filter(conditions))

    @takes(ScheduleConditions)
    async def cancel_scheduled(self, conditions: ScheduleConditions) -> FilterResult:
        """Cancel all schedules that match all conditions.

        The operation is one record in each of the eight partitions, and atomic there. ``prefix=""`` matches all keys.

        Raises:
            InvalidInputError: there is no condition, or one is invalid; nothing was sent.
            NoGateAnswerError: no gate answered for some partitions in time. The operation is recorded, and takes effect
                there when a gate reads it.
            BideError: as :meth:`reschedule`.
        """
        return await self._cancel_all(conditions)

    async def _cancel_all(self, conditions: ScheduleConditions) -> FilterResult:
        return await self._on_schedules.change_all("cancel", _filter(conditions, is_required=True))

    @takes(ScheduleMove)
    async def move_scheduled(self, move: ScheduleMove) -> FilterResult:
        """Move all schedules that match all conditions to another time; see :meth:`cancel_scheduled`.

        Raises:
            BideError: as :meth:`cancel_scheduled`.
        """
        return await self._move_all(move)

    async def _move_all(self, move: ScheduleMove) -> FilterResult:
        chosen = _filter(move, is_required=True)
        return await self._on_schedules.move_all(chosen, delay=move.delay, deliver_at=move.deliver_at)


def schedules_of(client: ScheduleMethods) -> Schedules:
    """The operations of a client on the schedule log, for other packages of bide."""
    return client._on_schedules  # noqa: SLF001 (the methods of the client are the interface for others)


def _filter(conditions: ScheduleConditions, *, is_required: bool = False) -> ScheduleFilter:
    from bide.schedules.prepared import check_filter

    given = {one.name: getattr(conditions, one.name) for one in fields(ScheduleConditions)}
    if is_required and all(one is None for one in given.values()):
        raise InvalidInputError(
            "no condition was given: give prefix=, to=, exchange=, due_from= or due_before=; prefix='' stands for all "
            "schedules"
        )
    return check_filter(**given)
