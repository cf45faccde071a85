"""The endpoint: receives, hands to handlers, and drains when it is told to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeVar, overload

from bide.amqp.url import BrokerUrl
from bide.arguments import whole_number
from bide.client.client import Client, connect
from bide.client.consumer import MAX_PREFETCH, Consumer
from bide.client.message import Message
from bide.delay.protocol import DelayInfrastructure, check_name
from bide.durations import DelayLike, parse_delay
from bide.endpoint.handlers import Handlers
from bide.endpoint.limiter import Limiter
from bide.endpoint.observer import Observer
from bide.endpoint.settings import EndpointSettings
from bide.endpoint.startup import prepare
from bide.endpoint.worker import Worker
from bide.errors import ClosedError, InvalidInputError
from bide.recoverability.policy import Retry, RetryPolicy, check_policy, poison_limit, retries_at_once
from bide.runtime.logs import logger

log = logger(__name__)

AnyHandler = TypeVar("AnyHandler", bound=Callable[[Message], Any])

_PREFETCH_FACTOR: Final = 3
"""Messages that are fetched ahead for each that is handled at once (NServiceBus's default)."""

_UNKNOWN_PLACES: Final = 32
"""Room for times of attempts where the policy does not say how many there will be."""

_CONSUMERS: Final = 20
"""So many processes may have died and given back what they had fetched ahead."""

_SLOW_PAUSE: Final = 1.0

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Endpoint:
    """Handles the messages of a queue.

    A message whose handler returns is acknowledged. One whose handler raises is retried, parked or discarded as the
    retry policy says; it is acknowledged only after the broker has confirmed what takes its place. Handlers run at
    least once: make them idempotent, or see ``deduplicate``.

    It starts with one message at a time, and goes to full speed with the first that was never delivered before: what a
    process that died gave back is handled alone, so that the message which kills processes is found out by itself.

    Args:
        queue: the queue that it handles; a quorum queue is declared if there is none.
        name: its own name, for headers, events and logs; the queue's if None.
        retry: a :class:`bide.Retry`, a :class:`bide.BrokerRetry`, or any pure function from a
            :class:`bide.Failure` to a decision.
        error_queue: where messages go that failed for good.
        concurrency: messages handled at once, 1 to 10,000; plain functions run in as many threads.
        prefetch: messages fetched ahead; three times the concurrency if None.
        declare: declare queues that are missing; else their absence is an error.
        poison_after: a message that was delivered so often since its last delayed retry, and still is not done with, is
            parked without another attempt: processes die on it. If None, 5 more than the policy's immediate retries,
            and at least 10. The queue's delivery limit must not be lower, which is checked at the start.
        slow_down_after: after so many failures in a row it handles one message at a time, until one succeeds; None
            never slows down.
        deduplicate: messages with an id that this process has handled within this time are acknowledged unhandled;
            None, the default, handles every delivery. It does not know what other processes handled.
        observers: told of everything; see :class:`bide.EventStream`, :mod:`bide.observability.metrics` and
            :mod:`bide.observability.tracing`.
        management_url: of the broker's management API, which the delivery limit is read from; None takes
            ``BIDE_MANAGEMENT_URL``, or the broker's host and RabbitMQ's default port. Where it does not answer, a
            warning says that the limit was not checked.
        drain: how long handlers may take to end when the endpoint stops; after that they are cancelled, and their
            messages go back.

    Raises:
        InvalidInputError: in one of its kinds.
    """

    def __init__(
        self,
        queue: str,
        *,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        error_queue: str = "error",
        concurrency: int = 10,
        prefetch: int | None = None,
        declare: bool = True,
        poison_after: int | None = None,
        slow_down_after: int | None = 20,
        deduplicate: DelayLike | None = None,
        observers: Sequence[Observer] = (),
        management_url: str | None = None,
        drain: DelayLike = timedelta(seconds=30),
    ) -> None:
        check_name("queue", queue)
        check_name("queue", error_queue)
        if error_queue == queue:
            raise InvalidInputError(f"the error queue {queue!r} is the endpoint's own queue: name another")
        self.queue = queue
        self.name = queue if name is None else name
        check_name("endpoint", self.name)
        self._policy: RetryPolicy = Retry() if retry is None else retry
        check_policy(self._policy)
        self._error_queue = error_queue
        self._concurrency = whole_number("concurrency", concurrency, 1, 10_000)
        ahead = min(self._concurrency * _PREFETCH_FACTOR, MAX_PREFETCH) if prefetch is None else prefetch
        self._prefetch = whole_number("prefetch", ahead, self._concurrency, MAX_PREFETCH)
        self._declare = declare
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
        self._handlers = Handlers(self._concurrency)
        self._stopping: asyncio.Event | None = None
        self._gate: Limiter | None = None
        self._hands: set[asyncio.Task[None]] = set()

    @overload
    def handler(self, function: AnyHandler, /, *, type: str | None = None) -> AnyHandler: ...

    @overload
    def handler(self, /, *, type: str | None = None) -> Callable[[AnyHandler], AnyHandler]: ...

    def handler(self, function: Callable[[Message], Any] | None = None, /, *, type: str | None = None) -> Any:
        """Register a handler: ``@app.handler``, or ``@app.handler(type="OrderPlaced")`` for one type of message.

        It may be an ``async def`` function or a plain one, which runs in a thread. A message of a type that nobody
        handles is parked.

        Args:
            type: the message's ``type`` property, or the first of NServiceBus's enclosed message types; None takes
                every type that has no handler of its own.

        Raises:
            InvalidInputError: there is a handler for that type already.
        """
        if function is not None:
            return self._handlers.add(function, type)
        return lambda one: self._handlers.add(one, type)

    @property
    def in_flight(self) -> int:
        """Messages that are being handled."""
        return len(self._hands)

    @property
    def slow(self) -> bool:
        """Whether it handles one message at a time because of failures in a row."""
        return self._gate is not None and self._gate.slow

    def stop(self) -> None:
        """Take no more messages; :meth:`run` returns when those in hand are done with."""
        if self._stopping is not None:
            self._stopping.set()

    async def run(self, client: Client) -> None:
        """Handle messages until :meth:`stop` is called or this call is cancelled; both drain.

        Args:
            client: opened; the endpoint does not close it.

        Raises:
            InvalidInputError: no handler is registered, or it runs already.
            TargetNotFoundError: a queue is missing and may not be declared.
            DeliveryLimitError: the queue would give a message up before the endpoint does.
            UnsupportedBrokerError: the retry policy needs a newer broker.
            InvalidInputError: the queue is a stream.
            InvalidDelayError: the policy has a delay that the infrastructure cannot hold.
            ConsumerCancelledError: the queue was deleted.
            ClosedError: the client was closed.
            BrokerError: the broker cannot be reached at the start, or refuses.
        """
        if not len(self._handlers):
            raise InvalidInputError(f"the endpoint {self.name!r} has no handler: register one with @endpoint.handler")
        if self._stopping is not None:
            raise InvalidInputError(f"the endpoint {self.name!r} runs already")
        self._stopping = asyncio.Event()
        try:
            await prepare(
                client,
                queue=self.queue,
                error_queue=self._error_queue,
                declare=self._declare,
                policy=self._policy,
                least_limit=self._poison_after,
                management_url=self._management_url,
            )
            for observer in self._observers:
                await observer.started(client)
            await self._work(client)
        finally:
            self._stopping = None
            self._handlers.close()

    def serve(self, url: str | BrokerUrl | None = None, *, infrastructure: DelayInfrastructure | None = None) -> None:
        """Connect and :meth:`run` until SIGTERM or Ctrl-C, for a program that does nothing else.

        The first signal drains; a second one ends the process at once.

        Args:
            url: of the broker; None takes ``BIDE_URL``, or RabbitMQ's default on this machine.
            infrastructure: how delays are made; ``Clock()`` if None.

        Raises:
            BideError: as :meth:`run`, and if the broker cannot be reached.
        """
        asyncio.run(self._serve(url, infrastructure))

    async def _serve(self, url: str | BrokerUrl | None, infrastructure: DelayInfrastructure | None) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        told: list[signal.Signals] = []

        def stop(number: signal.Signals) -> None:
            log.info("%s: %s: draining", self.name, number.name)
            told.append(number)
            for one in _SIGNALS:
                loop.remove_signal_handler(one)
                # Python's own way with Ctrl-C would wait for the threads of handlers.
                signal.signal(one, signal.SIG_DFL)
            if self._stopping is not None:
                self.stop()
            else:
                task.cancel()

        for number in _SIGNALS:
            loop.add_signal_handler(number, stop, number)
        try:
            async with connect(url, infrastructure=infrastructure) as client:
                await self.run(client)
        except asyncio.CancelledError:
            if not told:
                raise
        finally:
            if told:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    async def _work(self, client: Client) -> None:
        gate = self._gate = Limiter(
            self.name, self._concurrency, slow_down_after=self._slow_down_after, pause=_SLOW_PAUSE
        )
        infrastructure = await client.infrastructure()
        rules = EndpointSettings(
            endpoint=self.name,
            queue=self.queue,
            error_queue=self._error_queue,
            policy=self._policy,
            poison_after=self._poison_after,
            places=getattr(self._policy, "attempts", _UNKNOWN_PLACES),
            nservicebus=infrastructure.writes_nservicebus_headers,
        )
        worker = Worker(
            rules,
            handlers=self._handlers,
            gate=gate,
            forward=client.forward,
            now=client.now,
            observers=self._observers,
            deduplicate=self._deduplicate,
        )
        careful = client.consume(self.queue, prefetch=1)
        messages = client.consume(self.queue, prefetch=self._prefetch)
        receiving = asyncio.create_task(self._receive(careful, messages, worker, gate))
        assert self._stopping is not None
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({receiving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                await receiving
        finally:
            self._stopping.set()
            stopping.cancel()
            receiving.cancel()
            await _ended(receiving)
            await self._drained()
            # What is not settled by now goes back, whoever still refers to it.
            await careful.close()
            await messages.close()

    async def _receive(self, careful: Consumer, messages: Consumer, worker: Worker, gate: Limiter) -> None:
        # A consumer that was stopped gives back what it had not handed out; what it had can still be settled.
        try:
            first = await self._one_by_one(careful, worker, gate)
        finally:
            careful.stop()
        await gate.enter()
        self._start(first, worker, gate)
        try:
            while True:
                # The place first: what is not handed out yet goes back at once when we stop.
                await gate.enter()
                try:
                    message = await anext(messages, None)
                except BaseException:
                    await gate.leave()
                    raise
                if message is None:
                    raise ClosedError("the client was closed")
                self._start(message, worker, gate)
        finally:
            messages.stop()

    async def _one_by_one(self, messages: Consumer, worker: Worker, gate: Limiter) -> Message:
        """Handle what comes back from others alone, and return the first message that need not be.

        That is the first one that was never delivered before. What dead processes give back is at the head of the
        queue; if far more come back than they can have had in hand, somebody has looked through the queue.
        """
        returned = 0
        async for message in messages:
            if not message.redelivered or returned == self._prefetch * _CONSUMERS:
                return message
            returned += 1
            await gate.enter()
            await asyncio.wait({self._start(message, worker, gate)})
        raise ClosedError("the client was closed")

    def _start(self, message: Message, worker: Worker, gate: Limiter) -> asyncio.Task[None]:
        async def take() -> None:
            try:
                await worker.take(message)
            except asyncio.CancelledError:
                if self._stopping is not None and not self._stopping.is_set() and not message.settled:
                    # The handler has cancelled its own task: left so, the message would never come again.
                    await message.requeue()
                raise
            finally:
                await gate.leave()

        task = asyncio.create_task(take())
        self._hands.add(task)
        task.add_done_callback(self._hands.discard)
        task.add_done_callback(self._report)
        return task

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: a message could not be settled, and will come again: %s", self.name, error, exc_info=error)

    async def _drained(self) -> None:
        """Let handlers end, and cancel those that take too long."""
        if not self._hands:
            return
        _, late = await asyncio.wait(set(self._hands), timeout=self._drain)
        for task in late:
            log.warning("%s: a handler did not end within %g s: its message goes back", self.name, self._drain)
            task.cancel()
        if late:
            await asyncio.wait(late)


async def _ended(task: asyncio.Task[None]) -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def _checked_observers(observers: object) -> tuple[Observer, ...]:
    given = tuple(observers) if isinstance(observers, Sequence) else (observers,)
    if not isinstance(observers, Sequence) or not all(isinstance(one, Observer) for one in given):
        raise InvalidInputError(f"observers={observers!r}: give a list of observers, such as [bide.EventStream()]")
    return given
