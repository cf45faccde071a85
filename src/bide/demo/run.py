"""Run of the demonstration: publish the planned messages, receive them, and compare."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from bide.admin.apply import apply, check_release, check_streams, message_counts
from bide.admin.destroy import Removed, destroy
from bide.admin.infrastructure import install
from bide.admin.taps import turn_on
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.client import Client, connect
from bide.client.message import Message
from bide.client.publisher import Receipt
from bide.delay.clock import Clock
from bide.delay.protocol import ExchangeTarget
from bide.delay.taps import Retention, taps_of
from bide.demo.figures import DemoFigures, Lateness
from bide.demo.orders import run_shop
from bide.demo.plan import DemoPlan, PlannedMessage
from bide.demo.progress import Progress
from bide.demo.workload import Shop
from bide.durations import MILLISECOND
from bide.runtime.wording import quantity
from bide.topology import Queue, Topology

GRACE: Final = timedelta(seconds=20)
"""Time after the last due time; a message that has not arrived by then counts as lost."""

_DUPLICATE_WAIT: Final = timedelta(milliseconds=500)


async def demonstrate(
    url: BrokerUrl, clock: Clock, progress: Progress, *, shop: Shop | None = None, management_url: str | None = None
) -> DemoFigures:
    """Run the plan on a broker. Queues and exchanges stay there until :func:`remove`.

    Args:
        shop: the workload of the second part, which runs after the plan; None to leave it out. With it, the taps of the
            clock are on from the start.
        management_url: the URL of the management API, for the second part; None for the default URL.

    Raises:
        BideError: the broker cannot be reached, or refuses.
    """
    plan = progress.plan
    with progress.phase("apply") as phase:
        async with _administration(url) as connection:
            progress.release = ".".join(map(str, connection.release))
            await check_streams(connection)
            applied = await install(connection, clock)
            await apply(connection, plan.topology)
            phase.note = str(applied)
            if shop is not None:
                await apply(connection, shop.topology)
                await turn_on(connection, clock)
                phase.note += ", and the taps"
    run = _Run(progress)
    shop_figures = None
    async with connect(url, infrastructure=clock, declare=False) as client:
        with _raise_first_error():
            await run.execute(client)
            if shop is not None:
                with progress.phase("shop") as phase:
                    done = shop_figures = await run_shop(client, shop, grace=GRACE, management_url=management_url)
                    phase.note = (
                        f"{quantity(done.orders, 'order')}: {quantity(done.failed, 'failed attempt')}, "
                        f"{done.parked:,} parked"
                    )
    async with _administration(url) as connection:
        undeliverable = await message_counts(connection, (Queue.quorum(clock.undeliverable),))
    return replace(run.figures(sum(undeliverable.values())), shop=shop_figures)


async def remove(url: BrokerUrl, clock: Clock, plan: DemoPlan, *, shop: Shop | None = None) -> Removed:
    """Delete all queues and exchanges that :func:`demonstrate` declared, with the messages in them."""
    declared = clock.topology() | plan.topology | Topology([clock.complete_mark])
    if shop is not None:
        declared |= shop.topology | Topology(queues=taps_of(clock).topology(Retention()).queues)
    for target in {one.target for one in plan.messages}:
        # The publisher declares a release queue for each exchange target.
        declared |= Topology(queues=clock.route(clock.max_delay, target).requires.queues)
    async with _administration(url) as connection:
        return await destroy(connection, declared, force=True)


@asynccontextmanager
async def _administration(url: BrokerUrl) -> AsyncIterator[Connection]:
    connection = await Connection.open(replace(url, name=f"{url.name} (demo)"))
    try:
        check_release(connection)
        yield connection
    finally:
        await connection.close()


@dataclass(slots=True)
class _Run:
    progress: Progress
    receipts: dict[int, Receipt] = field(default_factory=dict)
    arrivals: dict[tuple[int, str], datetime] = field(default_factory=dict)
    duplicates: int = 0
    misrouted: int = 0
    altered: int = 0
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    async def execute(self, client: Client) -> None:
        """Publish all messages and receive their copies."""
        async with asyncio.TaskGroup() as tasks:
            consumers = [
                tasks.create_task(self._consume(client, queue.name)) for queue in self.progress.plan.topology.queues
            ]
            with self.progress.phase("publish") as phase:
                await self._publish(client)
                phase.note = f"{self.progress.published:,} messages, each confirmed by the broker"
            with self.progress.phase("wait") as phase:
                await self._wait()
                phase.note = f"{self.progress.delivered:,} deliveries"
            for task in consumers:
                task.cancel()

    async def _publish(self, client: Client) -> None:
        """Publish each message at its planned time; return when all are confirmed."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for message in self.progress.plan.messages:
                pause = start + message.after.total_seconds() - loop.time()
                if pause > 0:
                    await asyncio.sleep(pause)  # messages follow a plan
                tasks.create_task(self._publish_one(client, message))

    async def _publish_one(self, client: Client, message: PlannedMessage) -> None:
        self.receipts[message.number] = await client.publish(
            _body(message),
            **_target_arguments(message),
            delay=message.delay,
            headers=_headers(message),
        )
        self.progress.published += 1

    async def _consume(self, client: Client, queue: str) -> None:
        async with client.consume(queue, prefetch=1_000) as messages:
            async for message in messages:
                self._record(message, queue)
                await message.ack()

    def _record(self, message: Message, queue: str) -> None:
        number = message.headers.get("number")
        planned = self.progress.plan.messages[number] if isinstance(number, int) else None
        if planned is None or queue not in planned.recipients:
            self.misrouted += 1
        elif (planned.number, queue) in self.arrivals:
            self.duplicates += 1
        else:
            self.arrivals[planned.number, queue] = message.received_at
            self.altered += not _is_as_sent(message, planned)
            self.progress.delivered += 1
            if message.lateness is not None:
                self.progress.lateness.add(message.lateness / MILLISECOND)
            if self.progress.delivered == self.progress.plan.expected:
                self.complete.set()

    async def _wait(self) -> None:
        """Wait until all copies have arrived, or until the missing ones count as lost."""
        last = max(receipt.due for receipt in self.receipts.values() if receipt.due is not None)
        timeout = max(last - datetime.now(last.tzinfo), timedelta(0)) + GRACE
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                await self.complete.wait()
        except TimeoutError:
            return
        # A duplicate is due at the same time as the original, so a short wait is enough to receive it.
        await asyncio.sleep(_DUPLICATE_WAIT.total_seconds())

    def figures(self, undeliverable: int) -> DemoFigures:
        """Compare the copies that arrived with the plan."""
        lateness = [
            (received_at - due) / MILLISECOND
            for (number, _), received_at in self.arrivals.items()
            if (due := self.receipts[number].due) is not None
        ]
        plan = self.progress.plan
        return DemoFigures(
            release=self.progress.release,
            published=len(self.receipts),
            expected=plan.expected,
            delivered=len(self.arrivals),
            lost=plan.expected - len(self.arrivals),
            early=sum(1 for one in lateness if one < 0),
            duplicates=self.duplicates,
            misrouted=self.misrouted,
            altered=self.altered,
            undeliverable=undeliverable,
            lateness=Lateness.of(lateness),
            hops=Counter(receipt.hops for receipt in self.receipts.values()),
            seconds=self.progress.seconds(),
        )


def _target_arguments(message: PlannedMessage) -> dict[str, Any]:
    if isinstance(message.target, ExchangeTarget):
        return {"exchange": message.target.exchange, "routing_key": message.target.routing_key}
    return {"to": message.target.queue}


def _body(message: PlannedMessage) -> bytes:
    return f"message {message.number}".encode()


def _headers(message: PlannedMessage) -> Mapping[str, Any]:
    return {"number": message.number}


def _is_as_sent(message: Message, planned: PlannedMessage) -> bool:
    """Whether exchange, routing key, headers and body of a message are as sent."""
    target = planned.target
    exchange, key = (target.exchange, target.routing_key) if isinstance(target, ExchangeTarget) else ("", target.queue)
    return (message.body, message.exchange, message.routing_key, message.headers) == (
        _body(planned),
        exchange,
        key,
        _headers(planned),
    )


@contextmanager
def _raise_first_error() -> Iterator[None]:
    try:
        yield
    except ExceptionGroup as group:
        raise _first_error(group) from None


def _first_error(group: ExceptionGroup[Exception]) -> Exception:
    """The first error of a group, which caused the others."""
    error = group.exceptions[0]
    return _first_error(error) if isinstance(error, ExceptionGroup) else error
