"""Operations and questions about schedules, sent until they are confirmed or answered."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, Final

from bide.admin.schedule_log import declare_schedule_log, ensure_schedule_log
from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.client.channel_closure import ChannelClosure
from bide.client.gate_check import GateCheck
from bide.client.publisher import Publisher
from bide.client.schedule_channel import ScheduleChannel
from bide.client.schedule_request import ScheduleRequest
from bide.client.schedule_room import ScheduleRoom
from bide.errors import (
    BideError,
    ConnectionLostError,
    InvalidInputError,
    MessageTooLargeError,
    PublishError,
    ScheduleLogError,
    TargetNotFoundError,
    UnroutableError,
)
from bide.messages.prepared import new_message_id
from bide.patterns.rpc import DIRECT_REPLY_TO
from bide.runtime.logs import logger
from bide.schedules.answers import decode_answer
from bide.schedules.encoding import RESERVE, encode, with_reserve
from bide.schedules.entries import ScheduleAnswer
from bide.schedules.names import PARTITIONS, ScheduleNames
from bide.schedules.questions import QuestionAnswer, ScheduleQuestion, decode_question_answer, encode_question
from bide.schedules.records import AddSchedule, Operation
from bide.schedules.requests import RequestId

log = logger(__name__)

REPEAT_AFTER: Final = 2.0
"""Seconds without a confirm, or an answer that is needed, after which a request is sent again. Gates apply it once."""

MAX_LOST: Final = 100
"""Lost numbers after which a session ends. Gates keep the applied numbers of a session as at most 1,000 ranges."""

_MAX_CLOSURES: Final = 3
"""The maximum number of attempts of a request if its channel is closed for a reason that names no request."""

_QUESTION_EXPIRATION: Final = str(int(REPEAT_AFTER * 1000))
"""Milliseconds. A question is repeated, so an old one need not wait for a gate."""


class _Session:
    """Numbers the operations of this client on one partition."""

    def __init__(self) -> None:
        self._name = ""
        self._number = 0
        self._lost = MAX_LOST

    def next(self) -> RequestId:
        """The next id."""
        if self._lost >= MAX_LOST:
            self._name, self._number, self._lost = os.urandom(10).hex(), 0, 0
        self._number += 1
        return RequestId(self._name, self._number)

    def lost(self, request: RequestId) -> None:
        """Count a number that may never arrive."""
        self._lost += request.session == self._name


class ScheduleRequests:
    """Sends operations and questions on channels of the publishing connection, any number at the same time.

    Args:
        declare: whether to declare the schedule log if it is missing.

    Attributes:
        names: the names of the log.
    """

    def __init__(self, publisher: Publisher, names: ScheduleNames, *, declare: bool) -> None:
        self.names = names
        self._publisher = publisher
        self._declare = declare
        self._sessions = [_Session() for _ in range(PARTITIONS)]
        self._rooms = [ScheduleRoom(names, number) for number in range(PARTITIONS)]
        self._waiting: dict[str, ScheduleRequest] = {}
        # Channels by partition: the records of each partition have their own. The channel of None is for the rest.
        self._links: dict[int | None, ScheduleChannel] = {}
        self._opening = asyncio.Lock()
        self._is_missing = False
        self._is_checked = False
        self._gate_check = GateCheck(names)
        self._size_limit: int | None = None

    async def append(
        self,
        partition: int,
        what: str,
        make: Callable[[RequestId], Operation],
        *,
        needs_answer: bool,
        number: RequestId | None = None,
    ) -> tuple[RequestId, ScheduleAnswer | None]:
        """Append an operation to the log of a partition, at least once; gates apply it once.

        Args:
            what: the operation, for errors.
            make: returns the operation for an id.
            needs_answer: whether to wait until a gate has answered, not only for the confirm.
            number: the id, if the caller has chosen it; None takes the next one.

        Returns:
            The id, and the answer. The answer is None if the operation was confirmed and needs none.

        Raises:
            InvalidInputError: the operation cannot be encoded; nothing was sent.
            MessageTooLargeError: the broker does not accept records of this size.
            ScheduleLogError: the log takes no more until a gate has carried its state forward.
            NoGateAnswerError: the operation is recorded, and no gate answered in time.
            PublishInDoubtError: the operation was sent and not confirmed in time.
            PublishError: the operation was not sent in time, or the broker refused it.
            NotAppliedError: the log is missing and may not be declared.
            ClosedError: the client was closed before the operation was sent.
            BrokerError: the broker cannot be reached, or refuses.
        """
        session = self._sessions[partition]
        number = number or session.next()
        request: ScheduleRequest | None = None
        try:
            record = make(number)
            body = encode(record)
            values = {"delivery_mode": 2}
            request = self._request(what, str(number), partition, str(partition), values, with_reserve(body))
            request.is_recorded, request.needs_answer = True, needs_answer
            request.header_size = len(record.message.properties) if isinstance(record, AddSchedule) else 0
            answer = await self._run(request)
        finally:
            if request is None or request.is_lost:
                session.lost(number)
        return number, None if answer is None else decode_answer(answer.body)

    def numbered(self, partition: int) -> RequestId:
        """The id of the next operation on a partition, for a caller that sends it itself."""
        return self._sessions[partition].next()

    def lost(self, partition: int, request: RequestId) -> None:
        """Count an id that may never arrive."""
        self._sessions[partition].lost(request)

    def take_room(self, partition: int, size: int) -> bool:
        """Take room for a record at once; returns whether there was enough."""
        return not self._is_missing and self._rooms[partition].take_now(size)

    async def make_room(self, connection: Connection, partition: int, size: int) -> None:
        """Find or declare the log, and take room for a record.

        Raises:
            ScheduleLogError: the log takes no more.
            UnroutableError: the room queue is missing.
            BideError: as for :meth:`append`.
        """
        link = await self._open(connection)
        await connection.writable()
        await self._rooms[partition].take(link.channel, size)
        await self._gate_check.check(connection, partition)

    def report_missing(self) -> bool:
        """Let parts of the log that were deleted be declared again; returns whether that is allowed."""
        self._is_missing = self._is_missing or self._declare
        return self._declare

    async def ask(self, partition: int, what: str, question: ScheduleQuestion) -> QuestionAnswer:
        """Ask the leading gate of a partition. The answer contains everything that was confirmed before.

        Raises:
            NoGateAnswerError: no gate answered in time.
            ScheduleRecordError: a gate of another release answered.
            BideError: as for :meth:`append`.
        """
        values = {"delivery_mode": 1, "expiration": _QUESTION_EXPIRATION}
        body = encode_question(question)
        request = self._request(what, new_message_id(), partition, f"queries.{partition}", values, body)
        answer = await self._run(request)
        assert answer is not None
        return decode_question_answer(answer.body)

    def _request(
        self, what: str, request_id: str, partition: int, routing_key: str, values: dict[str, Any], body: bytes
    ) -> ScheduleRequest:
        return ScheduleRequest(
            what=what,
            id=request_id,
            partition=partition,
            routing_key=routing_key,
            values={**values, "message_id": request_id, "correlation_id": request_id},
            body=body,
            is_recorded=False,
            needs_answer=True,
            answer=asyncio.get_running_loop().create_future(),
        )

    async def _run(self, request: ScheduleRequest) -> Delivery | None:
        """Send a request until its result is known."""
        self._check_size(request)
        self._waiting[request.id] = request
        seconds = self._publisher.timeout.total_seconds()
        try:
            async with asyncio.timeout(seconds):
                while not request.is_done:
                    await self._attempt(request)
        except TimeoutError as error:
            if request.is_done:
                # The result came while the client looked for a gate.
                return request.answer.result() if request.answer.done() else None
            link = self._links.get(None)
            blocked = link.connection.blocked_by if link is not None else None
            reason = "" if blocked is None else f"the broker blocks publishing at the moment: {blocked}"
            raise request.out_of_time(seconds, reason) from error
        finally:
            del self._waiting[request.id]
        return request.answer.result() if request.answer.done() else None

    async def _attempt(self, request: ScheduleRequest) -> None:
        """Send a request once, and wait for its result until it should be sent again."""
        connection, link, before = None, None, request.attempts
        try:
            connection = await self._publisher.connection()
            check_header_size(request.what, request.header_size, connection.frame_max)
            link = await self._open(connection)
            await connection.writable()
            if request.is_recorded:
                await self._rooms[request.partition].take(link.channel, len(request.body))
                link = await self._open(connection, request.partition)
            values = request.values
            if request.needs_answer or request.attempts:
                values = {**values, "reply_to": DIRECT_REPLY_TO}
            confirm = link.channel.publish(
                exchange=self.names.operations, routing_key=request.routing_key, values=values, body=request.body
            )
            request.attempts += 1
            request.confirms.add(confirm)
            request.reason = "the broker has not confirmed it"
            await self._wait(request, link)
            if not request.answer.done():
                await self._gate_check.check(connection, request.partition)
        except BideError as error:
            if request.is_done:
                log.debug("looking for a gate failed: %s", error)
                return
            request.reason = str(error)
            was_sent = request.attempts > before
            if was_sent and link is not None and isinstance(error, UnroutableError):
                link.channel.abandon()
            request.refusals += was_sent and isinstance(error, PublishError)
            final = self._final_error(request, connection, link, error)
            if final is not None:
                raise final from (error if final is not error else error.__cause__)
        if not request.is_done:
            log.debug("%s is sent again: %s", request.what, request.reason)

    async def _wait(self, request: ScheduleRequest, link: ScheduleChannel) -> None:
        """Wait for the confirm, and for the answer if it is needed.

        Raises:
            BideError: the broker refused the request, or closed the channel before a confirm.
        """
        loop = link.connection.loop
        until = loop.time() + REPEAT_AFTER
        while not request.is_done and (left := until - loop.time()) > 0 and not link.ended.done():
            waits: set[asyncio.Future[Any]] = {request.answer, link.ended, *request.confirms}
            await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            done = {one for one in request.confirms if one.done()}
            request.confirms -= done
            if any(one.exception() is None for one in done):
                request.is_confirmed = True
                request.reason = "no gate has answered"
            elif not request.is_done:
                for one in done:
                    one.result()

    def _on_answer(self, delivery: Delivery) -> None:
        request = self._waiting.get(str(delivery.values.get("correlation_id")))
        if request is None or request.answer.done():
            log.debug("dropped a late answer: %s", delivery.values.get("correlation_id"))
        else:
            request.answer.set_result(delivery)

    def _final_error(
        self, request: ScheduleRequest, connection: Connection | None, link: ScheduleChannel | None, error: BideError
    ) -> BideError | None:
        """The error to raise after a failed attempt; None if the request should be sent again."""
        if isinstance(error, UnroutableError | TargetNotFoundError) and not request.is_declared_again and self._declare:
            # Parts of the log were deleted. Streams that are left keep their records.
            request.is_declared_again = self._is_missing = True
            return None
        if connection is None or isinstance(error, PublishError | InvalidInputError | ScheduleLogError):
            return request.failed(error)
        if not connection.is_open or isinstance(error, ConnectionLostError):
            return None
        if link is None:
            return request.failed(error)
        if not link.channel.close_text:
            return None
        closure = ChannelClosure(error, link.channel.close_text, link.channel.confirms.failed)
        if closure.limit is not None:
            self._size_limit = closure.limit
            self._check_size(request)
            return None
        if closure.applies_to(self.names.operations, request.body):
            request.refusals = request.attempts
            return request.failed(error)
        return request.failed(error) if request.attempts >= _MAX_CLOSURES else None

    def _check_size(self, request: ScheduleRequest) -> None:
        if self._size_limit is not None and len(request.body) > self._size_limit:
            raise MessageTooLargeError(
                f"{request.what} takes {len(request.body)} bytes with the fields of its record, the broker's limit is "
                f"{self._size_limit}: send a smaller body, or raise max_message_size on the broker"
            )

    async def _open(self, connection: Connection, partition: int | None = None) -> ScheduleChannel:
        """The open channel for the records of a partition, or for everything else, with the log declared."""
        link = self._links.get(partition)
        if link is not None and link.channel.is_open and not self._is_missing:
            return link
        async with self._opening:
            link = self._links.get(partition)
            if link is not None and link.channel.is_open and not self._is_missing:
                return link
            await self._prepare_log(connection)
            if link is None or not link.channel.is_open:
                link = self._links[partition] = await ScheduleChannel.open(connection, self._on_answer)
            return link

    async def _prepare_log(self, connection: Connection) -> None:
        if self._is_missing and self._declare:
            await declare_schedule_log(connection, self.names)
        elif not self._is_checked:
            await ensure_schedule_log(connection, self.names, declare=self._declare)
        self._is_checked, self._is_missing = True, False


def check_header_size(what: str, header_size: int, frame_max: int) -> None:
    """Check that the gate's headers will fit into the frame of the message's properties.

    Args:
        what: the operation, for the error.

    Raises:
        InvalidInputError: the message's own properties and headers leave too little room.
    """
    if header_size > frame_max - RESERVE:
        raise InvalidInputError(
            f"{what}: the properties and headers of the message take {header_size} bytes, the limit is "
            f"{frame_max - RESERVE}: put large values into the body"
        )
