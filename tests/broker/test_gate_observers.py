"""Metrics, spans and events of a gate."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import bide
from bide.errors import InvalidInputError
from bide.gate import GateEvent, GateObserver
from bide.observability.metrics import Metrics
from bide.observability.tracing import Tracing
from bide.schedules.names import PARTITIONS, partition_of
from bide.topology import Queue, Topology
from tests.broker.receiving import eventually, receive
from tests.broker.schedule_log import NAMES, gating
from tests.leaks import no_leaks
from tests.support import Vhost
from tests.timeouts import TIMEOUT

PAGE = (Path(__file__).parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
async def quiet() -> AsyncIterator[None]:
    async with no_leaks():
        yield


@pytest.fixture
async def client(vhost: Vhost, quiet: None) -> AsyncIterator[bide.Client]:
    """A client, with a target and the schedule log."""
    async with bide.connect(vhost.url) as client:
        await client.declare(NAMES.topology() | Topology(queues=[Queue.quorum("mails")]))
        yield client


class Events(GateObserver):
    """Keeps the events, and fails at one."""

    def __init__(self) -> None:
        self.seen: list[GateEvent] = []

    def at_gate(self, event: GateEvent) -> None:
        self.seen.append(event)
        if event.key == "bad":
            raise ValueError("an observer may fail")


async def test_what_a_gate_does_is_counted_and_measured(client: bide.Client, vhost: Vhost, tmp_path: Path) -> None:
    registry = CollectorRegistry()
    metrics, events = Metrics(registry), Events()

    def values() -> dict[tuple[str, ...], float]:
        found = text_string_to_metric_families(generate_latest(registry).decode())
        samples = (sample for family in found for sample in family.samples if sample.name.startswith("bide_gate"))
        return {
            (sample.name, *(sample.labels[name] for name in sorted(sample.labels) if name != "gate")): sample.value
            for sample in samples
        }

    async with gating(vhost.url, tmp_path, allow=["mails"], observers=[metrics, events]) as gate:
        metrics.watch_gate(gate)

        async def leads_all() -> bool:
            return len(gate.leads) == PARTITIONS

        await eventually(leads_all)
        for key in ("paid", "waits", "waits", "waits"):
            await client.schedule(key=key, to="mails", delay="1h")
        assert (await client.cancel("paid")).outcome is bide.ScheduleOutcome.CANCELLED
        for key in ("good", "bad"):
            await client.schedule(key=key, to="mails", delay="0s")
        await client.schedule(key="forbidden", to="secret", delay="0s")
        await receive(client, "mails", 2)
        await receive(client, NAMES.undeliverable, 1)

        expected: dict[tuple[str, ...], float] = {
            ("bide_gate_messages_total", "delivered", "q:mails"): 2,
            ("bide_gate_messages_total", "undeliverable", "q:secret"): 1,
            ("bide_gate_lateness_seconds_count", "q:mails"): 2,
            ("bide_gate_occurrences_total", "claimed"): 3,
            ("bide_gate_occurrences_total", "cancelled"): 1,
            ("bide_gate_occurrences_total", "superseded"): 2,
            **{("bide_gate_partition_leading", str(one)): 1 for one in range(PARTITIONS)},
            **{("bide_gate_partition_waiting", str(one)): one == partition_of("waits") for one in range(PARTITIONS)},
        }
        found = values()

        async def are_shown() -> bool:
            # Each partition is read by a task of its own. A gate that has not read for 5 s does not lead.
            nonlocal found
            found = values()
            return expected.items() <= found.items()

        await eventually(are_shown)
    assert found["bide_gate_answers_total",] >= 1
    assert 0 <= found["bide_gate_partition_lag_seconds", "0"] < TIMEOUT
    documented = set(re.findall(r"^\| `(bide_gate_\w+)`", PAGE, re.MULTILINE))
    exported = {name for name, *_ in found if not name.endswith(("_created", "_bucket"))}
    assert {re.sub("seconds_(count|sum)$", "seconds", one) for one in exported} == documented

    kinds = {(one.kind, one.key) for one in events.seen}
    assert kinds == {
        ("cancelled", "paid"),
        ("superseded", "waits"),
        ("delivered", "good"),
        ("delivered", "bad"),
        ("undeliverable", "forbidden"),
    }
    (delivered,) = (one for one in events.seen if one.key == "good")
    assert delivered.lateness is not None
    assert delivered.lateness >= timedelta(0)
    (moved,) = (one for one in events.seen if one.key == "forbidden")
    assert "matches no allowed pattern" in (moved.text or "")


async def test_the_span_of_a_delivery_links_to_that_of_the_schedule(
    client: bide.Client, vhost: Vhost, tmp_path: Path
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider)
    async with (
        gating(vhost.url, tmp_path, allow=["mails"], observers=[tracing]) as gate,
        bide.connect(vhost.url, stamp=tracing.stamp) as sender,
    ):
        await sender.schedule(key="invoice:42", to="mails", delay="1h")
        await sender.reschedule("invoice:42", delay="0s")
        (message,) = await receive(client, "mails", 1)

        async def is_counted() -> bool:
            return gate.done.delivered == 1

        await eventually(is_counted)
    spans = {one.name: one for one in exporter.get_finished_spans()}
    assert spans.keys() == {"publish mails", "deliver mails"}
    sent, delivered = spans["publish mails"].get_span_context(), spans["deliver mails"]
    assert sent is not None
    assert delivered.kind is SpanKind.PRODUCER
    assert delivered.parent is None
    assert [one.context.span_id for one in delivered.links] == [sent.span_id]
    assert delivered.status.status_code is StatusCode.UNSET
    assert delivered.attributes is not None
    assert delivered.attributes["bide.schedule.key"] == "invoice:42"
    assert delivered.attributes["bide.schedule.result"] == "delivered"
    assert delivered.start_time is not None
    assert delivered.end_time is not None
    assert delivered.start_time <= delivered.end_time
    # The handler links to the same span.
    assert format(sent.span_id, "016x") in message.headers["traceparent"]


async def test_observers_are_checked() -> None:
    with pytest.raises(InvalidInputError, match="give a list of"):
        bide.Gate(allow=["*"], state="unused", observers=[asyncio])  # type: ignore[list-item]  # wrong on purpose
    with pytest.raises(InvalidInputError, match="because the schedule log is itself a stream"):
        bide.Gate(allow=["*"], state="unused", observers=[bide.EventStream()])  # type: ignore[list-item]  # wrong on purpose
