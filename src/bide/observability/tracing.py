"""OpenTelemetry spans of publishing and handling, linked across the delay.

Spans and attributes are those of OpenTelemetry's semantic conventions for messaging and for RabbitMQ; the names of
spans leave the routing key out, of which there may be any number. The context travels in the headers ``traceparent``
and ``tracestate`` (W3C Trace Context; NServiceBus has the same names), or in those of whatever propagator the program
has set up.

Whether a handler's span belongs to the sender's trace:

- A message that was sent to be handled now: its span is a child of the sender's. So are those of its retries at once.
- One that was delayed, retried later, or sent back by an operator: its span begins a trace of its own. A trace that
  stays open for three days is of no use, and whether the sender's was sampled should not decide whether this
  one is (rule of NServiceBus).
- A sender may ask for the second by the header ``NServiceBus.OpenTelemetry.StartNewTrace: True``.

In every case the span links to the sender's. As copies keep their headers, all retries link to the first sending.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from bide.delay.protocol import ExchangeTarget, Target
from bide.endpoint.observer import Observer
from bide.recoverability.exception_text import ExceptionText
from bide.recoverability.history import HEADER_RETRIED_BY
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
"""The release of the semantic conventions that the names are of."""

NEW_TRACE: Final = "NServiceBus.OpenTelemetry.StartNewTrace"
"""Header by which a sender asks for a trace of its own for the handling."""


class Tracing(Observer):
    """Spans for an endpoint, as one of its ``observers``, and for a client, by its :meth:`stamp`.

    Args:
        tracer_provider: the global one if None, also where that is set later.
    """

    def __init__(self, tracer_provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("bide", VERSION, tracer_provider, SCHEMA)

    @contextmanager
    def stamp(self, message: PreparedMessage) -> Iterator[Mapping[str, str]]:
        """A producer's span around the sending of a message, whose context the message carries.

        For ``bide.connect(stamp=...)``. A message that has a context in its headers already keeps it, and the span
        links to that.
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
        with _ended(span):
            yield carrier

    @contextmanager
    def handling(self, message: Message, *, endpoint: str, queue: str) -> Iterator[None]:
        """A consumer's span around a message's handler, which finds it as the current one."""
        context = propagate.extract(message.headers, contexts.Context(), getter=_HEADERS)
        sender = _sender(context)
        if _is_apart(message):
            # Without the sender's span; with its baggage, if it sent any.
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
            with _ended(span):
                yield
        finally:
            contexts.detach(token)


def trace_headers() -> dict[str, str]:
    """The headers that carry the current context, for messages that no :meth:`Tracing.stamp` is called for.

    ``client.publish_many(bide.OutgoingMessage(row, to="orders", headers=headers) for row in rows)``: all of them then
    belong to the span around it.
    """
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier


class _Headers(Getter[Mapping[str, Any]]):
    """Reads what propagators understand from the headers of AMQP, which may hold anything."""

    def get(self, carrier: Mapping[str, Any], key: str) -> list[str] | None:
        value = carrier.get(key)
        if isinstance(value, bytes):
            value = value.decode(errors="replace")
        return [value] if isinstance(value, str) else None

    def keys(self, carrier: Mapping[str, Any]) -> list[str]:
        return list(carrier)


_HEADERS: Final = _Headers()


def _is_apart(message: Message) -> bool:
    """Whether the handling is too far from the sending for one trace."""
    return (
        message.due is not None
        or HEADER_RETRIED_BY in (message.raw.values.get("headers") or {})
        or str(message.headers.get(NEW_TRACE)).lower() == "true"
    )


@contextmanager
def _ended(span: trace.Span) -> Iterator[None]:
    """End the span at the end of the block; an exception from the block is recorded in it."""
    try:
        yield
    except BaseException as error:
        explanation = ExceptionText.of(error)
        span.set_attribute("error.type", explanation.type)
        span.set_status(trace.StatusCode.ERROR, explanation.message)
        # A cancellation, or the end of the program, is not an exception of the traced code.
        if isinstance(error, Exception):
            span.record_exception(error)
        raise
    finally:
        span.end()


def _sender(context: contexts.Context) -> trace.SpanContext:
    return trace.get_current_span(context).get_span_context()


def _links(sender: trace.SpanContext) -> list[trace.Link]:
    return [trace.Link(sender)] if sender.is_valid else []


def _address(target: Target) -> tuple[str, str]:
    return (target.exchange, target.routing_key) if isinstance(target, ExchangeTarget) else ("", target.queue)


def _destination(exchange: str, routing_key: str, queue: str = "") -> str:
    """``messaging.destination.name`` by the conventions for RabbitMQ: what there is of the three, each once."""
    return ":".join(part for part in (exchange, routing_key, queue if queue != routing_key else "") if part)


def _attributes(values: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    """The attributes that have a value."""
    return {
        "messaging.system": "rabbitmq",
        **{name: value for name, value in values.items() if value is not None and value != ""},
    }
