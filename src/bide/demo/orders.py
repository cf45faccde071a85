"""Handle the shop's orders, by an endpoint that retries and parks, and compare how they ended with the plan."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from bide.demo.figures import Sold
from bide.demo.workload import RETRY, Order, Shop
from bide.endpoint import Endpoint, EventStream, Observer
from bide.runtime.logs import logger

if TYPE_CHECKING:
    from bide.client.client import Client
    from bide.client.message import Message
    from bide.endpoint import Event

_AT_ONCE: Final = 200
"""Messages that are published without waiting for each other's confirms."""


async def sell(client: Client, shop: Shop, *, patience: timedelta, management_url: str | None = None) -> Sold:
    """Publish what is planned, and handle the orders until each has ended.

    Args:
        client: whose infrastructure is there.
        patience: how long after the last attempt is due an order counts as lost.
        management_url: of the broker.

    Raises:
        ExceptionGroup: of errors of bide's: the broker cannot be reached, or refuses.
    """
    await _publish_pending(client, shop)
    ledger = _Ledger(shop)
    app = Endpoint(
        shop.queue,
        name="shop",
        retry=RETRY,
        error_queue=shop.error_queue,
        slow_down_after=None,
        observers=[EventStream(shop.events), ledger],
        management_url=management_url,
    )
    app.handler(ledger.handle)
    with _silent():
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(app.run(client))
            await _publish_orders(client, shop)
            with suppress(TimeoutError):
                async with asyncio.timeout((shop.longest + patience).total_seconds()):
                    await ledger.complete.wait()
            work.cancel()
    return ledger.sold()


async def _publish_pending(client: Client, shop: Shop) -> None:
    for first in range(0, len(shop.pending), _AT_ONCE):
        some = shop.pending[first : first + _AT_ONCE]
        await asyncio.gather(*(client.publish(b"for later", to=one.queue, delay=one.delay) for one in some))


async def _publish_orders(client: Client, shop: Shop) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    async with asyncio.TaskGroup() as tasks:
        for order in shop.orders:
            await asyncio.sleep(start + order.after.total_seconds() - loop.time())
            tasks.create_task(_publish_order(client, shop, order))


async def _publish_order(client: Client, shop: Shop, order: Order) -> None:
    await client.publish(
        json={"order": order.number}, to=shop.queue, delay=order.delay, message_id=order.message_id, type="Order"
    )


class _Ledger(Observer):
    """Handles orders, and writes down how each ended."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._ids = {one.message_id: one.number for one in shop.orders}
        self._attempts: Counter[int] = Counter()
        self._failed = 0
        self._ends: dict[int, str] = {}
        self.complete = asyncio.Event()

    async def handle(self, message: Message) -> None:
        """One attempt.

        Raises:
            Exception: what the plan wants.
        """
        order = self._shop.orders[message.json()["order"]]
        self._attempts[order.number] += 1
        trouble = order.trouble
        if trouble is not None and (trouble.failures is None or self._attempts[order.number] <= trouble.failures):
            raise trouble.exception(trouble.says.format(order.number))

    async def happened(self, event: Event) -> None:
        """Count."""
        self._failed += event.kind in ("failed", "retried", "parked")
        if event.kind in ("processed", "parked") and event.message_id in self._ids:
            self._ends[self._ids[event.message_id]] = event.kind
            if len(self._ends) == len(self._shop.orders):
                self.complete.set()

    def sold(self) -> Sold:
        """The outcome."""
        ends = Counter(self._ends.values())
        return Sold(
            orders=len(self._shop.orders),
            handled=ends["processed"],
            parked=ends["parked"],
            failed=self._failed,
            wrong=sum(self._ends.get(one.number) != one.end for one in self._shop.orders),
            pending=len(self._shop.pending),
        )


@contextmanager
def _silent() -> Iterator[None]:
    """Keep the endpoint's log from telling what is shown anyway: these failures are meant."""
    log = logger("bide.endpoint")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
