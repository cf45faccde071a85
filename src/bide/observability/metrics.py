"""Metrics of endpoints, gates and relays for Prometheus; the extra ``bide[metrics]``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from bide.client.failover import moves
from bide.endpoint.observer import Observer
from bide.errors import InvalidInputError
from bide.gate.observer import GateEvent, GateObserver, PartitionStatus

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("bide.observability.metrics needs prometheus-client: install the extra, bide[metrics]") from error

if TYPE_CHECKING:
    from bide.client.message import Message
    from bide.endpoint.endpoint import Endpoint
    from bide.endpoint.event import Event
    from bide.gate.worker import Gate
    from bide.relay.worker import Relay

LATENESS_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
HANDLING_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the histograms, in seconds."""

OTHER: Final = "(other)"
"""The value of a label after it has had too many different values."""

_MAX_VALUES: Final = 100
_MAX_LENGTH: Final = 200

_MESSAGE: Final = ("endpoint", "type")
_FAILURE: Final = (*_MESSAGE, "exception")


class Metrics(Observer, GateObserver):
    """Prometheus metrics of all endpoints, gates and relays of a process.

    Use one instance for all of them; the label ``endpoint`` distinguishes endpoints. The label ``type`` is the message
    type, empty if a message has none. Senders choose message types, and exception classes can be created at run time.
    To limit memory, only the first 100 values of each of these labels are kept, and later ones are counted as
    ``(other)``.

    ``bide_connection_moves_total`` counts how often a connection of this process left a broken node for another one, by
    the reason: ``silent`` or ``unconfirmed``.

    Args:
        registry: a registry of prometheus-client; its default registry if None.
        lateness_buckets: upper bounds for ``bide_message_lateness_seconds``, in seconds.
        handling_buckets: upper bounds for ``bide_message_handling_seconds``, in seconds.

    Raises:
        InvalidInputError: the registry already has metrics with these names.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        lateness_buckets: Sequence[float] = LATENESS_BUCKETS,
        handling_buckets: Sequence[float] = HANDLING_BUCKETS,
    ) -> None:
        self._registry = registry = REGISTRY if registry is None else registry
        self._types = _Values()
        self._targets = _Values()
        self._exceptions = _Values()
        try:
            self._processed = Counter(
                "bide_messages_processed", "Messages that were handled.", _MESSAGE, registry=registry
            )
            self._failures = Counter(
                "bide_message_failures", "Attempts at which a handler raised.", _FAILURE, registry=registry
            )
            self._retries = Counter(
                "bide_message_retries",
                "Messages to be retried, at_once or later.",
                (*_MESSAGE, "when"),
                registry=registry,
            )
            self._parked = Counter(
                "bide_messages_parked", "Messages that failed for good.", _FAILURE, registry=registry
            )
            self._discarded = Counter(
                "bide_messages_discarded", "Messages that the retry policy dropped.", _FAILURE, registry=registry
            )
            self._expired = Counter("bide_messages_expired", "Messages that had expired.", _MESSAGE, registry=registry)
            self._duplicates = Counter(
                "bide_messages_duplicate",
                "Messages that were acknowledged as duplicates, without handling them.",
                _MESSAGE,
                registry=registry,
            )
            self._lateness = Histogram(
                "bide_message_lateness_seconds",
                "Time from the due time of a delayed message to its first delivery.",
                _MESSAGE,
                registry=registry,
                buckets=lateness_buckets,
            )
            self._handling = Histogram(
                "bide_message_handling_seconds",
                "Running time of handlers, including failed ones.",
                _MESSAGE,
                registry=registry,
                buckets=handling_buckets,
            )
            self._in_flight = Gauge(
                "bide_messages_in_flight",
                "Messages that are being handled.",
                ("endpoint",),
                registry=registry,
                multiprocess_mode="livesum",
            )
            registry.register(_Moves())
            self._gates = _Gates()
            registry.register(self._gates)
            self._relays = _Relays()
            registry.register(self._relays)
            self._scheduled = Counter(
                "bide_gate_messages",
                "Results of deliveries of scheduled messages: delivered, refused or undeliverable.",
                ("target", "result"),
                registry=registry,
            )
            self._gate_lateness = Histogram(
                "bide_gate_lateness_seconds",
                "Time from the due time of a scheduled message until the gate sent it.",
                ("target",),
                registry=registry,
                buckets=lateness_buckets,
            )
            self._slow = Gauge(
                "bide_endpoint_slow",
                "1 while consecutive failures limit the endpoint to one message at a time.",
                ("endpoint",),
                registry=registry,
            )
        except ValueError as error:
            raise InvalidInputError(
                f"the metrics cannot be registered: {error}; give one bide.observability.metrics.Metrics to "
                "all endpoints of the process, or each its own registry"
            ) from error

    def watch(self, endpoint: Endpoint) -> None:
        """Export ``bide_endpoint_slow``: whether consecutive failures slow this endpoint down.

        If the endpoint hosts a gate, the metrics of :meth:`watch_gate` are exported for that gate too.

        The values are read at each scrape. They are missing in the multiprocess mode of prometheus-client.
        """
        self._gates.watched.append(lambda: endpoint.gate)
        self._slow.labels(endpoint.name).set_function(lambda: float(endpoint.slow))

    def watch_gate(self, gate: Gate) -> None:
        """Export the state and the counts of a gate.

        The metrics are ``bide_gate_partition_*``, ``bide_gate_occurrences_total`` and ``bide_gate_answers_total``.

        The values are read at each scrape. They are missing in the multiprocess mode of prometheus-client.
        """
        self._gates.watched.append(lambda: gate)

    def watch_relay(self, relay: Relay) -> None:
        """Export the counts of a relay: ``bide_relay_messages_total``.

        The values are read at each scrape. They are missing in the multiprocess mode of prometheus-client.
        """
        self._relays.watched.append(relay)

    def serve(self, port: int, *, host: str = "127.0.0.1") -> MetricsPage:
        """Serve the registry over HTTP, in a thread, until :meth:`MetricsPage.close`.

        Args:
            port: the port; 0 chooses a free one, see :attr:`MetricsPage.url`.
            host: the address to listen on; by default only this machine can connect.

        Raises:
            InvalidInputError: the server cannot listen on that address.
        """
        return MetricsPage(port, host, self._registry)

    @contextmanager
    def handling(self, message: Message, *, endpoint: str, queue: str) -> Iterator[None]:
        """Count a message as in flight."""
        with self._in_flight.labels(endpoint).track_inprogress():
            yield

    def at_gate(self, event: GateEvent) -> None:
        """Count and measure the result of a delivery. The gate counts other events; see :meth:`watch_gate`."""
        if event.target is None:
            return
        target = self._targets.of(event.target)
        self._scheduled.labels(target, event.kind).inc()
        if event.kind == "delivered" and event.lateness is not None:
            self._gate_lateness.labels(target).observe(_seconds(event.lateness))

    async def happened(self, event: Event) -> None:
        """Count and measure an event."""
        message = (event.endpoint, self._types.of(event.message_type))
        failure = (*message, self._exceptions.of(event.exception))
        match event.kind:
            case "processed":
                self._processed.labels(*message).inc()
            case "failed":
                self._retries.labels(*message, "at_once").inc()
            case "retried":
                self._retries.labels(*message, "later").inc()
            case "parked":
                self._parked.labels(*failure).inc()
            case "discarded":
                self._discarded.labels(*failure).inc()
            case "expired":
                self._expired.labels(*message).inc()
            case "duplicate":
                self._duplicates.labels(*message).inc()
        if event.started_at is not None:
            if event.exception is not None:
                self._failures.labels(*failure).inc()
            self._handling.labels(*message).observe(_seconds(event.ended_at - event.started_at))
        # Only first attempts are measured, because retries are late by design.
        if event.attempt == 1 and event.lateness is not None:
            self._lateness.labels(*message).observe(_seconds(event.lateness))


class MetricsPage:
    """Metrics over HTTP. Created by :meth:`Metrics.serve`.

    Attributes:
        url: the URL of the page.
    """

    def __init__(self, port: int, host: str, registry: CollectorRegistry) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise InvalidInputError(
                f"metrics cannot be served on {host}:{port} ({error}): give another port, or 0 for a free one"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server. Calling it again has no effect."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Moves(Collector):
    """Exports counters of this process. They are missing in the multiprocess mode of prometheus-client."""

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "bide_connection_moves", "Connections that left a broken node for another one.", labels=["reason"]
        )
        for reason in ("silent", "unconfirmed"):
            family.add_metric([reason], moves[reason])
        yield family

    describe = collect


class _Gates(Collector):
    """Exports the state of gates. It is missing in the multiprocess mode of prometheus-client."""

    def __init__(self) -> None:
        self.watched: list[Callable[[], Gate | None]] = []

    def collect(self) -> Iterable[Metric]:
        occurrences = CounterMetricFamily(
            "bide_gate_occurrences",
            "Occurrences of schedules that were claimed, cancelled, superseded or skipped.",
            labels=["gate", "what"],
        )
        answers = CounterMetricFamily("bide_gate_answers", "Answers to operations and questions.", labels=["gate"])
        gauges = [
            (GaugeMetricFamily(f"bide_gate_partition_{name}", text, labels=["gate", "partition"]), value)
            for name, text, value in _GATE_GAUGES
        ]
        for gate in filter(None, (one() for one in self.watched)):
            for what in _GATE_COUNTS:
                occurrences.add_metric([gate.name, what], getattr(gate.done, what))
            answers.add_metric([gate.name], gate.done.answered)
            for status in gate.status:
                for family, value in gauges:
                    if (number := value(status)) is not None:
                        family.add_metric([gate.name, str(status.partition)], number)
        yield occurrences
        yield answers
        yield from (family for family, _ in gauges)

    describe = collect


class _Relays(Collector):
    """Exports the counts of relays. They are missing in the multiprocess mode of prometheus-client."""

    def __init__(self) -> None:
        self.watched: list[Relay] = []

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "bide_relay_messages",
            "Messages that a relay has sent to the meditating queue (rounds), delayed, delivered, or set aside as "
            "undeliverable, and refusals.",
            labels=["hall", "result"],
        )
        counts = dict[tuple[str, str], int]()
        for relay in self.watched:
            for result in _RELAY_COUNTS:
                label = (relay.hall.base, result)
                counts[label] = counts.get(label, 0) + getattr(relay.done, result)
        for labels, count in counts.items():
            family.add_metric(labels, count)
        yield family

    describe = collect


_RELAY_COUNTS: Final = ("delivered", "delayed", "rounds", "refused", "undeliverable")

_GATE_COUNTS: Final = ("claimed", "cancelled", "superseded", "skipped")

_GATE_GAUGES: Final[tuple[tuple[str, str, Callable[[PartitionStatus], float | None]], ...]] = (
    ("leading", "1 if this gate leads the partition.", lambda one: float(one.is_leading)),
    ("waiting", "Schedules that wait.", lambda one: one.waiting),
    ("under_way", "Claimed occurrences that this gate is sending, or will send.", lambda one: one.under_way),
    ("lag_seconds", "Age of the latest beat of this gate that it has read back from the log.", lambda one: one.lag),
)


class _Values:
    """Limits the values of a label: the first 100 are kept, later ones become ``(other)``."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, value: str | None) -> str:
        if value is None:
            return ""
        value = value[:_MAX_LENGTH]
        if value not in self._known:
            if len(self._known) >= _MAX_VALUES:
                return OTHER
            self._known.add(value)
        return value


def _seconds(time: timedelta) -> float:
    # Negative durations, from clocks that differ or are set back, would make a sum decrease.
    return max(time.total_seconds(), 0.0)
