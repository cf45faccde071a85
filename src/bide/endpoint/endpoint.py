"""The endpoint: consumes a queue, calls handlers, and drains when it stops."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from bide.amqp.url import BrokerUrl
from bide.client.client import Client, connect
from bide.client.consumer import MAX_PREFETCH
from bide.client.conversation import Conversation
from bide.client.message import Message
from bide.delay.message_type import MessageType, message_type_of
from bide.delay.protocol import DelayInfrastructure, check_name
from bide.durations import DelayLike, parse_delay
from bide.endpoint.handlers import Handlers
from bide.endpoint.hosted_gate import HostedGate
from bide.endpoint.limiter import Limiter
from bide.endpoint.observer import Observer
from bide.endpoint.receiver import MessageReceiver
from bide.endpoint.service_control import Heartbeats
from bide.endpoint.settings import EndpointSettings
from bide.endpoint.startup import prepare
from bide.endpoint.worker import Worker
from bide.errors import InvalidInputError
from bide.recoverability.retry_policy import Retry, RetryPolicy, check_policy, poison_limit, retries_at_once
from bide.runtime.arguments import whole_number
from bide.runtime.logs import logger

if TYPE_CHECKING:
    from bide.gate.worker import Gate

log = logger(__name__)

AnyHandler = TypeVar("AnyHandler", bound=Callable[[Message], Any])

_PREFETCH_FACTOR: Final = 3
"""Prefetched messages for each one that is handled at the same time (NServiceBus's default)."""

_DEFAULT_MAX_FAILURE_TIMES: Final = 32
"""Number of failure times that headers have room for, if the policy has no maximum number of attempts."""

_PAUSE_WHEN_SLOW: Final = 1.0

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Endpoint:
    """Handles the messages of a queue.

    A message whose handler returns is acknowledged. A message whose handler raises is retried, parked or discarded, as
    the retry policy decides; bide acknowledges it only after the broker has confirmed the copy that replaces it.
    Handlers run at least once: make them idempotent, or use ``deduplicate``.

    An endpoint starts with one message at a time, and goes to full concurrency with the first message that was never
    delivered before. Messages that a dead process left behind are thus handled alone, which identifies the message
    that kills processes.

    Args:
        queue: the queue to consume; if it is missing, a quorum queue is declared.
        name: the endpoint's name for headers, events and logs; the queue's name if None.
        retry: a :class:`bide.Retry`, a :class:`bide.BrokerRetry`, or any pure function from a
            :class:`bide.Failure` to a decision.
        error_queue: the queue for messages that failed for good.
        subscribe: types of events to receive, with the layout ``NServiceBus``; each also stands for the types derived
            from it. The bindings stay when the endpoint stops, or no longer subscribes. With ``declare=False`` they
            have to exist: ``bide endpoint create --subscribe`` makes them.
        audit_queue: a queue for copies of handled messages, from which ServiceControl reads them; it is declared if it
            is missing. Needs the layout ``NServiceBus``.
        heartbeat_queue: the queue of a ServiceControl instance (by default named ``Particular.ServiceControl``), which
            gets a heartbeat every 10 s. Needs the layout ``NServiceBus``.
        concurrency: number of messages handled at the same time, 1 to 10,000; plain functions run in as many threads.
        prefetch: maximum number of unacknowledged messages; three times the concurrency if None.
        declare: declare missing queues, and in :meth:`serve` the delay infrastructure and the exchanges of published
            events; if False, a missing one is an error.
        poison_after: a message that was delivered this many times since its last delayed retry without being settled
            is parked without another attempt, because it seems to kill processes. If None, 5 more than the policy's
            immediate retries, and at least 10. The queue's delivery limit must not be lower; the start checks this.
        slow_down_after: after this many consecutive failures, messages are handled one at a time until one succeeds;
            None never slows down.
        deduplicate: acknowledge messages without handling them if this process has handled their id within this time;
            None, the default, handles every delivery. Other processes are not considered.
        observers: receive every event; see :class:`bide.EventStream`, :mod:`bide.observability.metrics` and
            :mod:`bide.observability.tracing`.
        management_url: URL of the broker's management API, for reading the delivery limit; None uses
            ``BIDE_MANAGEMENT_URL``, or the broker's host and RabbitMQ's default port. If the API does not answer, a
            warning says that the limit was not checked.
        drain: how long handlers may take to finish when the endpoint stops. Then they are cancelled, and their
            messages are requeued.
        gate: host a gate of the schedule log in this process, as :class:`bide.Gate`. It starts and stops with the
            endpoint, and its errors end the endpoint. Of the observers, those that are also a
            :class:`bide.gate.GateObserver` observe it; :class:`bide.EventStream` is not.
        gate_allow: patterns of the targets that the gate delivers to, for all schedules on the broker: it may lead any
            partition, and messages for other targets go to the undeliverable queue. Required with ``gate=True``.
        gate_state: the folder for the gate's index, one for each process; None uses a temporary folder, so that each
            start reads the log.

    Raises:
        InvalidInputError: an argument is invalid.
    """

    def __init__(
        self,
        queue: str,
        *,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        error_queue: str = "error",
        subscribe: Iterable[MessageType | str] = (),
        audit_queue: str | None = None,
        heartbeat_queue: str | None = None,
        concurrency: int = 10,
        prefetch: int | None = None,
        declare: bool = True,
        poison_after: int | None = None,
        slow_down_after: int | None = 20,
        deduplicate: DelayLike | None = None,
        observers: Sequence[Observer] = (),
        management_url: str | None = None,
        drain: DelayLike = timedelta(seconds=30),
        gate: bool = False,
        gate_allow: Iterable[str] = (),
        gate_state: Path | str | None = None,
    ) -> None:
        check_name("queue", queue)
        check_name("queue", error_queue)
        if error_queue == queue:
            raise InvalidInputError(f"the error queue {queue!r} is also the endpoint's own queue: give another one")
        self.queue = queue
        self.name = queue if name is None else name
        check_name("endpoint", self.name)
        self._policy: RetryPolicy = Retry() if retry is None else retry
        check_policy(self._policy)
        self._error_queue = error_queue
        for one in (audit_queue, heartbeat_queue):
            if one is not None:
                check_name("queue", one)
        if queue in (audit_queue, heartbeat_queue):
            raise InvalidInputError(f"the queue {queue!r} is the endpoint's own: give another one to ServiceControl")
        self._audit_queue = audit_queue
        self._heartbeats = (
            None if heartbeat_queue is None else Heartbeats(self.name, address=queue, queue=heartbeat_queue)
        )
        self._concurrency = whole_number("concurrency", concurrency, 1, 10_000)
        ahead = min(self._concurrency * _PREFETCH_FACTOR, MAX_PREFETCH) if prefetch is None else prefetch
        self._prefetch = whole_number("prefetch", ahead, self._concurrency, MAX_PREFETCH)
        self._declare = declare
        self._subscriptions = tuple(map(message_type_of, (subscribe,) if isinstance(subscribe, str) else subscribe))
        self._poison_after = (
            poison_limit(self._policy)
            if poison_after is None
            else whole_number("poison_after", poison_after, retries_at_once(self._policy) + 1, 1_000_000)
        )
        self._slow_down_after = (
            None if slow_down_after is None else whole_number("slow_down_after", slow_down_after, 1, 1_000_000)
        )
        self._deduplicate = None if deduplicate is None else parse_delay(deduplicate)
        self._observers = _checked_observers(observers)
        self._management_url = management_url
        self._drain = parse_delay(drain).total_seconds()
        if not gate and (gate_allow or gate_state is not None):
            raise InvalidInputError("gate_allow and gate_state need gate=True")
        self._hosted = HostedGate(gate_allow, gate_state) if gate else None
        self._handlers = Handlers(self._concurrency)
        self._stopping: asyncio.Event | None = None
        self._limiter: Limiter | None = None
        self._receiver: MessageReceiver | None = None

    @overload
    def handler(self, function: AnyHandler, /, *, type: str | None = None) -> AnyHandler: ...

    @overload
    def handler(self, /, *, type: str | None = None) -> Callable[[AnyHandler], AnyHandler]: ...

    def handler(self, function: Callable[[Message], Any] | None = None, /, *, type: str | None = None) -> Any:
        """Register a handler: ``@app.handler``, or ``@app.handler(type="OrderPlaced")`` for one type of message.

        A handler is an ``async def`` function, or a plain function, which runs in a thread. A message whose type has
        no handler is parked.

        Args:
            type: the message's ``type`` property, or one of NServiceBus's enclosed message types, of which the first
                with a handler counts: a message reaches the handler of its base class or interface if its own class
                has none. None stands for all types without a handler of their own.

        Raises:
            InvalidInputError: the type already has a handler.
        """
        if function is not None:
            return self._handlers.add(function, type)
        return lambda one: self._handlers.add(one, type)

    @property
    def in_flight(self) -> int:
        """Number of messages that are being handled."""
        return 0 if self._receiver is None else self._receiver.in_flight

    @property
    def slow(self) -> bool:
        """Whether it handles one message at a time because of consecutive failures."""
        return self._limiter is not None and self._limiter.slow

    @property
    def gate(self) -> Gate | None:
        """The gate that this endpoint hosts, while it runs."""
        return None if self._hosted is None else self._hosted.gate

    def stop(self) -> None:
        """Stop consuming; :meth:`run` returns when the messages that are being handled are settled."""
        if self._stopping is not None:
            self._stopping.set()

    async def run(self, client: Client) -> None:
        """Handle messages until :meth:`stop` is called or this call is cancelled; both drain.

        Args:
            client: an open client; the endpoint does not close it.

        Raises:
            InvalidInputError: no handler is registered, the endpoint is running already, the queue is a stream, or a
                queue of ServiceControl is given with a layout other than ``NServiceBus``.
            TargetNotFoundError: a queue is missing, and ``declare`` is False.
            DeliveryLimitError: the queue's delivery limit is lower than ``poison_after``.
            UnsupportedBrokerError: the retry policy needs a newer broker.
            UnsupportedTargetError: the endpoint subscribes to events, and the layout has no rule for events.
            InvalidDelayError: the policy has a delay that the infrastructure cannot hold.
            ConsumerCancelledError: the queue was deleted.
            ClosedError: the client was closed.
            BideError: the gate cannot work; see :meth:`bide.Gate.run`.
            BrokerError: the broker refuses, or cannot be reached at the start.
        """
        if not len(self._handlers):
            raise InvalidInputError(f"the endpoint {self.name!r} has no handler: register one with @endpoint.handler")
        if self._stopping is not None:
            raise InvalidInputError(f"the endpoint {self.name!r} is running already: stop it first")
        self._stopping = asyncio.Event()
        beating: asyncio.Task[None] | None = None
        try:
            await prepare(
                client,
                queue=self.queue,
                error_queue=self._error_queue,
                audit_queue=self._audit_queue,
                reports=bool(self._audit_queue or self._heartbeats),
                declare=self._declare,
                subscriptions=self._subscriptions,
                policy=self._policy,
                least_limit=self._poison_after,
                management_url=self._management_url,
            )
            for observer in self._observers:
                await observer.started(client)
            if self._heartbeats:
                beating = asyncio.create_task(self._heartbeats.run(client))
            if self._hosted is None:
                await self._work(client, None)
                return
            async with self._hosted.running(client, declare=self._declare, observers=self._observers) as gate:
                await self._work(client, gate)
        finally:
            if beating is not None:
                beating.cancel()
                await _wait_for(beating)
            self._stopping = None
            self._handlers.close()

    def serve(self, url: str | BrokerUrl | None = None, *, infrastructure: DelayInfrastructure | None = None) -> None:
        """Connect and :meth:`run` until SIGTERM or Ctrl-C, for a program that does nothing else.

        The first signal drains; a second one ends the process immediately.

        Args:
            url: URL of the broker; None uses ``BIDE_URL``, or RabbitMQ's default on this machine.
            infrastructure: the delay infrastructure; ``Clock()`` if None.

        Raises:
            BideError: as :meth:`run`, or the broker cannot be reached.
        """
        asyncio.run(self._serve(url, infrastructure))

    async def _serve(self, url: str | BrokerUrl | None, infrastructure: DelayInfrastructure | None) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        received: list[signal.Signals] = []

        def stop(number: signal.Signals) -> None:
            log.info("%s: %s: draining", self.name, number.name)
            received.append(number)
            for one in _SIGNALS:
                loop.remove_signal_handler(one)
                # Python's default handler for Ctrl-C would wait for the threads of handlers.
                signal.signal(one, signal.SIG_DFL)
            if self._stopping is not None:
                self.stop()
            else:
                task.cancel()

        for number in _SIGNALS:
            loop.add_signal_handler(number, stop, number)
        try:
            async with connect(url, infrastructure=infrastructure, declare=self._declare) as client:
                await self.run(client)
        except asyncio.CancelledError:
            if not received:
                raise
        finally:
            if received:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    async def _work(self, client: Client, gate: asyncio.Task[object] | None) -> None:
        limiter = self._limiter = Limiter(
            self.name, self._concurrency, slow_down_after=self._slow_down_after, pause=_PAUSE_WHEN_SLOW
        )
        infrastructure = await client.infrastructure()
        settings = EndpointSettings(
            endpoint=self.name,
            queue=self.queue,
            error_queue=self._error_queue,
            policy=self._policy,
            poison_after=self._poison_after,
            max_failure_times=getattr(self._policy, "attempts", _DEFAULT_MAX_FAILURE_TIMES),
            nservicebus=infrastructure.writes_nservicebus_headers,
            audit_queue=self._audit_queue,
        )
        worker = Worker(
            settings,
            handlers=self._handlers,
            limiter=limiter,
            forward=client.forward,
            now=client.now,
            observers=self._observers,
            deduplicate=self._deduplicate,
        )
        single = client.consume(self.queue, prefetch=1)
        messages = client.consume(self.queue, prefetch=self._prefetch)
        single.conversation = messages.conversation = Conversation(client, endpoint=self.name, queue=self.queue)
        assert self._stopping is not None
        receiver = self._receiver = MessageReceiver(
            self.name, worker, limiter, prefetch=self._prefetch, stopping=self._stopping
        )
        receiving = asyncio.create_task(receiver.receive(single, messages))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            ends: set[asyncio.Task[Any]] = {receiving, stopping} if gate is None else {receiving, stopping, gate}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                await receiving
            if gate is not None and gate.done():
                await gate
        finally:
            self._stopping.set()
            if self.gate is not None:
                # The gate releases its partitions while handlers finish.
                self.gate.stop()
            stopping.cancel()
            receiving.cancel()
            await _wait_for(receiving)
            await receiver.drain(self._drain)
            # Closing the consumers requeues every message that is not settled by now.
            await single.close()
            await messages.close()


async def _wait_for(task: asyncio.Task[None]) -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def _checked_observers(observers: object) -> tuple[Observer, ...]:
    given = tuple(observers) if isinstance(observers, Sequence) else (observers,)
    if not isinstance(observers, Sequence) or not all(isinstance(one, Observer) for one in given):
        raise InvalidInputError(f"observers={observers!r}: give a list of observers, such as [bide.EventStream()]")
    return given
