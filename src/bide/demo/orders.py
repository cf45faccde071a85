"""Run of the shop: an endpoint that retries and parks orders."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from bide.demo.figures import ShopFigures
from bide.demo.workload import RETRY, Order, Shop
from bide.endpoint import Endpoint, EventStream, Observer
from bide.runtime.logs import logger

if TYPE_CHECKING:
    from bide.client.client import Client
    from bide.client.message import Message
    from bide.endpoint import Event

_WINDOW: Final = 200
"""Messages that are published without waiting for confirms in between."""


async def run_shop(client: Client, shop: Shop, *, grace: timedelta, management_url: str | None = None) -> ShopFigures:
    """Publish the planned messages, and handle the orders until each one is processed or parked.

    Args:
        client: a client whose delay infrastructure is declared.
        grace: time to wait after the last planned attempt; orders that have not ended by then count as wrong.
        management_url: the URL of the management API; None for the default URL.

    Raises:
        ExceptionGroup: errors of bide, when the broker cannot be reached or refuses.
    """
    await _publish_pending(client, shop)
    handler = _OrderHandler(shop)
    app = Endpoint(
        shop.queue,
        name="shop",
        retry=RETRY,
        error_queue=shop.error_queue,
        slow_down_after=None,
        observers=[EventStream(shop.events), handler],
        management_url=management_url,
    )
    app.handler(handler.handle)
    with _without_log():
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(app.run(client))
            await _publish_orders(client, shop)
            with suppress(TimeoutError):
                async with asyncio.timeout((shop.longest + grace).total_seconds()):
                    await handler.complete.wait()
            work.cancel()
    return handler.figures()


async def _publish_pending(client: Client, shop: Shop) -> None:
    for first in range(0, len(shop.pending), _WINDOW):
        window = shop.pending[first : first + _WINDOW]
        await asyncio.gather(*(client.publish(b"for later", to=one.queue, delay=one.delay) for one in window))


async def _publish_orders(client: Client, shop: Shop) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    async with asyncio.TaskGroup() as tasks:
        for order in shop.orders:
            await asyncio.sleep(start + order.after.total_seconds() - loop.time())  # orders follow a plan
            tasks.create_task(_publish_order(client, shop, order))


async def _publish_order(client: Client, shop: Shop, order: Order) -> None:
    await client.publish(
        json={"order": order.number}, to=shop.queue, delay=order.delay, message_id=order.message_id, type="Order"
    )


class _OrderHandler(Observer):
    """Handles orders, and records how each one ended."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._ids = {one.message_id: one.number for one in shop.orders}
        self._attempts: Counter[int] = Counter()
        self._failed = 0
        self._ends: dict[int, str] = {}
        self.complete = asyncio.Event()

    async def handle(self, message: Message) -> None:
        """Make one attempt at an order.

        Raises:
            Exception: the one that the plan has for this attempt.
        """
        order = self._shop.orders[message.json()["order"]]
        self._attempts[order.number] += 1
        trouble = order.trouble
        if trouble is not None and (trouble.failures is None or self._attempts[order.number] <= trouble.failures):
            raise trouble.exception(trouble.message.format(order.number))

    async def happened(self, event: Event) -> None:
        """Count failed attempts, and record the end of an order."""
        self._failed += event.kind in ("failed", "retried", "parked")
        if event.kind in ("processed", "parked") and event.message_id in self._ids:
            self._ends[self._ids[event.message_id]] = event.kind
            if len(self._ends) == len(self._shop.orders):
                self.complete.set()

    def figures(self) -> ShopFigures:
        """Compare how the orders ended with the plan."""
        ends = Counter(self._ends.values())
        return ShopFigures(
            orders=len(self._shop.orders),
            handled=ends["processed"],
            parked=ends["parked"],
            failed=self._failed,
            wrong=sum(self._ends.get(one.number) != one.end for one in self._shop.orders),
            pending=len(self._shop.pending),
        )


@contextmanager
def _without_log() -> Iterator[None]:
    """Silence the log of the endpoint, whose errors are intended here and counted in the output."""
    log = logger("bide.endpoint")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
