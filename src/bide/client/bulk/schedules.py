"""Schedules in a bulk publish: records of the schedule log, sent like messages."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from typing import Final

from bide.client.broker_state import BrokerState, too_large
from bide.client.bulk.in_flight import InFlightMessage
from bide.client.encoding import Encoded
from bide.client.publish_result import PublishResult
from bide.client.schedule_requests import ScheduleRequests, check_header_size
from bide.client.schedule_result import due_moment
from bide.delay.protocol import ExchangeTarget
from bide.errors import BideError, InvalidInputError, TargetNotFoundError, UnroutableError
from bide.messages.prepared import MessageTemplate, PreparedMessage
from bide.schedules.encoding import encode, with_reserve
from bide.schedules.names import PARTITIONS, partition_of
from bide.schedules.outgoing import NumberedSchedule, OutgoingSchedule
from bide.schedules.prepared import check_schedule
from bide.schedules.requests import RequestId

_VALUES: Final = {"delivery_mode": 2}


class BulkSchedules:
    """Makes records of the schedules of a bulk publish.

    Args:
        requests: the requests of the client, which count the room in the log and number the operations.
        now: the time in UTC.

    Attributes:
        unsent: the number of schedules that wait for room, by partition. Later ones wait behind them, so that the last
            schedule of a key wins.
        in_order: the locks of the partitions, so that the schedules of each get their room in order.
    """

    def __init__(self, requests: ScheduleRequests, now: Callable[[], datetime]) -> None:
        self.requests = requests
        self.unsent = Counter[int]()
        self.in_order = [asyncio.Lock() for _ in range(PARTITIONS)]
        self._now = now
        targets = [ExchangeTarget(requests.names.operations, str(number)) for number in range(PARTITIONS)]
        self._templates = [MessageTemplate(one, _VALUES, is_delayed=False) for one in targets]

    def check(
        self, outgoing: OutgoingSchedule, position: int, on_settled: Callable[[InFlightMessage, BideError | None], None]
    ) -> InFlightSchedule:
        """Check a schedule, and make its record.

        Raises:
            InvalidInputError: or a subclass of it, for the first field that cannot be used.
        """
        now = self._now()
        schedule = check_schedule(outgoing, now)
        if schedule.is_conditional:
            raise InvalidInputError(
                f"the schedule {schedule.key!r} has a condition, which only a gate can answer: schedule it with "
                "client.schedule(), or leave out if_absent and if_version"
            )
        partition = partition_of(schedule.key)
        number = outgoing.request if isinstance(outgoing, NumberedSchedule) else self.requests.numbered(partition)
        try:
            record = schedule.record(number, now)
            body = with_reserve(encode(record))
        except BaseException:
            self.requests.lost(partition, number)
            raise
        template = self._templates[partition]
        values = {**_VALUES, "message_id": str(number)}
        message = PreparedMessage(
            target=template.target, body=body, message_id=str(number), values=values, template=template
        )
        return InFlightSchedule(
            outgoing,
            position,
            message,
            on_settled,
            schedules=self,
            partition=partition,
            request=number,
            schedule_message_id=schedule.message.message_id,
            due=schedule.due(number),
            header_size=len(record.message.properties),
        )


class InFlightSchedule(InFlightMessage):
    """A schedule in flight: ``message`` is its record.

    Attributes:
        waits: whether it waits for room in the log.
    """

    __slots__ = (
        *("_due", "_header_size", "_partition", "_request"),
        *("_schedule_message_id", "_schedules", "waits"),
    )

    def __init__(
        self,
        outgoing: OutgoingSchedule,
        position: int,
        message: PreparedMessage,
        on_settled: Callable[[InFlightMessage, BideError | None], None],
        *,
        schedules: BulkSchedules,
        partition: int,
        request: RequestId,
        schedule_message_id: str,
        due: int,
        header_size: int,
    ) -> None:
        super().__init__(outgoing, position, message, on_settled)
        self.waits = False
        self._schedules = schedules
        self._partition = partition
        self._request = request
        self._schedule_message_id = schedule_message_id
        self._due = due
        self._header_size = header_size

    @property
    def partition(self) -> int:
        """The partition of its key."""
        return self._partition

    @property
    def mandatory(self) -> bool:
        """Records are always mandatory."""
        return True

    def is_ready(self, state: BrokerState) -> bool:
        """Whether the log has room for the record. The room is then taken."""
        assert self.message is not None
        if self.prepared_in is state:
            return True
        schedules, size = self._schedules, len(self.message.body)
        if not self.waits:
            if (
                not schedules.unsent[self._partition]
                and (state.size_limit is None or size <= state.size_limit)
                and schedules.requests.take_room(self._partition, size)
            ):
                return True
            self.waits = True
            schedules.unsent[self._partition] += 1
        return False

    async def prepare(self, state: BrokerState) -> None:
        """Find or declare the log, and take room for the record.

        Raises:
            ScheduleLogError: there is no room.
            BideError: as :meth:`bide.client.broker_state.BrokerState.prepare`.
        """
        assert self.message is not None
        requests, size = self._schedules.requests, len(self.message.body)
        if state.size_limit is not None and size > state.size_limit:
            raise too_large(self.message, state.size_limit)
        async with self._schedules.in_order[self._partition]:
            try:
                await requests.make_room(state.connection, self._partition, size)
            except (UnroutableError, TargetNotFoundError):
                # Parts of the log were deleted.
                if not requests.report_missing():
                    raise
                await requests.make_room(state.connection, self._partition, size)
        self.prepared_in = state

    def forget_preparation(self) -> None:
        """Prepare it again before its next sending: the log, or a part of it, is missing."""
        super().forget_preparation()
        self._schedules.requests.report_missing()

    def encode(self, state: BrokerState, channel: int) -> tuple[PreparedMessage, Encoded] | None:
        """Encode the record."""
        check_header_size(f"scheduling {self.outgoing.key!r}", self._header_size, state.connection.frame_max)
        return super().encode(state, channel)

    def begin(self, message: PreparedMessage, encoded: Encoded) -> bytes:
        """Record that it is being sent, and return its frames."""
        # A repeated sending takes room again.
        self.prepared_in = None
        self._wait_no_more()
        return super().begin(message, encoded)

    def is_worth_repeating(self, state: BrokerState, error: BideError) -> bool:
        """Whether to send it again once because parts of the log were deleted."""
        is_first = isinstance(error, UnroutableError) and not self.unroutable
        self.unroutable = self.unroutable or is_first
        return is_first and self._schedules.requests.report_missing()

    def give_up(self) -> None:
        """Count its number as lost: it may be missing in the log."""
        self._wait_no_more()
        self._schedules.requests.lost(self._partition, self._request)

    def result(self) -> PublishResult:
        """The result for the caller."""
        due = due_moment(self._due) if self.attempts else None
        return PublishResult(
            self.outgoing,
            self.position,
            self._schedule_message_id,
            due,
            self.attempts,
            self.error,
            None if self.error is not None else str(self._request),
        )

    def _wait_no_more(self) -> None:
        if self.waits:
            self.waits = False
            self._schedules.unsent[self._partition] -= 1
