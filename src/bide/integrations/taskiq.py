"""taskiq's RabbitMQ broker, with delayed tasks in ``Clock``, and a source of schedules.

Use the broker in place of taskiq-aio-pika's own::

    from bide.integrations.taskiq import AioPikaBroker

    broker = AioPikaBroker("amqp://localhost")
    await remind.kicker().with_labels(delay=5).kiq(42)
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from datetime import UTC, timedelta
from typing import TYPE_CHECKING, Any

import aio_pika
import taskiq_aio_pika
from taskiq import ScheduleSource
from taskiq.kicker import AsyncKicker
from taskiq_aio_pika.broker import parse_val
from taskiq_aio_pika.exceptions import IncorrectRoutingKeyError, NoStartupError

from bide.client.client import Client, Connecting
from bide.client.schedule_result import ScheduleResult
from bide.delay.clock import Clock
from bide.delay.protocol import ExchangeTarget
from bide.errors import InvalidDelayError, InvalidInputError
from bide.integrations.aio_pika import AioPikaDelays

if TYPE_CHECKING:
    from taskiq import BrokerMessage, ScheduledTask

_LABEL_DELAY = "delay"

_SCHEDULING: ContextVar[tuple[KeyedScheduleSource, ScheduledTask] | None] = ContextVar("scheduling", default=None)
"""The source and the schedule for which taskiq is making a message."""


class AioPikaBroker(taskiq_aio_pika.AioPikaBroker):
    """taskiq's RabbitMQ broker, with delayed tasks in ``Clock``.

    The label ``delay`` is the number of seconds until a task is in its queue, for any worker. Retry middlewares set
    this label too. taskiq's delay queue and the delayed-message plugin are not needed.

    Args:
        infrastructure: the delay infrastructure; ``Clock()`` if None.
        arguments: as for taskiq-aio-pika's broker.
        options: as for taskiq-aio-pika's broker.
    """

    def __init__(self, *arguments: Any, infrastructure: Clock | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._delays = AioPikaDelays(infrastructure)

    async def kick(self, message: BrokerMessage) -> None:
        """Send a task.

        Raises:
            NoStartupError: the broker was not started.
            IncorrectRoutingKeyError: no queue of the broker has the routing key.
            InvalidDelayError: the delay is not a number of seconds, or is longer than the infrastructure supports.
            AMQPError: from aio-pika: the broker refuses, or the connection is lost.
        """
        if self.write_channel is None or self.write_conn is None:
            raise NoStartupError("the broker was not started: call startup() before the first task is sent")
        scheduling = _SCHEDULING.get()
        text = message.labels.get(_LABEL_DELAY)
        if scheduling is None and text is None:
            return await super().kick(message)
        encoded, routing_key = self._encoded(message), self._routing_key(message)
        if scheduling is not None:
            source, schedule = scheduling
            return await source.store(encoded, schedule, exchange=self._exchange.name, routing_key=routing_key)
        channel = self.write_channel

        async def publish(exchange: str, routing_key: str, routed: aio_pika.Message) -> None:
            to = await channel.get_exchange(exchange, ensure=False) if exchange else channel.default_exchange
            await to.publish(routed, routing_key=routing_key)

        target = ExchangeTarget(self._exchange.name, routing_key, str(self._exchange.type.value))
        return await self._delays.publish(publish, encoded, target, connection=self.write_conn, delay=_span(text))

    def _encoded(self, message: BrokerMessage) -> aio_pika.Message:
        """The message as taskiq-aio-pika makes it."""
        priority = parse_val(int, message.labels.get(self._label_for_priority))
        return aio_pika.Message(
            message.message,
            headers={"task_id": message.task_id, "task_name": message.task_name, **message.labels},
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            priority=priority,
        )

    def _routing_key(self, message: BrokerMessage) -> str:
        """The routing key as taskiq-aio-pika chooses it."""
        keys = [queue.routing_key or queue.name for queue in self._task_queues]
        if len(keys) == 1:
            return keys[0]
        chosen = str(message.labels.get(self._label_for_routing) or "")
        if self._exchange.type == aio_pika.ExchangeType.DIRECT and chosen not in keys:
            raise IncorrectRoutingKeyError(
                f"the routing key {chosen!r} belongs to none of the queues {', '.join(keys)}: set the label "
                f"{self._label_for_routing!r}"
            )
        return chosen


class KeyedScheduleSource(ScheduleSource):
    """A source of taskiq's schedules that a gate delivers, without a scheduler process.

    ``schedule_by_time`` stores the task as a schedule of bide (:meth:`bide.Client.schedule`), whose key is the schedule
    id. ``with_schedule_id`` chooses the key; ``unschedule`` cancels it.

    Args:
        broker: the broker that the tasks belong to.
        schedules: ``bide.connect(...)``. It is connected when it is first needed.
    """

    def __init__(self, broker: AioPikaBroker, schedules: Connecting) -> None:
        self._broker = broker
        self._schedules = schedules
        self._client: Client | None = None
        self._connecting = asyncio.Lock()

    async def shutdown(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()

    async def get_schedules(self) -> list[ScheduledTask]:
        """An empty list, because taskiq's scheduler would send the schedules in it, and a gate delivers them."""
        return []

    async def add_schedule(self, schedule: ScheduledTask) -> None:
        """Store a task that runs at a time. A schedule that waits under the same id is replaced.

        Raises:
            InvalidInputError: the schedule recurs, or its id cannot be a key.
            BideError: as :meth:`bide.Client.schedule`; taskiq raises it as the cause of its ``SendTaskError``.
        """
        if schedule.time is None:
            raise InvalidInputError(
                f"the schedule {schedule.schedule_id!r} recurs, and each run needs a task id of its own: use the label "
                "'schedule' and taskiq's scheduler"
            )
        token = _SCHEDULING.set((self, schedule))
        try:
            kicker: AsyncKicker[Any, Any] = AsyncKicker(schedule.task_name, self._broker, dict(schedule.labels))
            kicker.with_labels(schedule_id=schedule.schedule_id).with_task_id(schedule.task_id)
            await kicker.kiq(*schedule.args, **schedule.kwargs)
        finally:
            _SCHEDULING.reset(token)

    async def delete_schedule(self, schedule_id: str) -> None:
        """Cancel a schedule. :meth:`cancel` returns whether it was in time."""
        await self.cancel(schedule_id)

    async def cancel(self, schedule_id: str) -> ScheduleResult:
        """Cancel a schedule.

        Returns:
            A result with the outcome ``CANCELLED``, ``TOO_LATE`` or ``NOT_FOUND``.

        Raises:
            BideError: as :meth:`bide.Client.cancel`.
        """
        return await (await self._connected()).cancel(schedule_id)

    async def store(
        self, message: aio_pika.Message, schedule: ScheduledTask, *, exchange: str, routing_key: str
    ) -> None:
        """Store the message of a task as a schedule; the broker calls this."""
        time = schedule.time
        assert time is not None
        await (await self._connected()).schedule(
            message.body,
            key=schedule.schedule_id,
            exchange=exchange,
            routing_key=routing_key,
            # taskiq reads a time without a zone as UTC.
            deliver_at=time if time.tzinfo is not None else time.replace(tzinfo=UTC),
            headers=message.headers,
            priority=message.priority or None,
        )

    async def _connected(self) -> Client:
        async with self._connecting:
            if self._client is None:
                self._client = await self._schedules
        return self._client


def _span(label: Any) -> timedelta:
    """The delay in a label. A negative delay counts as zero."""
    try:
        return max(timedelta(seconds=float(label)), timedelta(0))
    except (TypeError, ValueError, OverflowError):
        raise InvalidDelayError(f"the label {_LABEL_DELAY}={label!r} is not a number of seconds: give one") from None
