"""Questions to the leading gate of a partition, and when they may be answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from bide.amqp.channel import Channel
from bide.amqp.delivery import Delivery
from bide.errors import BideError, ScheduleRecordError
from bide.gate.partition_index import PartitionIndex
from bide.gate.publisher import GatePublisher
from bide.runtime.logs import logger
from bide.schedules.questions import decode_question

log = logger(__name__)

_PREFETCH: Final = 100

_ANSWER_SECONDS: Final = 0.05
"""Seconds after which other work of the partition gets its turn."""


class QuestionConsumer:
    """Consumes the query queue of a partition while its gate leads.

    A question is answered when a beat was read back that was appended after the question had arrived. Then the index
    contains everything that was confirmed before the question.

    Args:
        queue: the query queue.
        on_question: called when there is a question to answer.
        failed: called when the consumer ends.
    """

    def __init__(
        self,
        publisher: GatePublisher,
        queue: str,
        index: PartitionIndex,
        *,
        on_question: Callable[[], None],
        failed: Callable[[BideError], None],
    ) -> None:
        self._publisher = publisher
        self._queue = queue
        self._index = index
        self._on_question = on_question
        self._failed = failed
        self._channel: Channel | None = None
        self._waiting = deque[tuple[float, Delivery]]()

    async def open(self) -> None:
        """Begin to consume."""
        channel = self._channel = await self._publisher.connection.channel()
        await channel.qos(_PREFETCH)
        await channel.consume(self._queue, on_message=self._put, on_end=self._end)

    def close(self) -> None:
        """Stop consuming. Unanswered questions go back to the queue."""
        channel, self._channel = self._channel, None
        self._waiting.clear()
        if channel is not None:
            channel.abandon()

    @property
    def is_waiting(self) -> bool:
        """Whether a question waits for a beat."""
        return bool(self._waiting)

    async def answer(self, proven_at: float) -> int:
        """Answer the questions that arrived before a time, as many as 50 ms suffice for, and return their number.

        Args:
            proven_at: when the last beat that was read back was sent.
        """
        answered, until = 0, self._publisher.connection.monotonic() + _ANSWER_SECONDS
        while self._channel is not None and self._waiting and self._waiting[0][0] <= proven_at:
            if self._publisher.connection.monotonic() > until:
                self._on_question()
                break
            channel, (_, delivery) = self._channel, self._waiting.popleft()
            try:
                question = decode_question(delivery.body)
            except ScheduleRecordError as error:
                log.info("a question on %s is ignored: %s", self._queue, error)
            else:
                body = await self._index.answer(question)
                reply_to = delivery.values.get("reply_to")
                if reply_to is not None:
                    await self._publisher.answer(reply_to, delivery.values.get("correlation_id"), body)
                    answered += 1
            if channel.is_open:
                channel.ack(delivery.delivery_tag)
        return answered

    def _put(self, delivery: Delivery) -> None:
        self._waiting.append((self._publisher.connection.monotonic(), delivery))
        self._on_question()

    def _end(self, error: BideError) -> None:
        if self._channel is not None:
            self._failed(error)
