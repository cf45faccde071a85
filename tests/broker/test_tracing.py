"""OpenTelemetry spans across the broker, recorded by the real SDK."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as contexts
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv import schemas
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.trace import SpanKind, StatusCode

import bide
from bide.errors import ReservedHeaderError, TargetNotFoundError, UnroutableError
from bide.messages.prepared import PreparedMessage
from bide.observability.tracing import NEW_TRACE, SCHEMA, Tracing, trace_headers
from bide.recoverability.failed import FailedMessage
from bide.recoverability.redrive import back
from bide.topology import Binding, Exchange, Queue
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.endpoints import Recorder, running
from tests.broker.receiving import fresh, receive
from tests.timeouts import TIMEOUT

REMOTE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

CONVENTIONS = {
    name
    for namespace in (messaging_attributes, error_attributes)
    for name in vars(namespace).values()
    if isinstance(name, str)
}
"""The names of attributes in the semantic conventions, as OpenTelemetry publishes them."""


class Spans:
    """The recorded spans and their provider."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(self._provider)
        self.tracer = self._provider.get_tracer("the program")

    def named(self, name: str) -> list[ReadableSpan]:
        """The ended spans of this name, in the order in which they ended."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """The only span of this name."""
        (span,) = self.named(name)
        return span


@pytest.fixture
def spans() -> Spans:
    return Spans()


def identity(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def parent(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def links(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    assert span.attributes is not None
    return span.attributes


def endpoint(queue: str, observers: Sequence[bide.Observer], **options: Any) -> bide.Endpoint:
    # The default's 30 s are more than the small infrastructure of these tests holds.
    options.setdefault("retry", bide.Retry(delays=["1s"]))
    return bide.Endpoint(queue, error_queue=f"{queue}.error", observers=observers, **options)


async def test_an_undelayed_message_is_handled_in_the_trace_of_its_sender(clock_url: str, spans: Spans) -> None:
    queue, exchange, recorder = fresh("now"), fresh("shop"), Recorder()
    app = endpoint(queue, [spans.tracing, recorder], name="billing")
    current: list[tuple[int, int]] = []

    @app.handler(type="async")
    async def here(message: bide.Message) -> None:
        with spans.tracer.start_as_current_span("work"):
            await asyncio.sleep(0)  # others run meanwhile

    @app.handler(type="plain")
    def in_a_thread(message: bide.Message) -> None:
        assert threading.current_thread() is not threading.main_thread()
        context = trace.get_current_span().get_span_context()
        current.append((context.trace_id, context.span_id))

    async with bide.connect(clock_url, infrastructure=SMALL_CLOCK, stamp=spans.tracing.stamp) as client:
        await client.declare(
            bide.Topology([Exchange(exchange, "topic")], [Queue(queue)], [Binding(exchange, queue, "order.*")])
        )
        async with running(app, client, recorder):
            with spans.tracer.start_as_current_span("request"):
                await client.publish(
                    b"", exchange=exchange, routing_key="order.17", type="async", message_id="m1", correlation_id="c1"
                )
            await recorder.until("processed")
            await client.publish(b"", to=queue, type="plain")
            await recorder.until("processed", count=2)

    request, sent, work = spans.one("request"), spans.one(f"publish {exchange}"), spans.one("work")
    handled, plain = spans.named(f"process {queue}")
    assert parent(sent) == identity(request)
    assert parent(handled) == identity(sent)
    assert parent(work) == identity(handled)
    assert links(handled) == [identity(sent)]
    assert sent.kind is SpanKind.PRODUCER
    assert handled.kind is SpanKind.CONSUMER
    assert sent.status.status_code is handled.status.status_code is StatusCode.UNSET
    assert dict(attributes(sent)) == {
        "messaging.system": "rabbitmq",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": f"{exchange}:order.17",
        "messaging.rabbitmq.destination.routing_key": "order.17",
        "messaging.message.id": "m1",
        "messaging.message.conversation_id": "c1",
    }
    ours = {"bide.endpoint", "bide.retries"}
    assert {*attributes(sent), *attributes(handled)} - ours <= CONVENTIONS
    tag = attributes(handled)["messaging.rabbitmq.message.delivery_tag"]
    assert tag >= 1
    assert dict(attributes(handled)) == {
        "messaging.system": "rabbitmq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": f"{exchange}:order.17:{queue}",
        "messaging.rabbitmq.destination.routing_key": "order.17",
        "messaging.rabbitmq.message.delivery_tag": tag,
        "messaging.message.id": "m1",
        "messaging.message.conversation_id": "c1",
        "bide.endpoint": "billing",
        "bide.retries": 0,
    }
    assert current == [identity(plain)]
    assert parent(plain) == identity(spans.one(f"publish {queue}"))
    assert attributes(plain)["messaging.destination.name"] == queue


async def test_a_delayed_message_starts_a_trace_linked_to_that_of_its_sender(clock_url: str, spans: Spans) -> None:
    queue, recorder = fresh("delayed"), Recorder()
    app = endpoint(queue, [spans.tracing, recorder])
    seen: list[str | None] = []

    @app.handler
    async def handle(message: bide.Message) -> None:
        value = baggage.get_baggage("tenant")
        seen.append(value if isinstance(value, str) else None)

    async with (
        bide.connect(clock_url, infrastructure=SMALL_CLOCK, stamp=spans.tracing.stamp) as client,
        running(app, client, recorder),
    ):
        await client.publish(b"", to=queue, delay="100ms", headers={"baggage": "tenant=acme"})
        await recorder.until("processed")
    sent, handled = spans.one(f"publish {queue}"), spans.one(f"process {queue}")
    assert attributes(sent)["bide.delay"] == 0.1
    assert handled.parent is None
    assert identity(handled)[0] != identity(sent)[0]
    assert links(handled) == [identity(sent)]
    assert 0 <= attributes(handled)["bide.lateness"] < 30
    assert attributes(handled)["messaging.destination.name"] == queue
    # The sender's baggage reaches the handler of the message, in any trace.
    assert seen == ["acme"]


async def test_every_retry_links_to_the_first_sending(clock_url: str, spans: Spans) -> None:
    queue, recorder = fresh("retried"), Recorder()
    app = endpoint(queue, [spans.tracing, recorder], retry=bide.Retry(immediate=1, delays=["50ms"]))

    @app.handler
    async def fail(message: bide.Message) -> None:
        raise ValueError("no good")

    async with bide.connect(clock_url, infrastructure=SMALL_CLOCK, stamp=spans.tracing.stamp) as client:
        async with running(app, client, recorder):
            await client.publish(b"", to=queue)
            await recorder.until("parked")
        assert recorder.kinds() == ["failed", "retried", "failed", "parked"]
        # An operator sends it back, some night later.
        (parked,) = await receive(client, f"{queue}.error", 1)
        failed = FailedMessage.read(parked.raw.exchange, parked.raw.routing_key, parked.raw.values, parked.body)
        recorder.ready.clear()
        async with running(app, client, recorder):
            await client.forward(back(failed))
            await recorder.until("parked", count=2)
    # Of the endpoint's and the operator's own sendings there is no span: the message is the one that was sent.
    sent = spans.one(f"publish {queue}")
    attempts = spans.named(f"process {queue}")
    assert len(attempts) == 8
    assert all(links(one) == [identity(sent)] for one in attempts)
    at_once, later = attempts[:2], attempts[2:]
    assert [parent(one) for one in at_once] == [identity(sent)] * 2
    assert [one.parent for one in later] == [None] * 6
    assert len({identity(one)[0] for one in attempts}) == 7
    assert [attributes(one)["bide.retries"] for one in attempts] == [0, 0, 1, 1, 0, 0, 1, 1]


async def test_a_failed_handler_is_recorded_with_its_exception(client: bide.Client, spans: Spans) -> None:
    queue, recorder = fresh("failing"), Recorder()
    app = endpoint(queue, [spans.tracing, recorder], retry=bide.Retry(immediate=0, delays=()))

    @app.handler
    async def fail(message: bide.Message) -> None:
        raise ConnectionError("the payment service does not answer")

    async with running(app, client, recorder):
        await client.publish(b"", to=queue)
        await recorder.until("parked")
    span = spans.one(f"process {queue}")
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "the payment service does not answer"
    assert attributes(span)[error_attributes.ERROR_TYPE] == "ConnectionError"
    (event,) = span.events
    assert event.name == "exception"
    assert event.attributes is not None
    assert event.attributes["exception.type"] == "ConnectionError"
    assert "in fail" in str(event.attributes["exception.stacktrace"])
    # The message came without a context: nothing to link to.
    assert (span.parent, links(span)) == (None, [])


async def test_a_cancelled_handler_records_no_exception(client: bide.Client, spans: Spans) -> None:
    queue, recorder, inside = fresh("cancelled"), Recorder(), asyncio.Event()
    app = endpoint(queue, [spans.tracing, recorder], drain="10ms")

    @app.handler
    async def hang(message: bide.Message) -> None:
        inside.set()
        await asyncio.Event().wait()

    async with running(app, client, recorder):
        await client.publish(b"", to=queue)
        await asyncio.wait_for(inside.wait(), TIMEOUT)
    span = spans.one(f"process {queue}")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "asyncio.exceptions.CancelledError"
    assert not span.events


@pytest.mark.parametrize(
    ("headers", "is_child"),
    [
        ({"traceparent": REMOTE}, True),
        ({"traceparent": REMOTE, "tracestate": "vendor=7", NEW_TRACE: "False"}, True),
        ({"traceparent": REMOTE, "tracestate": "vendor=7", NEW_TRACE: "True"}, False),
        ({"traceparent": REMOTE.encode()}, True),
    ],
)
async def test_trace_headers_of_nservicebus_are_read(
    client: bide.Client, spans: Spans, headers: dict[str, Any], is_child: bool
) -> None:
    queue, recorder = fresh("nsb"), Recorder()
    app = endpoint(queue, [spans.tracing, recorder])

    @app.handler
    async def handle(message: bide.Message) -> None:
        assert message.headers["traceparent"]

    async with running(app, client, recorder):
        await client.publish(b"", to=queue, headers=headers)
        await recorder.until("processed")
    span = spans.one(f"process {queue}")
    remote = (int(REMOTE.split("-")[1], 16), int(REMOTE.split("-")[2], 16))
    assert links(span) == [remote]
    assert parent(span) == (remote if is_child else None)
    assert dict(span.links[0].context.trace_state) == ({"vendor": "7"} if "tracestate" in headers else {})


@pytest.mark.parametrize("value", [7, "", "00-zz-1-01", ["00-1-2-01"], b"\xff\xfe", {"a": 1}, None])
async def test_malformed_trace_headers_are_ignored(client: bide.Client, spans: Spans, value: Any) -> None:
    queue = fresh("odd")
    await client.declare(bide.Topology(queues=[Queue(queue)]))
    await client.publish(b"", to=queue, headers={"traceparent": value, "tracestate": value, "baggage": value})
    (message,) = await receive(client, queue, 1)
    with spans.tracing.handling(message, endpoint="shop", queue=queue):
        pass
    span = spans.one(f"process {queue}")
    assert (span.parent, links(span)) == (None, [])


async def test_a_trace_context_given_by_the_caller_is_kept(clock_url: str, spans: Spans) -> None:
    queue = fresh("own")
    async with bide.connect(clock_url, infrastructure=SMALL_CLOCK, stamp=spans.tracing.stamp) as client:
        await client.declare(bide.Topology(queues=[Queue(queue)]))
        with spans.tracer.start_as_current_span("request"):
            token = contexts.attach(baggage.set_baggage("tenant", "acme"))
            await client.publish(b"", to=queue, headers={"traceparent": REMOTE, "tenant": 7})
            contexts.detach(token)
        (message,) = await receive(client, queue, 1)
    assert dict(message.headers) == {"traceparent": REMOTE, "tenant": 7}
    sent = spans.one(f"publish {queue}")
    assert parent(sent) == identity(spans.one("request"))
    assert [f"{span_id:016x}" for _, span_id in links(sent)] == [REMOTE.split("-")[2]]


async def test_headers_of_the_message_take_precedence_over_the_stamp(clock_url: str) -> None:
    queue, ended = fresh("stamped"), []

    @contextmanager
    def stamp(message: PreparedMessage) -> Iterator[dict[str, str]]:
        yield {"tenant": "acme", "mine": "no", **({"bide-due": "1"} if message.message_id == "bad" else {})}
        ended.append(message.message_id)

    async with bide.connect(clock_url, infrastructure=SMALL_CLOCK, stamp=stamp) as client:
        await client.declare(bide.Topology(queues=[Queue(queue)]))
        await client.publish(b"", to=queue, message_id="good", delay="50ms", headers={"mine": "yes"})
        with pytest.raises(ReservedHeaderError, match="bide-due"):
            await client.publish(b"", to=queue, message_id="bad")
        (message,) = await receive(client, queue, 1)
    assert dict(message.headers) == {"tenant": "acme", "mine": "yes"}
    assert ended == ["good"]


async def test_a_refused_message_ends_its_span_with_the_error(clock_url: str, spans: Spans) -> None:
    queue, exchange = fresh("nowhere"), fresh("empty")
    async with bide.connect(clock_url, infrastructure=SMALL_CLOCK, stamp=spans.tracing.stamp) as client:
        await client.declare(bide.Topology([Exchange(exchange, "topic")]))
        with pytest.raises(UnroutableError):
            await client.publish(b"", exchange=exchange, routing_key="a")
        # It fails in another way if it is sent without a delay, because it is due by then.
        due = datetime.now(UTC) + timedelta(seconds=15)
        with pytest.raises(TargetNotFoundError):
            await client.publish(b"", to=queue, deliver_at=due)
    assert attributes(spans.one(f"publish {queue}"))["bide.due"] == due.isoformat()
    for name, kind in ((exchange, "UnroutableError"), (queue, "TargetNotFoundError")):
        span = spans.one(f"publish {name}")
        assert span.status.status_code is StatusCode.ERROR
        assert attributes(span)["error.type"] == f"bide.errors.{kind}"


async def test_events_and_copies_are_not_traced(clock_url: str, spans: Spans) -> None:
    queue, stream, recorder = fresh("quiet"), fresh("events"), Recorder()
    app = endpoint(queue, [spans.tracing, bide.EventStream(stream), recorder])

    @app.handler
    async def handle(message: bide.Message) -> None:
        assert message.headers["traceparent"]

    async with (
        bide.connect(clock_url, infrastructure=SMALL_CLOCK, stamp=spans.tracing.stamp) as client,
        running(app, client, recorder),
    ):
        await client.publish(b"", to=queue)
        await recorder.until("processed")
        async with client.consume(stream, arguments={"x-stream-offset": "first"}) as events:
            event = await asyncio.wait_for(anext(events), TIMEOUT)
            assert event.json()["event"] == "processed"
            assert "traceparent" not in event.headers
    assert not spans.named(f"publish {stream}")


async def test_bulk_messages_carry_the_given_context(clock_url: str, spans: Spans) -> None:
    queue = fresh("many")
    async with bide.connect(clock_url, infrastructure=SMALL_CLOCK) as client:
        await client.declare(bide.Topology(queues=[Queue(queue)]))
        with spans.tracer.start_as_current_span("import") as span:
            flags = span.get_span_context().trace_flags
            headers = trace_headers()
            await client.publish_many(
                bide.OutgoingMessage(str(number), to=queue, headers=headers) for number in range(3)
            )
        messages = await receive(client, queue, 3)
    assert trace_headers() == {}
    trace_id, span_id = identity(spans.one("import"))
    for message in messages:
        assert message.headers["traceparent"] == f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"


async def test_the_synchronous_client_keeps_the_span_of_the_caller(clock_url: str, spans: Spans) -> None:
    queue = fresh("sync")

    def script() -> None:
        stamp = spans.tracing.stamp
        with bide.connect_sync(clock_url, infrastructure=SMALL_CLOCK, stamp=stamp) as client:
            client.declare(bide.Topology(queues=[Queue(queue)]))
            with spans.tracer.start_as_current_span("script"):
                client.publish(b"", to=queue)

    await asyncio.to_thread(script)
    assert parent(spans.one(f"publish {queue}")) == identity(spans.one("script"))


async def test_without_an_sdk_the_context_of_the_sender_is_passed_on(client: bide.Client) -> None:
    queue, recorder, tracing = fresh("api"), Recorder(), Tracing()
    app = endpoint(queue, [tracing, recorder])
    inside: list[dict[str, str]] = []

    @app.handler
    async def handle(message: bide.Message) -> None:
        inside.append(trace_headers())

    async with running(app, client, recorder):
        await client.publish(b"", to=queue, headers={"traceparent": REMOTE})
        await recorder.until("processed")
    assert inside == [{"traceparent": REMOTE}]


def test_the_schema_url_exists() -> None:
    assert SCHEMA in {one.value for one in schemas.Schemas}


def test_without_the_extra_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['opentelemetry'] = None; import bide.observability.tracing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 1
    assert (
        "ImportError: bide.observability.tracing needs opentelemetry-api: install the extra, bide[tracing]"
        in done.stderr
    )
