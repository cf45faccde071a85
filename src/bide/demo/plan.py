"""What the demonstration sends, where to, and who should get it: pure data, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from bide.delay.clock_digits import RESOLUTION
from bide.delay.protocol import ExchangeTarget, QueueTarget, Target
from bide.durations import format_delay
from bide.errors import InvalidInputError
from bide.topology import Binding, Exchange, Queue, Topology

SHORTEST: Final = RESOLUTION
LONGEST: Final = timedelta(minutes=10)
MAX_MESSAGES: Final = 100_000

_QUEUES: Final = ("orders", "invoices", "reminders")
_BINDINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "audit": ("#",),
    "created": ("order.created", "order.created.#"),
    "europe": ("*.*.eu.#",),
    "failures": ("#.failed", "#.failed.*"),
    "short": ("*",),
}
"""Queues of the topic exchange, with every kind of wildcard: their messages must not get one more for being delayed."""

_ROUTING_KEYS: Final = (
    "order.created",
    "order.created.eu",
    "order.created.us.express",
    "payment.failed",
    "payment.failed.eu",
    "heartbeat",
)
_PUBLISHING: Final = timedelta(seconds=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One message.

    Attributes:
        number: its place in the plan, and its body.
        after: when it is published, counted from the start.
        recipients: the queues that should get one copy each.
    """

    number: int
    after: timedelta
    delay: timedelta
    target: Target
    recipients: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """The whole demonstration.

    Attributes:
        topology: the queues and the exchange that messages go to.
        messages: in the order of their publishing.
    """

    prefix: str
    topology: Topology
    messages: tuple[Planned, ...] = field(repr=False)

    @property
    def expected(self) -> int:
        """Copies that have to arrive."""
        return sum(len(one.recipients) for one in self.messages)

    @property
    def longest(self) -> timedelta:
        """The longest delay."""
        return max(one.delay for one in self.messages)


def make_plan(prefix: str, *, messages: int, longest: timedelta, seed: int) -> DemoPlan:
    """Plan so many messages with delays from 10 ms to *longest*, two thirds to queues, one to a topic exchange.

    A third of the delays are whole seconds, as people choose them; the others are spread evenly over the orders of
    magnitude. The publishing takes at most ten seconds, and half the longest delay.

    Args:
        prefix: of the names of the queues and of the exchange.
        messages: 1 to 100,000.
        longest: at least 10 ms, at most 10 minutes.
        seed: the same one gives the same plan.

    Raises:
        InvalidInputError: one of them is out of its range.
    """
    if not 1 <= messages <= MAX_MESSAGES:
        raise InvalidInputError(f"{messages} messages: give 1 to {MAX_MESSAGES:,}")
    if not SHORTEST <= longest <= LONGEST:
        raise InvalidInputError(
            f"the longest delay {format_delay(longest)} must be from {format_delay(SHORTEST)} to "
            f"{format_delay(LONGEST)}"
        )
    topology = _topology(prefix)
    pause = min(_PUBLISHING, longest / 2) / messages
    return DemoPlan(
        prefix=prefix,
        topology=topology,
        messages=tuple(_messages(prefix, topology, messages, pause, longest, random.Random(seed))),  # noqa: S311
    )


def _topology(prefix: str) -> Topology:
    events = f"{prefix}.events"
    bindings = {f"{prefix}.{name}": keys for name, keys in _BINDINGS.items()}
    return Topology(
        [Exchange(events, "topic")],
        [Queue.quorum(name) for name in (*(f"{prefix}.{one}" for one in _QUEUES), *bindings)],
        [Binding(events, queue, key) for queue, keys in bindings.items() for key in keys],
    )


def _messages(
    prefix: str, topology: Topology, count: int, pause: timedelta, longest: timedelta, generator: random.Random
) -> Iterator[Planned]:
    from bide.topology.routing import Model

    model = Model(topology)
    targets: list[tuple[Target, frozenset[str]]] = [
        (QueueTarget(f"{prefix}.{name}"), frozenset({f"{prefix}.{name}"})) for name in _QUEUES
    ]
    events = [
        (ExchangeTarget(exchange.name, key, exchange.type), model.route(exchange.name, key).queues)
        for exchange in topology.exchanges
        for key in _ROUTING_KEYS
    ]
    for number in range(count):
        target, recipients = generator.choice(targets if generator.random() < 2 / 3 else events)
        yield Planned(
            number=number,
            after=number * pause,
            delay=_delay(longest, generator),
            target=target,
            recipients=recipients,
        )


def _delay(longest: timedelta, generator: random.Random) -> timedelta:
    seconds = longest // timedelta(seconds=1)
    if seconds and generator.random() < 1 / 3:
        return timedelta(seconds=generator.randint(1, seconds))
    steps: float = (longest / SHORTEST) ** generator.random()
    return min(SHORTEST * round(steps), longest)
