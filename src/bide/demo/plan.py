"""Plan of the demonstration: messages, targets and the queues that should receive them."""

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
"""Queues of the topic exchange and their binding keys, which use each kind of wildcard. A delayed message has to reach
exactly the queues that an undelayed one reaches."""

_ROUTING_KEYS: Final = (
    "order.created",
    "order.created.eu",
    "order.created.us.express",
    "payment.failed",
    "payment.failed.eu",
    "heartbeat",
)
_MAX_PUBLISHING: Final = timedelta(seconds=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMessage:
    """A planned message.

    Attributes:
        number: the index of the message in the plan, which is part of its body.
        after: when the message is published, as time since the start.
        recipients: the queues that should receive one copy each.
    """

    number: int
    after: timedelta
    delay: timedelta
    target: Target
    recipients: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """The plan of the first part of the demonstration.

    Attributes:
        prefix: the prefix of all names.
        topology: the queues and the exchange that the messages are sent to.
        messages: the messages in the order of publishing.
    """

    prefix: str
    topology: Topology
    messages: tuple[PlannedMessage, ...] = field(repr=False)

    @property
    def expected(self) -> int:
        """The number of copies that have to arrive."""
        return sum(len(one.recipients) for one in self.messages)

    @property
    def longest(self) -> timedelta:
        """The longest delay."""
        return max(one.delay for one in self.messages)


def make_plan(prefix: str, *, messages: int, longest: timedelta, seed: int) -> DemoPlan:
    """Plan messages with delays from 10 ms to *longest*: two thirds to queues, one third to a topic exchange.

    A third of the delays are whole seconds, as people tend to choose them; the others are spread evenly over the
    orders of magnitude. Publishing takes at most ten seconds and at most half of *longest*.

    Args:
        prefix: the prefix of the names of the queues and of the exchange.
        messages: the number of messages, 1 to 100,000.
        longest: the longest delay, 10 ms to 10 minutes.
        seed: the seed of the generator; equal seeds give equal plans.

    Raises:
        InvalidInputError: an argument is out of its range.
    """
    if not 1 <= messages <= MAX_MESSAGES:
        raise InvalidInputError(f"a demo cannot have {messages:,} messages: give 1 to {MAX_MESSAGES:,}")
    if not SHORTEST <= longest <= LONGEST:
        raise InvalidInputError(
            f"the longest delay cannot be {format_delay(longest)}: give {format_delay(SHORTEST)} to "
            f"{format_delay(LONGEST)}"
        )
    topology = _topology(prefix)
    pause = min(_MAX_PUBLISHING, longest / 2) / messages
    return DemoPlan(
        prefix=prefix,
        topology=topology,
        messages=tuple(_messages(prefix, topology, messages, pause, longest, random.Random(seed))),  # noqa: S311 (repeatable)
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
) -> Iterator[PlannedMessage]:
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
        yield PlannedMessage(
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
