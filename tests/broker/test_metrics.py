"""Metrics of an endpoint, scraped over HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import bide
from bide.endpoint import Event
from bide.endpoint.event import Kind
from bide.errors import InvalidInputError
from bide.observability.metrics import OTHER, Metrics, MetricsPage
from tests.broker.endpoints import Recorder, running
from tests.broker.receiving import eventually, fresh
from tests.timeouts import TIMEOUT


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(registry)


@pytest.fixture
def page(metrics: Metrics) -> Iterator[MetricsPage]:
    with metrics.serve(0) as page:
        yield page


def fetch(page: MetricsPage) -> str:
    with urlopen(page.url, timeout=TIMEOUT) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain")
        text = reply.read().decode()
    assert isinstance(text, str)
    return text


class Samples:
    """The samples of a metrics page.

    Args:
        labels: that every sample is asked for with.
    """

    def __init__(self, text: str, **labels: str) -> None:
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        self._labels = labels

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._samples.get((name, frozenset({**self._labels, **labels}.items())))


async def read(page: MetricsPage, **labels: str) -> Samples:
    return Samples(await asyncio.to_thread(fetch, page), **labels)


def event(kind: Kind, **values: object) -> Event:
    now = datetime.now(UTC)
    known: dict[str, object] = {
        "kind": kind,
        "endpoint": "shop",
        "queue": "orders",
        "host": "h",
        "process": 1,
        "message_id": "1",
        "message_type": None,
        "attempt": 1,
        "retries": 0,
        "sent_at": None,
        "due_at": None,
        "delivered_at": now,
        "started_at": now,
        "ended_at": now,
    }
    return Event(**{**known, **values})  # type: ignore[arg-type]  # fields by name


async def test_every_event_is_counted(client: bide.Client, metrics: Metrics, page: MetricsPage) -> None:
    queue, recorder = fresh("counted"), Recorder()
    app = bide.Endpoint(
        queue,
        name="billing",
        error_queue=f"{queue}.error",
        retry=bide.Retry(immediate=1, delays=["50ms"], discard=(LookupError,)),
        deduplicate="1h",
        observers=[metrics, recorder],
    )
    tries: dict[str | None, int] = {}

    @app.handler(type="Pay")
    async def pay(message: bide.Message) -> None:
        tries[message.message_id] = tries.get(message.message_id, 0) + 1
        if message.body == b"bad":
            raise ValueError("no good")
        if message.body == b"once" and tries[message.message_id] == 1:
            raise TimeoutError("not yet")
        if message.body == b"drop":
            raise KeyError("missing")
        await asyncio.sleep(0.2)  # a time to measure

    async with running(app, client, recorder):
        await client.publish(b"good", to=queue, type="Pay", message_id="good")
        await recorder.until("processed")
        await client.publish(b"good", to=queue, type="Pay", message_id="good")
        await client.publish(b"once", to=queue, type="Pay", message_id="once")
        await client.publish(b"bad", to=queue, type="Pay", message_id="bad")
        await client.publish(b"drop", to=queue, type="Pay", message_id="drop")
        await client.publish(b"?", to=queue, type="Unknown", message_id="unknown")
        await recorder.until("parked", "discarded", "duplicate", "processed", count=6)
    value = await read(page, endpoint="billing", type="Pay")
    assert value("bide_messages_processed_total") == 2
    assert value("bide_messages_duplicate_total") == 1
    # The one that failed once, and the one that always fails: before the delayed retry, and after it.
    assert value("bide_message_retries_total", when="at_once") == 3
    assert value("bide_message_retries_total", when="later") == 1
    assert value("bide_message_failures_total", exception="TimeoutError") == 1
    assert value("bide_message_failures_total", exception="ValueError") == 4
    assert value("bide_message_failures_total", exception="KeyError") == 1
    assert value("bide_message_failures_total", exception="") is None
    assert value("bide_messages_parked_total", exception="ValueError") == 1
    assert value("bide_messages_discarded_total", exception="KeyError") == 1
    unknown = "bide.errors.UnknownMessageTypeError"
    assert value("bide_messages_parked_total", type="Unknown", exception=unknown) == 1
    # 2 handled, 1 + 4 + 1 failed; the two that were handled slept 200 ms.
    assert value("bide_message_handling_seconds_count") == 8
    running_time = value("bide_message_handling_seconds_sum")
    assert running_time is not None
    # In milliseconds it would be 400 or more.
    assert 0.4 <= running_time < 400
    assert (await read(page))("bide_messages_in_flight", endpoint="billing") == 0


async def test_lateness_is_that_of_the_first_delivery_of_a_delayed_message(
    client: bide.Client, metrics: Metrics, page: MetricsPage
) -> None:
    queue, recorder = fresh("late"), Recorder()
    app = bide.Endpoint(
        queue,
        error_queue=f"{queue}.error",
        retry=bide.Retry(immediate=1, delays=["50ms"]),
        observers=[metrics, recorder],
    )

    @app.handler
    async def fail(message: bide.Message) -> None:
        if message.message_id == "bad":
            raise ValueError("never")

    async with running(app, client, recorder):
        await client.publish(b"", to=queue, message_id="now")
        await client.publish(b"", to=queue, message_id="later", delay="100ms")
        await client.publish(b"", to=queue, message_id="bad", delay="100ms")
        await recorder.until("processed", "parked", count=3)
    late = [one.lateness.total_seconds() for one in recorder.events if one.attempt == 1 and one.lateness is not None]
    assert len(late) == 2
    value = await read(page, endpoint=queue, type="")
    assert value("bide_message_lateness_seconds_count") == 2
    assert value("bide_message_lateness_seconds_sum") == pytest.approx(sum(late))
    for bound in ("0.01", "0.1", "1.0", "60.0", "+Inf"):
        expected = sum(one <= float(bound) for one in late)
        assert value("bide_message_lateness_seconds_bucket", le=bound) == expected


async def test_in_flight_and_slow_show_the_current_state(
    client: bide.Client, metrics: Metrics, page: MetricsPage
) -> None:
    queue, recorder = fresh("moment"), Recorder()
    app = bide.Endpoint(
        queue,
        error_queue=f"{queue}.error",
        retry=bide.Retry(immediate=0, delays=()),
        slow_down_after=1,
        observers=[metrics, recorder],
    )
    metrics.watch(app)
    inside, go_on = asyncio.Semaphore(0), asyncio.Event()

    @app.handler
    async def handle(message: bide.Message) -> None:
        inside.release()
        await go_on.wait()
        if message.body == b"bad":
            raise ValueError("never")

    async with running(app, client, recorder):
        for _ in range(3):
            await client.publish(b"", to=queue)
        async with asyncio.timeout(TIMEOUT):
            for _ in range(3):
                await inside.acquire()
        value = await read(page, endpoint=queue)
        assert (value("bide_messages_in_flight"), value("bide_endpoint_slow")) == (3, 0)
        go_on.set()
        await recorder.until("processed", count=3)
        await client.publish(b"bad", to=queue)
        await recorder.until("parked")

        async def slow() -> bool:
            return (await read(page, endpoint=queue))("bide_endpoint_slow") == 1

        await eventually(slow)
        await client.publish(b"", to=queue)
        await recorder.until("processed", count=4)
    value = await read(page, endpoint=queue)
    assert (value("bide_messages_in_flight"), value("bide_endpoint_slow")) == (0, 0)


async def test_expired_and_poison_messages_are_not_counted_as_failures(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    await metrics.happened(event("expired", started_at=None))
    await metrics.happened(event("parked", started_at=None, exception="bide.errors.PoisonMessageError"))
    text = generate_latest(registry).decode()
    value = Samples(text, endpoint="shop", type="")
    assert value("bide_messages_expired_total") == 1
    assert value("bide_messages_parked_total", exception="bide.errors.PoisonMessageError") == 1
    assert "bide_message_failures_total{" not in text
    assert "bide_message_handling_seconds_count{" not in text


async def test_negative_times_count_as_zero(metrics: Metrics, registry: CollectorRegistry) -> None:
    now = datetime.now(UTC)
    await metrics.happened(event("processed", lateness=-timedelta(hours=1), ended_at=now - timedelta(hours=1)))
    value = Samples(generate_latest(registry).decode(), endpoint="shop", type="")
    for name in ("bide_message_lateness_seconds", "bide_message_handling_seconds"):
        assert (value(f"{name}_count"), value(f"{name}_sum")) == (1, 0)


async def test_the_number_of_message_types_is_limited(metrics: Metrics, registry: CollectorRegistry) -> None:
    for number in range(1000):
        await metrics.happened(event("processed", message_type=f"type-{number}"))
    await metrics.happened(event("processed", message_type="type-7"))
    await metrics.happened(event("processed", message_type="x" * 100_000))
    text = generate_latest(registry).decode()
    assert text.count("bide_messages_processed_total{") == 101
    assert len(text) < 1_000_000
    value = Samples(text, endpoint="shop")
    assert value("bide_messages_processed_total", type="type-7") == 2
    assert value("bide_messages_processed_total", type=OTHER) == 901


def test_a_second_metrics_object_on_a_registry_is_refused(metrics: Metrics, registry: CollectorRegistry) -> None:
    with pytest.raises(
        InvalidInputError, match=r"bide_messages_processed.*give one bide\.observability\.metrics\.Metrics to all"
    ):
        Metrics(registry)


def test_the_page_listens_on_loopback_until_it_is_closed(metrics: Metrics, page: MetricsPage) -> None:
    assert page.url.startswith("http://127.0.0.1:")
    port = int(page.url.split(":")[2].split("/")[0])
    with pytest.raises(InvalidInputError, match=rf"127\.0\.0\.1:{port}.*give another port, or 0"):
        metrics.serve(port)
    page.close()
    page.close()
    with pytest.raises(URLError):
        fetch(page)


def test_without_the_extra_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; import bide.observability.metrics"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 1
    assert (
        "ImportError: bide.observability.metrics needs prometheus-client: install the extra, bide[metrics]"
        in done.stderr
    )
