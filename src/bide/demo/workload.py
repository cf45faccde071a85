"""Workload of the shop: orders, some of which fail, and messages due in the next three days."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal

from bide.demo.plan import SHORTEST
from bide.recoverability.retry_policy import Retry
from bide.topology import Queue, Topology

_RETRIES: Final = (timedelta(milliseconds=300), timedelta(milliseconds=700))
RETRY: Final = Retry(immediate=1, delays=_RETRIES)
"""At most six attempts: two immediately, then two after each delay."""

_MAX_ORDERS: Final = 200
_MESSAGES_PER_ORDER: Final = 20
"""The number of messages of the first part for each order, up to :data:`_MAX_ORDERS`."""

_MAX_SPAN: Final = timedelta(seconds=4)
_SPAN_DIVISOR: Final = 5
"""Orders are published within at most four seconds, and at most a fifth of the first part's longest delay. The same
limits hold for their delays."""

_TROUBLES: Final = (
    (ConnectionError, "the bank does not answer", 5),
    (TimeoutError, "no answer from the warehouse within 2 s", 3),
    (LookupError, "order {} has no address", None),
)
"""Exception, its message, and the largest number of failing attempts; None means that all attempts fail."""

_CUMULATIVE_SHARES: Final = (0.10, 0.15, 0.20)
"""Cumulative shares of the orders with each trouble; the remaining orders have none."""

_MESSAGES_PER_PENDING: Final = 8
_DAYS: Final = 3
_MEAN_HOURS: Final = 12.0
_STANDARD_DEVIATION_HOURS: Final = 3.0
_HOUR: Final = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """The error of a failing order.

    Attributes:
        exception: the exception that the handler raises.
        message: the message of the exception; ``{}`` stands for the number of the order.
        failures: how many attempts fail before one succeeds; None if all attempts fail.
    """

    exception: type[Exception]
    message: str
    failures: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A message to the endpoint.

    Attributes:
        number: the index of the order in the plan.
        after: when the order is published, as time since the start.
        trouble: None if the first attempt succeeds.
    """

    number: int
    after: timedelta
    delay: timedelta
    trouble: Trouble | None

    @property
    def message_id(self) -> str:
        """The message id of the order."""
        return f"order-{self.number}"

    @property
    def end(self) -> Literal["processed", "parked"]:
        """The kind of the last event that the order should cause."""
        return "parked" if self.trouble is not None and self.trouble.failures is None else "processed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A message that is due after the end of the demonstration."""

    queue: str
    delay: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Shop:
    """The second part of the demonstration.

    Attributes:
        queue: the queue of the endpoint.
        error_queue: the queue of parked orders.
        events: the stream of the endpoint's events.
        orders: the orders in the order of publishing.
        pending: messages to queues of the first part.
    """

    queue: str
    error_queue: str
    events: str
    orders: tuple[Order, ...] = field(repr=False)
    pending: tuple[Pending, ...] = field(repr=False)

    @property
    def topology(self) -> Topology:
        """The queues that only the second part uses."""
        stream = Queue(self.events, arguments={"x-queue-type": "stream"})
        return Topology(queues=[Queue.quorum(self.queue), Queue.quorum(self.error_queue), stream])

    @property
    def longest(self) -> timedelta:
        """The time from the first publish to the last attempt, if each message is on time."""
        return max(one.after + one.delay for one in self.orders) + sum(_RETRIES, timedelta(0))


def make_shop(prefix: str, *, messages: int, longest: timedelta, seed: int) -> Shop:
    """Plan orders, and messages that are due in the next three days.

    Args:
        prefix: the prefix of all names, as in the first part.
        messages: the number of messages of the first part.
        longest: the longest delay of the first part.
        seed: the seed of the generator; equal seeds give equal plans.
    """
    generator = random.Random(f"shop {seed}")  # noqa: S311 (the same orders for a seed)
    orders = min(-(-messages // _MESSAGES_PER_ORDER), _MAX_ORDERS)
    return Shop(
        queue=f"{prefix}.shop",
        error_queue=f"{prefix}.shop.errors",
        events=f"{prefix}.shop.events",
        orders=tuple(_orders(orders, min(_MAX_SPAN, longest / _SPAN_DIVISOR), generator)),
        pending=tuple(_pending(prefix, -(-messages // _MESSAGES_PER_PENDING), generator)),
    )


def _orders(count: int, span: timedelta, generator: random.Random) -> Iterator[Order]:
    for number in range(count):
        yield Order(
            number=number,
            after=number * span / count,
            delay=max(SHORTEST * round(span * generator.random() / SHORTEST), SHORTEST),
            trouble=_trouble(number, generator),
        )


def _trouble(number: int, generator: random.Random) -> Trouble | None:
    # The first orders have one trouble of each kind, even if there are only a few orders.
    kind = number if number < len(_TROUBLES) else bisect(_CUMULATIVE_SHARES, generator.random())
    if kind == len(_TROUBLES):
        return None
    exception, message, most = _TROUBLES[kind]
    return Trouble(exception=exception, message=message, failures=most and generator.randint(1, most))


def _pending(prefix: str, count: int, generator: random.Random) -> Iterator[Pending]:
    """Messages to two queues, due about 12, 36 and 60 hours after they are published."""
    for number in range(count):
        hours = min(max(generator.gauss(_MEAN_HOURS, _STANDARD_DEVIATION_HOURS), 1.0), 23.0) + 24 * (number % _DAYS)
        queue = f"{prefix}.{generator.choice(('reminders', 'reminders', 'invoices'))}"
        yield Pending(queue=queue, delay=SHORTEST * round(hours * _HOUR / SHORTEST))
