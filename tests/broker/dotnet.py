"""NServiceBus endpoints and ServiceControl, played by pika after their source.

There is no .NET here, and nothing here uses bide. What matters is done as NServiceBus.RabbitMQ 11, NServiceBus 10 and
ServiceControl 6 do it: headers become text, every copy carries all of them, and the same few are taken off.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pika

from tests.timeouts import TIMEOUT

LEVELS = 28
QUORUM = {"x-queue-type": "quorum"}
DELAY = "NServiceBus.Transport.RabbitMQ.DelayInSeconds"

_TAKEN_OFF = {DELAY, "x-death", "NServiceBus.Transport.RabbitMQ.ConfirmationId"} | {
    f"x-first-death-{what}" for what in ("exchange", "queue", "reason")
}
_NOT_RETRIED = (
    "NServiceBus.Retries",
    "NServiceBus.FailedQ",
    "NServiceBus.TimeOfFailure",
    "NServiceBus.ExceptionInfo.",
    "ServiceControl.EditOf",
)
"""ServiceControl removes headers that start like this from a message that it retries."""

Routing = Literal["conventional", "direct"]


def wire_time(moment: datetime) -> str:
    """A time in a header."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S:%f Z")


def as_text(value: Any) -> str:
    """A header as .NET code sees it."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, Mapping):
        return ",".join(f"{name}={as_text(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ";".join(as_text(one) for one in value)
    if isinstance(value, datetime):
        return wire_time(value.replace(tzinfo=UTC))
    return "" if value is None else str(value)


@dataclass(frozen=True)
class Incoming:
    """A message as the code of an endpoint sees it."""

    message_id: str
    headers: dict[str, str]
    body: bytes
    exchange: str

    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


class Transport:
    """NServiceBus.RabbitMQ: one connection of the .NET side."""

    def __init__(self, url: str, routing: Routing = "conventional") -> None:
        self.routing = routing
        parameters = pika.URLParameters(url)
        # Nothing answers heartbeats while the test does something else.
        parameters.heartbeat = 0
        self.connection = pika.BlockingConnection(parameters)
        self.channel = self.connection.channel()
        self.channel.confirm_delivery()
        self.channel.basic_qos(prefetch_count=1)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def build_delays(self) -> None:
        """Declare the delay infrastructure, version 2."""
        below = "nsb.v2.delay-delivery"
        self.channel.exchange_declare(below, "topic", durable=True)
        for level in range(LEVELS):
            name, stars = f"nsb.v2.delay-level-{level:02}", "*." * (LEVELS - 1 - level)
            arguments = {
                **QUORUM,
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
                "x-message-ttl": 2**level * 1000,
                "x-dead-letter-exchange": below,
            }
            self.channel.exchange_declare(name, "topic", durable=True)
            self.channel.queue_declare(name, durable=True, arguments=arguments)
            self.channel.queue_bind(name, name, f"{stars}1.#")
            self.channel.exchange_bind(below, name, f"{stars}0.#")
            below = name

    def create_queue(self, name: str) -> None:
        """Declare a queue that endpoints send to."""
        self.channel.queue_declare(name, durable=True, arguments=QUORUM)
        if self.routing == "conventional":
            self.channel.exchange_declare(name, "fanout", durable=True)
            self.channel.queue_bind(name, name, "")

    def create_endpoint(self, name: str, *, error: str = "error", audit: str = "audit") -> None:
        """What an endpoint declares when it starts."""
        for queue in (name, error, audit):
            self.create_queue(queue)
        self._bind_to_delays(name)

    def _bind_to_delays(self, address: str) -> None:
        if self.routing == "conventional":
            self.channel.exchange_bind(address, "nsb.v2.delay-delivery", f"#.{address}")
        else:
            self.channel.queue_bind(address, "nsb.v2.delay-delivery", f"#.{address}")

    def receive(self, queue: str) -> Incoming:
        """Receive one message and acknowledge it."""
        messages = self.channel.consume(queue, inactivity_timeout=TIMEOUT)
        method, properties, body = next(messages)
        assert method is not None, f"no message came to {queue}"
        assert properties is not None
        headers = {name: as_text(one) for name, one in (properties.headers or {}).items() if name not in _TAKEN_OFF}
        own = {
            "NServiceBus.ReplyToAddress": properties.reply_to,
            "NServiceBus.CorrelationId": properties.correlation_id,
            "NServiceBus.ContentType": properties.content_type,
        }
        headers |= {name: value for name, value in own.items() if value is not None}
        if "NServiceBus.EnclosedMessageTypes" not in headers and properties.type is not None:
            headers["NServiceBus.EnclosedMessageTypes"] = properties.type
        headers.pop("x-delivery-count", None)
        assert properties.message_id, "an endpoint moves a message without an id to its error queue"
        headers.setdefault("NServiceBus.MessageId", properties.message_id)
        # Acknowledged last, so that the broker sends no second message, which would come back out of order.
        self.channel.cancel()
        self.channel.basic_ack(method.delivery_tag)
        return Incoming(properties.message_id, headers, body or b"", method.exchange)

    def dispatch(
        self, address: str, headers: Mapping[str, str], body: bytes, message_id: str, *, delay: timedelta | None = None
    ) -> None:
        """Send a message to the queue of an endpoint."""
        properties = self._properties(headers, message_id)
        if delay is None:
            exchange, key = (address, "") if self.routing == "conventional" else ("", address)
        else:
            seconds = -(-delay // timedelta(seconds=1))
            properties.headers[DELAY] = seconds
            bits = f"{seconds:028b}"
            level = max((LEVELS - 1 - place for place, bit in enumerate(bits) if bit == "1"), default=0)
            exchange, key = f"nsb.v2.delay-level-{level:02}", f"{'.'.join(bits)}.{address}"
            self._bind_to_delays(address)
        self.channel.basic_publish(exchange, key, body, properties, mandatory=True)

    def _properties(self, headers: Mapping[str, str], message_id: str) -> pika.BasicProperties:
        kind = headers.get("NServiceBus.EnclosedMessageTypes")
        return pika.BasicProperties(
            headers=dict(headers),
            message_id=message_id,
            delivery_mode=2,
            correlation_id=headers.get("NServiceBus.CorrelationId"),
            type=None if kind is None else kind.partition(",")[0],
            content_type=headers.get("NServiceBus.ContentType", "application/octet-stream"),
            reply_to=headers.get("NServiceBus.ReplyToAddress"),
        )

    def publish(self, exchange: str, key: str, headers: Mapping[str, str], body: bytes, message_id: str) -> None:
        """Publish an event, once what a publisher declares for its type exists."""
        self.channel.basic_publish(exchange, key, body, self._properties(headers, message_id))


class Endpoint:
    """An endpoint of NServiceBus."""

    def __init__(self, transport: Transport, name: str) -> None:
        self.transport, self.name = transport, name
        self.host_id = uuid.uuid4().hex

    def send(
        self,
        address: str,
        types: str,
        body: Any,
        *,
        saga: tuple[str, str] | None = None,
        delay: timedelta | None = None,
    ) -> dict[str, str]:
        """Start a conversation with a command; return its headers."""
        message_id, now = str(uuid.uuid4()), datetime.now(UTC)
        headers = {
            "NServiceBus.MessageId": message_id,
            "NServiceBus.MessageIntent": "Send",
            "NServiceBus.CorrelationId": message_id,
            "NServiceBus.ConversationId": str(uuid.uuid4()),
            "NServiceBus.OriginatingMachine": "WIN",
            "NServiceBus.OriginatingEndpoint": self.name,
            "$.diagnostics.originating.hostid": self.host_id,
            "NServiceBus.ReplyToAddress": self.name,
            "NServiceBus.ContentType": "application/json",
            "NServiceBus.EnclosedMessageTypes": types,
            "NServiceBus.Version": "10.0.0",
            "NServiceBus.TimeSent": wire_time(now),
        }
        if saga is not None:
            headers |= {"NServiceBus.OriginatingSagaId": saga[0], "NServiceBus.OriginatingSagaType": saga[1]}
        if delay is not None:
            headers["NServiceBus.DeliverAt"] = wire_time(now + delay)
        self.transport.dispatch(address, headers, json.dumps(body).encode(), message_id, delay=delay)
        return headers

    def retry_later(self, message: Incoming, delay: timedelta, *, retries: int) -> None:
        """A delayed retry: a copy with all headers to the endpoint's own queue."""
        headers = message.headers | {
            "NServiceBus.Retries": str(retries),
            "NServiceBus.Retries.Timestamp": wire_time(datetime.now(UTC)),
        }
        self.transport.dispatch(self.name, headers, message.body, message.message_id, delay=delay)

    def audit(self, message: Incoming, queue: str = "audit") -> None:
        """The audit copy of a message that was handled: all headers, and those of the processing."""
        now = wire_time(datetime.now(UTC))
        headers = message.headers | {
            "NServiceBus.ProcessingStarted": now,
            "NServiceBus.ProcessingEnded": now,
            "NServiceBus.ProcessingEndpoint": self.name,
            "NServiceBus.ProcessingMachine": "WIN",
            "$.diagnostics.hostid": self.host_id,
            "$.diagnostics.hostdisplayname": "WIN",
        }
        self.transport.dispatch(queue, headers, message.body, message.message_id)


class ServiceControl:
    """The error instance of ServiceControl: it takes failed messages out of the error queue, and sends them back."""

    def __init__(self, transport: Transport, error: str = "error") -> None:
        self.transport, self.error = transport, error

    def ingest(self) -> Incoming:
        """Take a failed message out of the error queue. A retry keeps the id that the first failure got."""
        failed = self.transport.receive(self.error)
        assert "ServiceControl.Retry.Successful" not in failed.headers, "a confirmation, not a failure"
        assert failed.headers["NServiceBus.FailedQ"]
        assert failed.headers["NServiceBus.TimeOfFailure"]
        return failed

    def retry(self, failed: Incoming, unique_id: str) -> None:
        """Send a failed message back, as its operator asks."""
        headers = {name: one for name, one in failed.headers.items() if not name.startswith(_NOT_RETRIED)}
        headers["ServiceControl.Retry.UniqueMessageId"] = unique_id
        headers["ServiceControl.Retry.AcknowledgementQueue"] = self.error
        self.transport.dispatch(failed.headers["NServiceBus.FailedQ"], headers, failed.body, str(uuid.uuid4()))

    def confirmed(self) -> str:
        """Wait for the confirmation of a retry; return the id of the failure that is resolved."""
        confirmation = self.transport.receive(self.error)
        assert confirmation.headers["ServiceControl.Retry.Successful"].endswith(" Z")
        assert confirmation.headers["NServiceBus.ControlMessage"] == "True"
        assert confirmation.body == b""
        return confirmation.headers["ServiceControl.Retry.UniqueMessageId"]
