"""Migration of waiting messages from one delay infrastructure to another.

The state of a migration is in the queues alone: a message that was not migrated is still there. To continue a migration
that was stopped or killed, run it again. Each message is acknowledged after the confirm of its copy, so none is lost. A
kill repeats at most the messages whose copies were confirmed and which were not yet acknowledged.

**Nothing is missed.** A message that waits moves to other queues during the run, and senders may add more. The
migration consumes from all queues of the infrastructure at the same time, so a message that becomes ready in any of
them is taken from there. The run ends after two sweeps over all queues that find nothing, if nothing was received
meanwhile:

- In the levels, messages only move down, and a sweep counts the queues from the longest wait to the shortest. While it
  has counted no message, a message that was in the levels when the sweep began is in none of the counted queues. It is
  in a queue further down, where the sweep counts it later, or has reached its target.
- A message that is between two queues (an unconfirmed dead letter, or a message that a relay is moving) can enter a
  queue that was counted already. The migration receives it there at once, and the sweeps start again. The pause between
  two sweeps is meant to be longer than such a move. The management API also counts dead letters that no queue has
  confirmed, so the count at the end includes them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Final

from bide.admin.apply import check_release, message_counts
from bide.admin.locate import management_api
from bide.admin.snapshot import find_owned
from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.amqp.url import BrokerUrl
from bide.client.client import connect
from bide.client.first_failure import FirstFailure
from bide.client.set_aside import send_aside
from bide.delay import recognition
from bide.delay.allowed_targets import AllowedTargets
from bide.delay.cascade_keys import original_key
from bide.delay.protocol import DelayInfrastructure, ExchangeTarget, Target
from bide.delay.waiting import WaitingMessage, waiting_message
from bide.errors import (
    InvalidInputError,
    ManagementApiError,
    NotAppliedError,
    PublishRefusedError,
    TargetNotFoundError,
    UnroutableError,
)
from bide.management.api import ManagementApi
from bide.migration.copies import TakenMessage, onward_copy, set_aside_copy
from bide.migration.counts import Migrated, WaitingCount
from bide.migration.lock import MigrationLock
from bide.runtime.logs import logger
from bide.topology import Binding, Exchange, Queue, Topology

log = logger(__name__)

PREFETCH: Final = 100
"""Unacknowledged messages per queue. A kill can repeat at most this many of each queue."""

_PAUSE: Final = 0.3
"""Seconds without a message before each of the two sweeps at the end."""

_STUCK: Final = 30.0
"""Seconds after which the run ends although queues count messages that they do not deliver."""

_RECOUNT: Final = 20.0
"""Seconds to wait for the management API, whose counts of quorum queues are up to 10.5 seconds old, and older on a busy
machine."""

_MESSAGE_ERRORS: Final = (InvalidInputError, TargetNotFoundError, UnroutableError, PublishRefusedError)
"""Errors that concern one message or its target, and not other messages."""

Progress = Callable[[int, int], None]
"""Called with the number of finished messages and the total, which grows if senders add messages."""


class Migration:
    """Moves all messages that wait in one delay infrastructure into another, on the same broker or another one.

    Args:
        url: the broker's URL.
        source: the infrastructure to empty, with the same settings as on the broker.
        target: the infrastructure that the messages go to; it is declared if it is missing.
        allow: patterns of the targets that messages may go to; see :class:`bide.Relay`. The migration sends with its
            own permissions, also messages whose senders may not write to the target.
        to_url: the URL of the other broker or virtual host; None for the same one.
        management_url: URL of the first broker's management API; see :class:`bide.Endpoint`.
        progress: called after each message.

    Attributes:
        done: the counts so far.
        set_aside: the name of the exchange and queue for messages that cannot be sent on. The next run takes them too.

    Raises:
        InvalidInputError: a value is invalid; or both infrastructures are on the same broker and share names.
    """

    def __init__(
        self,
        url: str | BrokerUrl,
        source: DelayInfrastructure,
        target: DelayInfrastructure,
        *,
        allow: Iterable[str],
        to_url: str | BrokerUrl | None = None,
        management_url: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.done = Migrated()
        self._url = _parsed(url)
        self._to_url = None if to_url is None else _parsed(to_url)
        self._source = source
        self._target = target
        self._allowed = AllowedTargets.of(allow)
        self._management_url = management_url
        self._progress = progress
        self.set_aside = f"bide.set-aside.{source.delivery_exchange}"
        self._lock = MigrationLock(source.delivery_exchange, f"{source.name!r} ({source.delivery_exchange})")
        self._total = 0
        self._received = 0
        self._queues: set[str] = set()
        self._staying = Counter[str]()
        self._tags: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._bindings: Sequence[Binding] = ()
        self._has_aside = False
        self._declaring_aside = asyncio.Lock()
        if to_url is None and self._shares_names():
            raise InvalidInputError(
                f"{source.name!r} and {target.name!r} with these settings share names: the messages would come back to "
                "the queues that they are taken from. Give another layout or prefix, or another broker"
            )

    def stop(self) -> None:
        """Take no more messages, and end when the messages that were taken are finished."""
        self._stopping.set()

    async def count(self) -> list[WaitingCount]:
        """Count the messages that are ready in each delay queue that exists, without taking any.

        Raises:
            NotAppliedError: none of the queues exists.
            BrokerError: the broker cannot be reached.
        """
        connection = await Connection.open(self._url)
        try:
            found = await self._ready(connection)
        finally:
            await connection.close()
        ttls = {one.name: one.arguments.get("x-message-ttl", 0) for one in self._source.waiting_queues()}
        return [
            WaitingCount(queue=name, messages=count, wait=timedelta(milliseconds=int(ttls[name])))
            for name, count in found.items()
        ]

    async def run(self) -> Migrated:
        """Move messages until nothing is left, or until :meth:`stop`. Call it once.

        Raises:
            MigrationRunningError: another migration of this infrastructure runs.
            NotAppliedError: none of the queues exists.
            InvalidInputError: both URLs lead to the same virtual host, and the infrastructures share names.
            BrokerError: a broker cannot be reached, or refuses, or the connection was lost. Run a new migration.
        """
        async with AsyncExitStack() as stack:
            connection = await Connection.open(replace(self._url, name=f"{self._url.name} (migration)"))
            stack.push_async_callback(connection.close)
            check_release(connection)
            channel = await connection.channel()
            await self._lock.take(channel)
            counts = await self._ready(connection)
            self._client = await stack.enter_async_context(
                connect(self._to_url or self._url, infrastructure=self._target)
            )
            if self._to_url is not None and self._shares_names():
                await self._lock.refuse_same(self._to_url)
            # A client without the target infrastructure, because that one would add the headers of a new message.
            self._aside = await stack.enter_async_context(connect(self._url))
            self._failure = FirstFailure(connection)
            self._channel = channel
            self._bindings = await self._delivery_bindings()
            await channel.qos(PREFETCH)
            self._total = sum(counts.values())
            try:
                await self._drain(connection, counts)
            except BaseException:
                for task in self._tasks:
                    task.cancel()
                channel.abandon()
                raise
            await channel.close()
            await self._verify(connection)
            await self._lock.release(connection)
        return self.done

    def _shares_names(self) -> bool:
        source, target = self._source, self._target
        return source.owns(target.delivery_exchange) or target.owns(source.delivery_exchange)

    async def _ready(self, connection: Connection) -> dict[str, int]:
        """Ready messages by queue, in the order of a sweep: the longest wait first."""
        found = await message_counts(connection, self._source.waiting_queues())
        if not found:
            raise NotAppliedError(
                f"no queue of the layout {self._source.name!r} is on the virtual host {connection.url.vhost!r} of "
                f"{connection.address}: check the layout, its prefix and the virtual host"
            )
        return found

    async def _delivery_bindings(self) -> Sequence[Binding]:
        """The bindings of the delivery exchange; none if the management API does not answer."""
        try:
            async with management_api(self._url, self._management_url) as api, asyncio.timeout(_RECOUNT):
                return await api.bindings_from(self._url.vhost, self._source.delivery_exchange)
        except (ManagementApiError, TimeoutError) as error:
            log.info("the bindings of %s are unknown: %s", self._source.delivery_exchange, error)
            return ()

    # -- taking messages

    async def _drain(self, connection: Connection, counts: Mapping[str, int]) -> None:
        await self._take_set_aside(connection)
        await self._consume(counts)
        clean, seen, quiet_since = 0, -1, connection.loop.time()
        while not self._stopping.is_set() and clean < 2:
            await self._wait(_PAUSE)
            if self._tasks or self._received != seen:
                clean, seen, quiet_since = 0, self._received, connection.loop.time()
                continue
            counts = await self._ready(connection)
            await self._consume(counts)
            if self._received == seen and not sum(counts.values()):
                clean += 1
            elif connection.loop.time() - quiet_since > _STUCK:
                log.warning("queues count messages that they do not deliver: the migration ends without them")
                break
            else:
                clean = 0
        self.done.is_finished = clean == 2
        for tag in self._tags:
            await self._channel.cancel(tag)
        while self._tasks:
            await self._wait(_PAUSE)

    async def _wait(self, seconds: float) -> None:
        """Wait for a while, or until the migration is stopped.

        Raises:
            BaseException: the error of a move, or of the connection.
        """
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await self._failure.wait([] if self._stopping.is_set() else [stopping], seconds=seconds)
        finally:
            stopping.cancel()
        self._failure.check()

    async def _consume(self, queues: Iterable[str]) -> None:
        """Consume from queues that are not consumed yet. Senders may have declared more since the last time."""
        for name in queues:
            if name not in self._queues:
                self._queues.add(name)
                take = partial(self._on_message, name)
                self._tags.append(await self._channel.consume(name, on_message=take, on_end=self._failure.report))

    async def _take_set_aside(self, connection: Connection) -> None:
        """Take the messages that an earlier run set aside, each once."""
        counts = await message_counts(connection, [Queue(self.set_aside)])
        self._total += (number := counts.get(self.set_aside, 0))
        # The prefetch does not limit basic.get.
        room = asyncio.Semaphore(PREFETCH)
        for _ in range(number):
            await room.acquire()
            if self._stopping.is_set() or (delivery := await self._channel.get(self.set_aside)) is None:
                return
            if (taken := TakenMessage.read_set_aside(delivery)) is None:
                # Another program's message: it goes back when the channel closes.
                room.release()
                continue
            self._start(self.set_aside, taken).add_done_callback(lambda _: room.release())

    def _on_message(self, queue: str, delivery: Delivery) -> None:
        self._start(queue, TakenMessage(delivery=delivery, queue=queue, at=self._client.now()))

    def _start(self, queue: str, taken: TakenMessage) -> asyncio.Task[None]:
        self._received += 1
        task = asyncio.create_task(self._move(queue, taken))
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure.report(error)

    # -- moving one message

    async def _move(self, queue: str, taken: TakenMessage) -> None:
        delivery, found = taken.delivery, None
        try:
            found = waiting_message(
                self._source, taken.queue, routing_key=delivery.routing_key, headers=taken.headers, now=taken.at
            )
            to = self._resolved(found.target)
            self._allowed.check_delivery(to)
            copy = onward_copy(taken, to, found.latest, user=self._client.url.user)
            await self._client.forward(copy)
        except _MESSAGE_ERRORS as error:
            if isinstance(error, PublishRefusedError) and found is not None and found.latest > self._client.now():
                # A delay queue refuses the message, not its target. It would refuse all others too, so they stay here.
                raise
            try:
                await self._put_aside(taken, str(error))
            except InvalidInputError as second:
                # Its headers nearly fill a frame, and there is no room for the queue and the time.
                log.warning("a message of %s stays there: %s; it cannot be set aside either: %s", queue, error, second)
                self._staying[queue] += 1
                return
            self.done.set_aside[str(error)] += 1
        else:
            self._count(found)
        self._channel.ack(delivery.delivery_tag)
        self.done.taken[queue] += 1
        self.done.redelivered += delivery.redelivered
        if self._progress is not None:
            finished = self.done.taken.total()
            self._progress(finished, max(self._total, finished))

    def _count(self, found: WaitingMessage) -> None:
        done = self.done
        done.moved += 1
        done.overdue += found.latest <= self._client.now()
        done.uncertain += bool(found.uncertainty)
        done.longest_uncertainty = max(done.longest_uncertainty, found.uncertainty)

    def _resolved(self, target: Target) -> Target:
        """The exchange behind the delivery exchange for the address of a Celery task, or else the target itself.

        The exchange is used if there is exactly one. The message then goes there with its own routing key, and no
        longer needs the old delivery exchange.
        """
        if not isinstance(target, ExchangeTarget) or target.exchange != self._source.delivery_exchange:
            return target
        address = original_key(target.routing_key)
        bound = [one for one in self._bindings if address != target.routing_key and one.routing_key == f"#.{address}"]
        if len(bound) != 1 or bound[0].destination_type != "exchange":
            return target
        return ExchangeTarget(bound[0].destination, address)

    async def _put_aside(self, taken: TakenMessage, reason: str) -> None:
        name = self.set_aside
        async with self._declaring_aside:
            # Only once, because RabbitMQ 3.10 refused messages to a quorum queue that several channels declared at
            # once.
            if not self._has_aside:
                queue = Queue.quorum(name, {"x-overflow": "reject-publish"})
                await self._aside.declare(Topology([Exchange(name, "fanout")], [queue], [Binding(name, name)]))
                self._has_aside = True
        user = self._aside.url.user
        await send_aside(self._aside, reason, lambda text: set_aside_copy(taken, name, text, user=user))

    # -- the end

    async def _verify(self, connection: Connection) -> None:
        """Count the messages that remain."""
        counts = await self._ready(connection)
        try:
            async with management_api(self._url, self._management_url) as api, asyncio.timeout(_RECOUNT):
                counts = await self._owned(api)
                self.done.counts_all = True
                # The messages that stay in the set-aside queue are not among these counts.
                while self.done.is_finished and any(one > self._staying[name] for name, one in counts.items()):
                    await asyncio.sleep(1)  # the API computes its counts every few seconds
                    counts = await self._owned(api)
        except (ManagementApiError, TimeoutError) as error:
            log.info("cannot count the remaining messages with the management API in time: %s", error)
        # The API may not have counted a message that has just come.
        self.done.left = dict(Counter(counts) | self._staying)

    async def _owned(self, api: ManagementApi) -> dict[str, int]:
        """All messages by queue: with dead letters between two queues, and queues that the settings do not name."""
        _, queues = await find_owned(api, self._url.vhost, self._source)
        return {
            name: one.messages or 0
            for name, one in queues.items()
            if recognition.part_of(name) in ("waiting", "release", "relay")
        }


def _parsed(url: str | BrokerUrl) -> BrokerUrl:
    return url if isinstance(url, BrokerUrl) else BrokerUrl.parse(url)
