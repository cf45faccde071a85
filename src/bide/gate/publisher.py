"""The publishing channels of a gate on one connection."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Final

from bide.amqp import codec
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.client.pipelined_sender import PipelinedMessage, PipelinedSender
from bide.client.target_sender import TargetSender
from bide.errors import BideError, UnroutableError
from bide.gate.scheduled_delivery import ScheduledDelivery
from bide.gate.target_windows import TargetWindows
from bide.patterns.rpc import DIRECT_REPLY_TO
from bide.runtime.bounded_cache import BoundedCache
from bide.runtime.logs import logger
from bide.schedules.names import ScheduleNames

log = logger(__name__)

_PERSISTENT: Final = 2

_TARGET_CHANNELS: Final = 64
"""The maximum number of channels for targets. A channel stands still at its first message for a quorum queue that does
not answer (measured with 3.10.8). So a target with messages in flight has a channel to itself, unless there are more
such targets."""


class _GateRecord(PipelinedMessage):
    """A record on its way to the log."""

    __slots__ = ("on_result",)

    def __init__(
        self, exchange: str, routing_key: str, body: bytes, on_result: Callable[[BideError | None], None]
    ) -> None:
        super().__init__(exchange, routing_key, {"delivery_mode": _PERSISTENT}, body)
        self.on_result = on_result


class DeliveryInFlight(PipelinedMessage):
    """A scheduled message on its way to its target, or to the undeliverable queue."""

    __slots__ = ("delivery", "on_result")

    def __init__(
        self, delivery: ScheduledDelivery, on_result: Callable[[ScheduledDelivery, BideError | None], None]
    ) -> None:
        super().__init__(delivery.exchange, delivery.routing_key, delivery.values, delivery.entry.message.body)
        self.delivery = delivery
        self.on_result = on_result


class GatePublisher:
    """Publishes records, scheduled messages and answers.

    Args:
        failed: called with the error when no channel can be opened.

    Attributes:
        windows: places for messages in flight. A message for a target needs one.
    """

    def __init__(self, connection: Connection, names: ScheduleNames, failed: Callable[[BideError], None]) -> None:
        self.connection = connection
        self.windows = TargetWindows()
        self._names = names
        # Each log has a channel of its own; see ScheduleChannel.
        self._to_logs: dict[str, PipelinedSender[_GateRecord]] = {}
        self._to_undeliverable = PipelinedSender[DeliveryInFlight](
            connection, on_result=lambda message, error: message.on_result(message.delivery, error), failed=failed
        )
        self._failed = failed
        self._senders: list[TargetSender[DeliveryInFlight]] = []
        self._in_flight_to = Counter[str]()
        self._sender_of: dict[str, int] = {}
        """The senders of targets with messages in flight."""
        self._targets_of = Counter[int]()
        self._last_sender_of = BoundedCache[str, int]()
        """Preferred for the next message to the target: the sender has checked the exchange already."""
        self._answering: Channel | None = None
        self._opening = asyncio.Lock()

    def append(self, partition: int, body: bytes, on_result: Callable[[BideError | None], None]) -> None:
        """Append a record to the log of a partition. Records of a partition are sent in order."""
        log_key = str(partition)
        sender = self._to_logs.get(log_key)
        if sender is None:
            sender = PipelinedSender(self.connection, on_result=self._on_appended, failed=self._failed)
            self._to_logs[log_key] = sender
        sender.put(_GateRecord(self._names.gates, log_key, body, on_result))

    def _on_appended(self, message: _GateRecord, error: BideError | None) -> None:
        if isinstance(error, UnroutableError):
            # The broker has numbered a message that the stream never got: use a new channel; see ScheduleChannel.
            self._to_logs.pop(message.routing_key).close()
        message.on_result(error)

    def deliver(
        self, delivery: ScheduledDelivery, on_result: Callable[[ScheduledDelivery, BideError | None], None]
    ) -> None:
        """Send a message to its target, for which it has a place, or to the undeliverable queue."""
        message = DeliveryInFlight(delivery, on_result)
        if delivery.reason:
            self._to_undeliverable.put(message)
            return
        target = delivery.entry.target
        number = self._sender_of.get(target)
        if number is None:
            number = self._sender_of[target] = self._choose_sender(target)
            self._targets_of[number] += 1
        self._in_flight_to[target] += 1
        self._senders[number].put(message)

    def _choose_sender(self, target: str) -> int:
        last = self._last_sender_of.get(target)
        if last is not None and not self._targets_of[last]:
            return last
        for number in range(len(self._senders)):
            if not self._targets_of[number]:
                return number
        if len(self._senders) < _TARGET_CHANNELS:
            self._senders.append(TargetSender(self.connection, on_result=self._on_settled, failed=self._failed))
            return len(self._senders) - 1
        return zlib.crc32(target.encode()) % _TARGET_CHANNELS

    def _on_settled(self, message: DeliveryInFlight, error: BideError | None) -> None:
        target = message.delivery.entry.target
        self._in_flight_to[target] -= 1
        if not self._in_flight_to[target]:
            del self._in_flight_to[target]
            number = self._last_sender_of[target] = self._sender_of.pop(target)
            self._targets_of[number] -= 1
        self.windows.leave(target)
        message.on_result(message.delivery, error)

    async def answer(self, reply_to: str, correlation_id: str | None, body: bytes) -> None:
        """Send an answer, unconfirmed: a client that does not get it asks again.

        Only direct reply-to is answered. Otherwise an application could write to queues with the permissions of the
        gate.
        """
        if not reply_to.startswith(DIRECT_REPLY_TO):
            log.debug("no answer to %r: it is not direct reply-to", reply_to)
            return
        async with self._opening:
            if self._answering is None or not self._answering.is_open:
                self._answering = await self.connection.channel()
        frames = codec.publish(
            self._answering.number,
            exchange="",
            routing_key=reply_to,
            mandatory=False,
            encoded_properties=codec.properties({"correlation_id": correlation_id}),
            body=body,
            frame_max=self.connection.frame_max,
        )
        self.connection.send(b"".join(frames))

    def close(self) -> None:
        """Send no more, and report no more results."""
        for log_sender in self._to_logs.values():
            log_sender.close()
        self._to_undeliverable.close()
        for sender in self._senders:
            sender.close()
        if self._answering is not None:
            self._answering.abandon()
