"""What the demonstration does for its report: orders, some of which fail, and messages of days to come. Pure data."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal

from bide.demo.plan import SHORTEST
from bide.recoverability.policy import Retry
from bide.topology import Queue, Topology

_RETRIES: Final = (timedelta(milliseconds=300), timedelta(milliseconds=700))
RETRY: Final = Retry(immediate=1, delays=_RETRIES)
"""A message is tried six times in all: twice, then twice after each delay."""

_MOST: Final = 200
_SHARE: Final = 20
"""One order for so many messages of the first part."""

_SELLING: Final = timedelta(seconds=4)
_PART: Final = 5
"""They are sent, and wait, for at most a fifth of the longest delay of the first part."""

_TROUBLES: Final = (
    (ConnectionError, "the bank does not answer", 5),
    (TimeoutError, "no answer from the warehouse within 2 s", 3),
    (LookupError, "order {} has no address", None),
)
"""Each with how many attempts fail at most; None for all of them."""

_SHARES: Final = (0.10, 0.15, 0.20)
"""Orders up to this part of all have the trouble at that place, the others none."""

_PENDING_SHARE: Final = 8
_DAYS: Final = 3
_MIDDLE: Final = 12.0
_SPREAD: Final = 3.0
_HOUR: Final = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What goes wrong with an order.

    Attributes:
        exception: that its handler raises.
        says: what the exception says; ``{}`` stands for the order's number.
        failures: how many attempts fail before one succeeds; None for all of them.
    """

    exception: type[Exception]
    says: str
    failures: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One message to the endpoint.

    Attributes:
        number: its place in the plan.
        after: when it is published, counted from the start.
        trouble: None for one that is handled at the first attempt.
    """

    number: int
    after: timedelta
    delay: timedelta
    trouble: Trouble | None

    @property
    def message_id(self) -> str:
        """Its message id."""
        return f"order-{self.number}"

    @property
    def end(self) -> Literal["processed", "parked"]:
        """The kind of the last event that it should cause."""
        return "parked" if self.trouble is not None and self.trouble.failures is None else "processed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A message that is not delivered any more while the demonstration lasts."""

    queue: str
    delay: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Shop:
    """The second part of the demonstration.

    Attributes:
        queue: the endpoint's.
        error_queue: where it parks what fails for good.
        events: the stream of its events.
        orders: in the order of their publishing.
        pending: messages to queues of the first part.
    """

    queue: str
    error_queue: str
    events: str
    orders: tuple[Order, ...] = field(repr=False)
    pending: tuple[Pending, ...] = field(repr=False)

    @property
    def topology(self) -> Topology:
        """All that it has on the broker for itself."""
        stream = Queue(self.events, arguments={"x-queue-type": "stream"})
        return Topology(queues=[Queue.quorum(self.queue), Queue.quorum(self.error_queue), stream])

    @property
    def longest(self) -> timedelta:
        """From the first publishing to the last attempt, if everything is on time."""
        return max(one.after + one.delay for one in self.orders) + sum(_RETRIES, timedelta(0))


def make_shop(prefix: str, *, messages: int, longest: timedelta, seed: int) -> Shop:
    """Plan some orders and some messages of the next three days.

    Args:
        prefix: of all names, as for the first part.
        messages: of the first part.
        longest: delay of the first part.
        seed: the same one gives the same plan.
    """
    generator = random.Random(f"shop {seed}")  # noqa: S311
    orders = min(-(-messages // _SHARE), _MOST)
    return Shop(
        queue=f"{prefix}.shop",
        error_queue=f"{prefix}.shop.errors",
        events=f"{prefix}.shop.events",
        orders=tuple(_orders(orders, min(_SELLING, longest / _PART), generator)),
        pending=tuple(_pending(prefix, -(-messages // _PENDING_SHARE), generator)),
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
    # The first ones have one of each kind, however few orders there are.
    kind = number if number < len(_TROUBLES) else bisect(_SHARES, generator.random())
    if kind == len(_TROUBLES):
        return None
    exception, says, most = _TROUBLES[kind]
    return Trouble(exception=exception, says=says, failures=most and generator.randint(1, most))


def _pending(prefix: str, count: int, generator: random.Random) -> Iterator[Pending]:
    """Around the same hour of each day, as people plan it, in two queues."""
    for number in range(count):
        hours = min(max(generator.gauss(_MIDDLE, _SPREAD), 1.0), 23.0) + 24 * (number % _DAYS)
        queue = f"{prefix}.{generator.choice(('reminders', 'reminders', 'invoices'))}"
        yield Pending(queue=queue, delay=SHORTEST * round(hours * _HOUR / SHORTEST))
