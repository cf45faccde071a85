"""Send what is planned, receive what arrives, and compare the two."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from bide.admin.apply import Removed, apply, check_release, check_streams, destroy, message_counts
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
from bide.demo.orders import sell
from bide.demo.plan import DemoPlan, Planned
from bide.demo.progress import Progress
from bide.demo.workload import Shop
from bide.topology import Queue, Topology

PATIENCE: Final = timedelta(seconds=20)
"""How long after the last due time a message counts as lost."""

_AFTERWARDS: Final = timedelta(milliseconds=500)
_MILLISECOND: Final = timedelta(milliseconds=1)


async def demonstrate(
    url: BrokerUrl, clock: Clock, progress: Progress, *, shop: Shop | None = None, management_url: str | None = None
) -> DemoFigures:
    """Run the plan on a broker. What it puts there stays; see :func:`remove`.

    Args:
        shop: the second part, which goes on where the first is done; then the clock's taps are on from the beginning.
        management_url: of the broker, for the second part.

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
    sold = None
    async with connect(url, infrastructure=clock, declare=False) as client:
        with _the_first_error():
            await run.through(client)
            if shop is not None:
                with progress.phase("shop") as phase:
                    sold = await sell(client, shop, patience=PATIENCE, management_url=management_url)
                    phase.note = (
                        f"{sold.failed:,} attempts at {sold.orders:,} orders failed, {sold.parked:,} are parked"
                    )
    async with _administration(url) as connection:
        undeliverable = await message_counts(connection, (Queue.quorum(clock.undeliverable),))
    return replace(run.figures(sum(undeliverable.values())), sold=sold)


async def remove(url: BrokerUrl, clock: Clock, plan: DemoPlan, *, shop: Shop | None = None) -> Removed:
    """Delete everything that :func:`demonstrate` put on the broker, with the messages that are still in it."""
    made = clock.topology() | plan.topology | Topology([clock.complete_mark])
    if shop is not None:
        made |= shop.topology | Topology(queues=taps_of(clock).topology(Retention()).queues)
    for target in {one.target for one in plan.messages}:
        # The release queues of exchange targets, which the publisher makes.
        made |= Topology(queues=clock.route(clock.max_delay, target).requires.queues)
    async with _administration(url) as connection:
        return await destroy(connection, made, force=True)


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

    async def through(self, client: Client) -> None:
        """Publish everything and receive everything."""
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
        """Publish each message at its moment; return when all are confirmed."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for message in self.progress.plan.messages:
                pause = start + message.after.total_seconds() - loop.time()
                if pause > 0:
                    await asyncio.sleep(pause)
                tasks.create_task(self._publish_one(client, message))

    async def _publish_one(self, client: Client, message: Planned) -> None:
        self.receipts[message.number] = await client.publish(
            _body(message),
            **_address(message),
            delay=message.delay,
            headers=_headers(message),
        )
        self.progress.published += 1

    async def _consume(self, client: Client, queue: str) -> None:
        async with client.consume(queue, prefetch=1_000) as messages:
            async for message in messages:
                self._arrived(message, queue)
                await message.ack()

    def _arrived(self, message: Message, queue: str) -> None:
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
                self.progress.lateness.add(message.lateness / _MILLISECOND)
            if self.progress.delivered == self.progress.plan.expected:
                self.complete.set()

    async def _wait(self) -> None:
        """Wait until everything has arrived, or what has not counts as lost."""
        last = max(receipt.due for receipt in self.receipts.values() if receipt.due is not None)
        patience = max(last - datetime.now(last.tzinfo), timedelta(0)) + PATIENCE
        try:
            async with asyncio.timeout(patience.total_seconds()):
                await self.complete.wait()
        except TimeoutError:
            return
        # A second copy of the last message is due when the first one is: a moment more is enough to see it.
        await asyncio.sleep(_AFTERWARDS.total_seconds())

    def figures(self, undeliverable: int) -> DemoFigures:
        """Compare what arrived with what was planned."""
        lateness = [
            (received_at - due) / _MILLISECOND
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


def _address(message: Planned) -> dict[str, Any]:
    if isinstance(message.target, ExchangeTarget):
        return {"exchange": message.target.exchange, "routing_key": message.target.routing_key}
    return {"to": message.target.queue}


def _body(message: Planned) -> bytes:
    return f"message {message.number}".encode()


def _headers(message: Planned) -> Mapping[str, Any]:
    return {"number": message.number}


def _is_as_sent(message: Message, planned: Planned) -> bool:
    """Whether a message arrived as it was sent: to the same exchange with the same key, and nothing added to it."""
    target = planned.target
    exchange, key = (target.exchange, target.routing_key) if isinstance(target, ExchangeTarget) else ("", target.queue)
    return (message.body, message.exchange, message.routing_key, message.headers) == (
        _body(planned),
        exchange,
        key,
        _headers(planned),
    )


@contextmanager
def _the_first_error() -> Iterator[None]:
    try:
        yield
    except ExceptionGroup as group:
        raise _first(group) from None


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """The first error of a group, which is what the others follow from."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
