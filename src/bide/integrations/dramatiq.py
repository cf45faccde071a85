"""dramatiq's RabbitMQ broker, with delayed messages in ``Clock``.

Use it in place of dramatiq's own::

    from bide.integrations.dramatiq import RabbitmqBroker

    dramatiq.set_broker(RabbitmqBroker(url="amqp://localhost"))
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import pika
from dramatiq.broker import MessageProxy
from dramatiq.brokers import rabbitmq
from dramatiq.errors import ConnectionClosed
from pika import exceptions

from bide.amqp.url import BrokerUrl
from bide.client.schedule_result import ScheduleResult
from bide.client.sync import SyncClient, connect_sync
from bide.delay.clock import Clock
from bide.delay.protocol import QueueTarget
from bide.errors import InvalidDelayError, InvalidInputError
from bide.integrations.delays import DelayedPublish, Delays

if TYPE_CHECKING:
    from dramatiq import Message

OPTION_KEY: Final = "schedule_key"
"""The option of a message with the key by which it can be cancelled while it waits."""

_NOT_FOUND: Final = 404


class RabbitmqBroker(rabbitmq.RabbitmqBroker):
    """dramatiq's RabbitMQ broker, with delayed messages in ``Clock``.

    When a message is due, it goes to the queue of its actor, and any worker can run it. Workers with this broker also
    run the messages that wait in dramatiq's own delay queues (``.DQ``).

    ``send_with_options(..., delay=..., schedule_key="invoice:42")`` stores the message as a schedule
    (:meth:`bide.Client.schedule`), which a gate delivers and :meth:`cancel` cancels. The key applies to this delay
    only: if the actor fails, its retries have no key.

    A message whose retry cannot be sent goes to its dead-letter queue.

    Args:
        infrastructure: the delay infrastructure; ``Clock()`` if None.
        confirm_delivery: wait for the broker's confirm of every message. dramatiq's own default is False.
        options: as for dramatiq's broker.
    """

    def __init__(self, *, infrastructure: Clock | None = None, confirm_delivery: bool = True, **options: Any) -> None:
        super().__init__(confirm_delivery=confirm_delivery, **options)
        self._delays = Delays(infrastructure)
        self._schedules: tuple[int, SyncClient] | None = None
        self._schedules_lock = threading.Lock()

    def enqueue(self, message: Message[Any], *, delay: float | None = None) -> Message[Any]:
        """Send a message to the queue of its actor.

        Args:
            delay: milliseconds until the message is in the queue.

        Returns:
            The message that was sent.

        Raises:
            InvalidDelayError: the delay is longer than the infrastructure supports.
            InvalidInputError: the message has a ``schedule_key`` and no delay, or the key is invalid.
            ConnectionClosed: the broker cannot be reached, or refuses the message.
            BrokerError: a message with a ``schedule_key`` cannot be stored; see :meth:`bide.Client.schedule`.
        """
        try:
            return self._enqueue(message, delay)
        except Exception:
            if isinstance(message, MessageProxy):
                # The retry of a received message. dramatiq logs the error, and would acknowledge the message.
                message.fail()
            raise

    def _enqueue(self, message: Message[Any], delay: float | None) -> Message[Any]:
        key = message.options.get(OPTION_KEY)
        if delay is None:
            if key is not None:
                raise InvalidInputError(
                    f"{OPTION_KEY}={key!r} for a message without a delay, which cannot be cancelled: give delay= too, "
                    f"or leave {OPTION_KEY} out"
                )
            return super().enqueue(message)
        wait = _span(delay)
        if key is not None:
            return self._schedule(message, key, delay, wait)
        attempts = 0
        while True:
            try:
                self.declare_queue(message.queue_name, ensure=True)
                publish = self._prepare(message, wait)
                self.logger.debug("Enqueueing message %r for %s.", message.message_id, publish.due)
                self.emit_before("enqueue", message, delay)
                self.channel.basic_publish(
                    exchange=publish.exchange,
                    routing_key=publish.routing_key,
                    body=message.encode(),
                    properties=pika.BasicProperties(**publish.properties),
                    mandatory=self.confirm_delivery,
                )
                self.emit_after("enqueue", message, delay)
                return message
            except (exceptions.AMQPConnectionError, exceptions.AMQPChannelError) as error:
                # As in dramatiq's own enqueue: the next attempt opens a new connection, and declares what is missing.
                del self.connection
                self._delays.forget(self)
                if isinstance(error, exceptions.UnroutableError) or _reply_code(error) == _NOT_FOUND:
                    self.queues_pending.add(message.queue_name)
                attempts += 1
                if attempts >= rabbitmq.MAX_ENQUEUE_ATTEMPTS:
                    raise ConnectionClosed(error) from None  # type: ignore[no-untyped-call]  # as dramatiq does
                self.logger.debug("Retrying the enqueue, attempt %d: %s", attempts + 1, error)

    def cancel(self, key: str) -> ScheduleResult:
        """Cancel the message that waits under a ``schedule_key``.

        Returns:
            A result with the outcome ``CANCELLED``, ``TOO_LATE`` or ``NOT_FOUND``.

        Raises:
            BideError: as :meth:`bide.Client.cancel`.
        """
        return self._schedule_client().cancel(key)

    def close(self) -> None:
        """Close all connections."""
        super().close()
        with self._schedules_lock:
            if self._schedules is not None:
                self._schedules[1].close()
                self._schedules = None

    def _prepare(self, message: Message[Any], wait: timedelta) -> DelayedPublish:
        """The publish of a delayed message, once everything that it needs is declared."""
        properties: dict[str, Any] = {"delivery_mode": 2, "message_id": message.message_id}
        if (priority := message.options.get("broker_priority")) is not None:
            properties["priority"] = priority
        # pika's blocking connection has no public name for these.
        server_properties = self.connection._impl.server_properties  # noqa: SLF001 (there is no public attribute)
        if server_properties is None:
            raise exceptions.ConnectionWrongStateError("the connection is closed")
        publish = self._delays.route(
            QueueTarget(message.queue_name), delay=wait, server_properties=server_properties, properties=properties
        )
        # All threads share what one of them has declared.
        if declarations := list(self._delays.declarations(publish, connection=self)):
            for one in declarations:
                one.call(self.channel)
            self._delays.declared(publish, connection=self)
        return publish

    def _schedule(self, message: Message[Any], key: str, delay: float, wait: timedelta) -> Message[Any]:
        """Store a message as a schedule."""
        message = message.copy()
        del message.options[OPTION_KEY]
        # The queue is declared here, because a gate does not declare the queues that it delivers to.
        self.declare_queue(message.queue_name, ensure=True)
        self.emit_before("enqueue", message, delay)
        self._schedule_client().schedule(
            message.encode(),
            key=key,
            to=message.queue_name,
            delay=wait,
            message_id=message.message_id,
            priority=message.options.get("broker_priority"),
        )
        self.emit_after("enqueue", message, delay)
        return message

    def _schedule_client(self) -> SyncClient:
        process = os.getpid()
        with self._schedules_lock:
            # The client of a parent process cannot be used after a fork.
            if self._schedules is None or self._schedules[0] != process:
                self._schedules = process, connect_sync(broker_url(self.parameters))
            return self._schedules[1]


def _span(milliseconds: float) -> timedelta:
    """A delay of dramatiq, which sends a message with a negative delay at once."""
    try:
        return max(timedelta(milliseconds=milliseconds), timedelta(0))
    except OverflowError:
        raise InvalidDelayError(
            f"the delay of {milliseconds} ms is longer than any infrastructure can hold: give a shorter delay"
        ) from None


def _reply_code(error: BaseException) -> int | None:
    return getattr(error, "reply_code", None)


def broker_url(parameters: Any) -> BrokerUrl:
    """The address of pika's connection parameters."""
    several = list(parameters) if isinstance(parameters, (list, tuple)) else [parameters]
    first = several[0]
    is_external = isinstance(first.credentials, pika.credentials.ExternalCredentials)
    login = {} if is_external else {"user": first.credentials.username, "password": first.credentials.password}
    return BrokerUrl(
        hosts=tuple((one.host, one.port) for one in several),
        vhost=first.virtual_host,
        tls=first.ssl_options is not None,
        context=None if first.ssl_options is None else first.ssl_options.context,
        external=is_external,
        **login,
    )
