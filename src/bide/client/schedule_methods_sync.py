"""The methods of a synchronous client for schedules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

from bide.client.schedule_methods import ScheduleMethods
from bide.durations import DelayLike, DueTimeLike
from bide.messages.outgoing import takes
from bide.schedules.outgoing import OutgoingSchedule, ScheduleConditions, ScheduleListing, ScheduleMove

if TYPE_CHECKING:
    from bide.client.schedule_result import FilterResult, Scheduled, ScheduleResult, ScheduleView

_BATCH: Final = 100
"""The number of schedules that are passed from the client's thread to the caller's thread at once."""

_Result = TypeVar("_Result")


class SyncScheduleMethods(ABC):
    """The methods of :class:`bide.Client` for schedules, blocking."""

    @property
    @abstractmethod
    def client(self) -> ScheduleMethods:
        """The client that does the work."""

    @abstractmethod
    def wait_for(self, work: Coroutine[Any, Any, _Result], timeout: DelayLike | None = None) -> _Result:
        """Run a coroutine in the client's thread."""

    @takes(OutgoingSchedule)
    def schedule(self, schedule: OutgoingSchedule) -> Scheduled:
        """See :meth:`bide.Client.schedule`."""
        return self.wait_for(self.client._schedule(schedule))  # noqa: SLF001 (of the asynchronous client)

    def reschedule(
        self,
        key: str,
        *,
        delay: DelayLike | None = None,
        deliver_at: DueTimeLike | None = None,
        if_version: str | None = None,
    ) -> ScheduleResult:
        """See :meth:`bide.Client.reschedule`."""
        return self.wait_for(self.client.reschedule(key, delay=delay, deliver_at=deliver_at, if_version=if_version))

    def cancel(self, key: str, *, if_version: str | None = None) -> ScheduleResult:
        """See :meth:`bide.Client.cancel`."""
        return self.wait_for(self.client.cancel(key, if_version=if_version))

    def pause(self, key: str, *, if_version: str | None = None) -> ScheduleResult:
        """See :meth:`bide.Client.pause`."""
        return self.wait_for(self.client.pause(key, if_version=if_version))

    def resume(self, key: str, *, if_version: str | None = None) -> ScheduleResult:
        """See :meth:`bide.Client.resume`."""
        return self.wait_for(self.client.resume(key, if_version=if_version))

    def run_now(self, key: str, *, if_version: str | None = None) -> ScheduleResult:
        """See :meth:`bide.Client.run_now`."""
        return self.wait_for(self.client.run_now(key, if_version=if_version))

    def scheduled(self, key: str) -> ScheduleView | None:
        """See :meth:`bide.Client.scheduled`."""
        return self.wait_for(self.client.scheduled(key))

    @takes(ScheduleListing)
    def list_scheduled(self, listing: ScheduleListing) -> Iterator[ScheduleView]:
        """See :meth:`bide.Client.list_scheduled`."""
        return self._batched(self.client._list(listing))  # noqa: SLF001 (of the asynchronous client)

    def _batched(self, views: AsyncGenerator[ScheduleView, None]) -> Iterator[ScheduleView]:
        try:
            while batch := self.wait_for(_next_batch(views)):
                yield from batch
        finally:
            self.wait_for(_close(views))

    @takes(ScheduleConditions)
    def count_scheduled(self, conditions: ScheduleConditions) -> int:
        """See :meth:`bide.Client.count_scheduled`."""
        return self.wait_for(self.client._count(conditions))  # noqa: SLF001 (of the asynchronous client)

    @takes(ScheduleConditions)
    def cancel_scheduled(self, conditions: ScheduleConditions) -> FilterResult:
        """See :meth:`bide.Client.cancel_scheduled`."""
        return self.wait_for(self.client._cancel_all(conditions))  # noqa: SLF001 (of the asynchronous client)

    @takes(ScheduleMove)
    def move_scheduled(self, move: ScheduleMove) -> FilterResult:
        """See :meth:`bide.Client.move_scheduled`."""
        return self.wait_for(self.client._move_all(move))  # noqa: SLF001 (of the asynchronous client)


async def _next_batch(views: AsyncGenerator[ScheduleView, None]) -> list[ScheduleView]:
    """The next schedules of a list: passing them between threads one by one would take longer than receiving them."""
    batch: list[ScheduleView] = []
    async for one in views:
        batch.append(one)
        if len(batch) == _BATCH:
            break
    return batch


async def _close(views: AsyncGenerator[ScheduleView, None]) -> None:
    await views.aclose()
