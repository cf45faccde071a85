"""Metrics of endpoints for Prometheus; the extra ``bide[metrics]``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from bide.client.failover import moves
from bide.endpoint.observer import Observer
from bide.errors import InvalidInputError

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric, start_http_server
    from prometheus_client.core import CounterMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("bide.observability.metrics needs prometheus-client: install the extra, bide[metrics]") from error

if TYPE_CHECKING:
    from bide.client.message import Message
    from bide.endpoint.endpoint import Endpoint
    from bide.endpoint.event import Event

LATENESS_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
HANDLING_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the histograms, in seconds."""

OTHER: Final = "(other)"
"""What a label says once it has had too many values."""

_MOST_VALUES: Final = 100
_LONGEST_VALUE: Final = 200

_MESSAGE: Final = ("endpoint", "type")
_FAILURE: Final = (*_MESSAGE, "exception")


class Metrics(Observer):
    """Counts and measures what endpoints do.

    ``bide_connection_moves_total`` counts how often connections of this process left a broken node for another one, by
    the reason: ``silent`` or ``unconfirmed``.

    One of it serves all endpoints of a process, by the label ``endpoint``. The label ``type`` is the
    message's type, empty where it has none. Senders choose it, and an exception's class may be made on the way, so of
    each of the two labels the first 100 values are kept, and any further one is counted as ``(other)``: a stranger
    cannot fill the memory.

    Args:
        registry: of prometheus-client; its default one if None.
        lateness_buckets: upper bounds for ``bide_message_lateness_seconds``, in seconds.
        handling_buckets: upper bounds for ``bide_message_handling_seconds``, in seconds.

    Raises:
        InvalidInputError: the registry has metrics of these names already.
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
                "Messages that go back to be tried again, at_once or later.",
                (*_MESSAGE, "when"),
                registry=registry,
            )
            self._parked = Counter(
                "bide_messages_parked", "Messages that failed for good.", _FAILURE, registry=registry
            )
            self._discarded = Counter(
                "bide_messages_discarded", "Messages that the retry policy dropped.", _FAILURE, registry=registry
            )
            self._expired = Counter(
                "bide_messages_expired", "Messages whose expiration was over.", _MESSAGE, registry=registry
            )
            self._duplicates = Counter(
                "bide_messages_duplicate",
                "Messages that were acknowledged unhandled, as duplicates.",
                _MESSAGE,
                registry=registry,
            )
            self._lateness = Histogram(
                "bide_message_lateness_seconds",
                "From the due time of a delayed message to its first delivery.",
                _MESSAGE,
                registry=registry,
                buckets=lateness_buckets,
            )
            self._handling = Histogram(
                "bide_message_handling_seconds",
                "Running time of handlers, of failed ones too.",
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
            self._slow = Gauge(
                "bide_endpoint_slow",
                "1 while failures in a row make the endpoint handle one message at a time.",
                ("endpoint",),
                registry=registry,
            )
        except ValueError as error:
            raise InvalidInputError(
                f"the metrics cannot be registered: {error}; give one bide.observability.metrics.Metrics to "
                "all endpoints of the process, or each a registry of its own"
            ) from error

    def watch(self, endpoint: Endpoint) -> None:
        """Show whether this endpoint is slowed down by failures in a row, as ``bide_endpoint_slow``.

        Read whenever the metrics are; prometheus-client's mode for several processes does not show it.
        """
        self._slow.labels(endpoint.name).set_function(lambda: float(endpoint.slow))

    def serve(self, port: int, *, host: str = "127.0.0.1") -> MetricsPage:
        """Serve the registry over HTTP, in a thread, until :meth:`MetricsPage.close`.

        Args:
            port: 0 takes a free one; see :attr:`MetricsPage.url`.
            host: the address to listen on: this machine alone, unless another is named.

        Raises:
            InvalidInputError: it cannot listen there.
        """
        return MetricsPage(port, host, self._registry)

    @contextmanager
    def handling(self, message: Message, *, endpoint: str, queue: str) -> Iterator[None]:
        """Count it as in flight."""
        with self._in_flight.labels(endpoint).track_inprogress():
            yield

    async def happened(self, event: Event) -> None:
        """Count and measure it."""
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
        # Later attempts are late because of the earlier ones.
        if event.attempt == 1 and event.lateness is not None:
            self._lateness.labels(*message).observe(_seconds(event.lateness))


class MetricsPage:
    """Metrics over HTTP. Made by :meth:`Metrics.serve`.

    Attributes:
        url: of the page.
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
        """Serve no more. Safe to call twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Moves(Collector):
    """Reads what this process has counted; prometheus-client's mode for several processes does not show it."""

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "bide_connection_moves", "Connections that left a broken node for another one.", labels=["reason"]
        )
        for reason in ("silent", "unconfirmed"):
            family.add_metric([reason], moves[reason])
        yield family

    describe = collect


class _Values:
    """The first values of a label; all later ones count as one."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, value: str | None) -> str:
        if value is None:
            return ""
        value = value[:_LONGEST_VALUE]
        if value not in self._known:
            if len(self._known) >= _MOST_VALUES:
                return OTHER
            self._known.add(value)
        return value


def _seconds(time: timedelta) -> float:
    # Clocks of two machines, or one that is set back, must not make a sum go down.
    return max(time.total_seconds(), 0.0)
