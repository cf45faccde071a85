"""OpenTelemetry spans of publishing and handling messages, linked across delays.

Names of spans and attributes follow OpenTelemetry's semantic conventions for messaging and RabbitMQ. Names of spans do
not contain routing keys, because their number is not limited. The context travels in the headers ``traceparent`` and
``tracestate`` (W3C Trace Context, also used by NServiceBus), or in the headers of the propagator that the program
configures.

Whether the span of a handler belongs to the sender's trace:

- For a message without a delay, and its immediate retries, the span is a child of the sender's span.
- For a message that was delayed, retried later, or sent back by an operator, the span starts a new trace. A trace that
  stays open for three days is of no use, and the sender's sampling decision should not apply to the handler. (This is
  NServiceBus's rule.)
- A sender can request a new trace with the header ``NServiceBus.OpenTelemetry.StartNewTrace: True``.

In each case the span links to the sender's span. Copies keep their headers, so all retries link to the first sending.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from bide.delay.protocol import ExchangeTarget, Target
from bide.durations import to_microseconds
from bide.endpoint.observer import Observer
from bide.gate.observer import GateEvent, GateObserver
from bide.recoverability.exception_text import ExceptionText
from bide.recoverability.history import HEADER_OPERATOR_RETRIES
from bide.version import VERSION

try:
    from opentelemetry import context as contexts
    from opentelemetry import propagate, trace
    from opentelemetry.propagators.textmap import Getter
except ImportError as error:
    raise ImportError("bide.observability.tracing needs opentelemetry-api: install the extra, bide[tracing]") from error

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from bide.client.message import Message
    from bide.messages.prepared import PreparedMessage

SCHEMA: Final = "https://opentelemetry.io/schemas/1.44.0"
"""The release of the semantic conventions that define the names."""

NEW_TRACE: Final = "NServiceBus.OpenTelemetry.StartNewTrace"
"""Header with which a sender requests a new trace for the handler."""


class Tracing(Observer, GateObserver):
    """Creates spans: as one of the ``observers`` of an endpoint or a gate, or for a client with :meth:`stamp`.

    Args:
        tracer_provider: the tracer provider; None uses the global one, even if that is set later.
    """

    def __init__(self, tracer_provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("bide", VERSION, tracer_provider, SCHEMA)

    @contextmanager
    def stamp(self, message: PreparedMessage) -> Iterator[Mapping[str, str]]:
        """Create a producer span around the publishing of a message, and add its context to the message.

        Pass this method to ``bide.connect(stamp=...)``. If the headers of a message already contain a context, they are
        kept, and the span links to that context.
        """
        target = message.target
        own = _sender(propagate.extract(message.headers, contexts.Context(), getter=_HEADERS))
        exchange, routing_key = _address(target)
        attributes = _attributes(
            {
                "messaging.operation.name": "publish",
                "messaging.operation.type": "send",
                "messaging.destination.name": _destination(exchange, routing_key),
                "messaging.rabbitmq.destination.routing_key": routing_key,
                "messaging.message.id": message.message_id,
                "messaging.message.conversation_id": message.values.get("correlation_id"),
                "bide.delay": None if message.delay is None else message.delay.total_seconds(),
                "bide.due": None if message.due is None else message.due.isoformat(),
            }
        )
        span = self._tracer.start_span(
            f"publish {exchange or routing_key}", kind=trace.SpanKind.PRODUCER, attributes=attributes, links=_links(own)
        )
        carrier: dict[str, str] = {}
        if not own.is_valid:
            propagate.inject(carrier, trace.set_span_in_context(span))
        with _ending(span):
            yield carrier

    @contextmanager
    def handling(self, message: Message, *, endpoint: str, queue: str) -> Iterator[None]:
        """Create a consumer span around the handler of a message, as the current span."""
        context = propagate.extract(message.headers, contexts.Context(), getter=_HEADERS)
        sender = _sender(context)
        if _starts_new_trace(message):
            # Removes the sender's span and keeps its baggage.
            context = trace.set_span_in_context(trace.INVALID_SPAN, context)
        lateness = message.lateness if message.history.retries == 0 else None
        attributes = _attributes(
            {
                "messaging.operation.name": "process",
                "messaging.operation.type": "process",
                "messaging.destination.name": _destination(message.exchange, message.routing_key, queue),
                "messaging.rabbitmq.destination.routing_key": message.routing_key,
                "messaging.rabbitmq.message.delivery_tag": message.raw.delivery_tag,
                "messaging.message.id": message.message_id,
                "messaging.message.conversation_id": message.correlation_id,
                "bide.endpoint": endpoint,
                "bide.retries": message.history.retries,
                "bide.lateness": None if lateness is None else lateness.total_seconds(),
            }
        )
        span = self._tracer.start_span(
            f"process {queue}",
            context=context,
            kind=trace.SpanKind.CONSUMER,
            attributes=attributes,
            links=_links(sender),
        )
        token = contexts.attach(trace.set_span_in_context(span, context))
        try:
            with _ending(span):
                yield
        finally:
            contexts.detach(token)

    def at_gate(self, event: GateEvent) -> None:
        """Create a producer span for a delivery by a gate. It starts a new trace, and links to the sender's span."""
        if event.target is None or event.sent_at is None or event.ended_at is None:
            return
        kind, _, name = event.target.partition(":")
        exchange, routing_key = (name, event.routing_key or "") if kind == "x" else ("", name)
        attributes = _attributes(
            {
                "messaging.operation.name": "deliver",
                "messaging.operation.type": "send",
                "messaging.destination.name": _destination(exchange, routing_key),
                "messaging.rabbitmq.destination.routing_key": routing_key,
                "messaging.message.id": event.message_id,
                "bide.schedule.key": event.key,
                "bide.schedule.occurrence": event.occurrence,
                "bide.schedule.partition": event.partition,
                "bide.schedule.result": event.kind,
                "bide.gate": event.gate,
                "bide.due": None if event.due_at is None else event.due_at.isoformat(),
                "bide.lateness": None if event.lateness is None else event.lateness.total_seconds(),
            }
        )
        span = self._tracer.start_span(
            f"deliver {name}",
            context=contexts.Context(),
            kind=trace.SpanKind.PRODUCER,
            attributes=attributes,
            links=_links(_sender(propagate.extract(event.headers, contexts.Context(), getter=_HEADERS))),
            start_time=_nanoseconds(event.sent_at),
        )
        if event.kind != "delivered":
            span.set_status(trace.StatusCode.ERROR, event.text or event.kind)
        span.end(_nanoseconds(event.ended_at))


def trace_headers() -> dict[str, str]:
    """The headers with the current context, for messages that are published without :meth:`Tracing.stamp`.

    ``client.publish_many(bide.OutgoingMessage(row, to="orders", headers=headers) for row in rows)``: all these
    messages carry the context of the current span.
    """
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier


class _Headers(Getter[Mapping[str, Any]]):
    """Reads text for propagators from AMQP headers, which can have values of any type."""

    def get(self, carrier: Mapping[str, Any], key: str) -> list[str] | None:
        value = carrier.get(key)
        if isinstance(value, bytes):
            value = value.decode(errors="replace")
        return [value] if isinstance(value, str) else None

    def keys(self, carrier: Mapping[str, Any]) -> list[str]:
        return list(carrier)


_HEADERS: Final = _Headers()


def _starts_new_trace(message: Message) -> bool:
    """Whether the span of the handler starts a new trace."""
    return (
        message.due is not None
        or HEADER_OPERATOR_RETRIES in (message.raw.values.get("headers") or {})
        or str(message.headers.get(NEW_TRACE)).lower() == "true"
    )


@contextmanager
def _ending(span: trace.Span) -> Iterator[None]:
    """End the span after the block, and record an exception of the block in it."""
    try:
        yield
    except BaseException as error:
        explanation = ExceptionText.of(error)
        span.set_attribute("error.type", explanation.type)
        span.set_status(trace.StatusCode.ERROR, explanation.message)
        # A cancellation or the end of the program is not an exception of the traced code.
        if isinstance(error, Exception):
            span.record_exception(error)
        raise
    finally:
        span.end()


def _nanoseconds(moment: datetime) -> int:
    return to_microseconds(moment) * 1_000


def _sender(context: contexts.Context) -> trace.SpanContext:
    return trace.get_current_span(context).get_span_context()


def _links(sender: trace.SpanContext) -> list[trace.Link]:
    return [trace.Link(sender)] if sender.is_valid else []


def _address(target: Target) -> tuple[str, str]:
    return (target.exchange, target.routing_key) if isinstance(target, ExchangeTarget) else ("", target.queue)


def _destination(exchange: str, routing_key: str, queue: str = "") -> str:
    """``messaging.destination.name`` by the conventions for RabbitMQ: the parts that exist, each once."""
    return ":".join(part for part in (exchange, routing_key, queue if queue != routing_key else "") if part)


def _attributes(values: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    """The attributes with a value, and the messaging system."""
    return {
        "messaging.system": "rabbitmq",
        **{name: value for name, value in values.items() if value is not None and value != ""},
    }
