"""``WaitingHall``: a few binary levels, and a hall in which longer delays go round.

Every message checks in with its due time. A relay (``bide relay``) looks at each one and sends it on: one with more to
wait than all levels together meditates for as long as the highest level and checks in again; any other goes through
the levels that its binary digits name, and from there to its target, with the routing key that it was sent with. With
levels of 1, 2, 4 and 8 seconds, 27 seconds are two rounds of 8, then ``1.0.1.1``: 8 + 2 + 1.

Exchanges (in brackets) and queues, from the publisher to the target (``P`` is the prefix and the layout's version,
``bide.hall.v1``)::

    [P.check-in] -> P.receiving -> relay -> [P.meditating] -> P.meditating -> [P.check-in] ...
                                   relay -> [P.level-03] -> P.level-03 -> [P.level-02] -> ... -> [P.released]
    [P.released] -> P.distributing -> relay -> the target: a queue, any exchange, or [P.pick-up]

After the idea of the project delayed-messaging-with-rabbitmq. What the relay does with a message is in
:mod:`bide.relay.decision`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Final

from bide.delay.protocol import (
    HEADER_TO,
    DelayInfrastructure,
    DelayRoute,
    QueueTarget,
    Step,
    Target,
    address_of,
    check_name,
    check_span,
    existing,
    round_up,
)
from bide.delay.queues import final_queue, safe_queue, waiting_queue
from bide.durations import format_delay
from bide.errors import InvalidDelayError, InvalidInputError, InvalidNameError, UnsupportedTargetError
from bide.topology import Argument, Binding, Exchange, Topology

LAYOUT_VERSION: Final = "v1"
DEFAULT_LEVELS: Final = 20
MAX_LEVELS: Final = 28

HEADER_REST: Final = "bide-rest"
"""Header of a message in the hall: how long it had to wait when it was last sent on, in milliseconds."""

MAX_DELAY: Final = timedelta(days=36525)
"""A hundred years. Going round has no end by itself, but more than this is a mistake in the unit."""

MAX_TTL: Final = timedelta(days=3650)
"""RabbitMQ's limit for the TTL of a queue."""

RELAY: Final = "(relay)"
"""What stands for the relay in explanations: no exchange can have this name in the hall."""

_UNIT: Final = timedelta(seconds=1)
_MILLISECOND: Final = timedelta(milliseconds=1)
_GIVE_UP_AFTER: Final = 1000
"""Deliveries after which the queues of the relay set a message aside. Explicit, because the
default of RabbitMQ 4 is 20, and a lost connection of a relay counts for all messages that it held unacknowledged."""

_SHOWN_ROUNDS: Final = 4
"""Of more rounds, the explanation sums up those in the middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingHall(DelayInfrastructure):
    """Delays of up to a hundred years on few queues, with a relay that sees to the messages' way.

    Without a relay nothing gets lost, and nothing moves: run ``bide relay --allow ...`` with the same settings, as many
    as you like. A due time counts by the clock of the relay, so keep the clocks of its machine and the publishers'
    together.

    Halls whose settings differ do no harm to each other: the name holds the resolution where it is not a second, and
    levels mean the same in a hall of more levels.

    Args:
        prefix: starts every name, so that several applications can share a virtual host.
        levels: how many there are, 1 to 28; each holds messages twice as long as the one below it.
        resolution: the wait of the lowest level, in whole milliseconds; delays are rounded up to a multiple of it.

    Raises:
        InvalidInputError: ``levels`` is out of range.
        InvalidDelayError: the resolution is not in whole milliseconds, less than 10 ms, or so long that the highest
            level would hold messages longer than a queue of RabbitMQ can.
        InvalidNameError: the prefix is empty, too long, or starts with ``amq.``.
    """

    prefix: str = "bide"
    levels: int = DEFAULT_LEVELS
    resolution: timedelta = _UNIT

    def __post_init__(self) -> None:
        check_name("prefix", self.prefix, limit=100)
        if self.prefix.startswith("amq."):
            raise InvalidNameError(f"the prefix {self.prefix!r} starts with 'amq.', which RabbitMQ keeps for itself")
        if not 1 <= self.levels <= MAX_LEVELS:
            raise InvalidInputError(f"{self.levels} levels: give 1 to {MAX_LEVELS}")
        check_span("resolution", self.resolution)
        if self.resolution < timedelta(milliseconds=10) or self.resolution % _MILLISECOND:
            raise InvalidDelayError(
                f"the resolution {format_delay(self.resolution)} must be a whole number of milliseconds, 10 at least: "
                "1s or 250ms for example"
            )
        if self.resolution > MAX_TTL // (1 << self.levels - 1):
            raise InvalidDelayError(
                f"the highest of {self.levels} levels of {format_delay(self.resolution)} would hold messages longer "
                f"than RabbitMQ's limit of {format_delay(MAX_TTL)}: give fewer levels, longer delays go round"
            )

    @property
    def name(self) -> str:
        """The layout's name on the command line."""
        return "waiting-hall"

    @property
    def max_delay(self) -> timedelta:
        """A hundred years, whatever the levels."""
        return MAX_DELAY

    @property
    def span(self) -> timedelta:
        """The wait of all levels together: longer delays go round."""
        return self.resolution * ((1 << self.levels) - 1)

    @property
    def round(self) -> timedelta:
        """The wait of one round, which is that of the highest level."""
        return self.resolution * (1 << self.levels - 1)

    @property
    def base(self) -> str:
        """What all names start with."""
        if self.resolution == _UNIT:
            return f"{self.prefix}.hall.{LAYOUT_VERSION}"
        return f"{self.prefix}.hall-{self.resolution // _MILLISECOND}ms.{LAYOUT_VERSION}"

    @property
    def check_in(self) -> str:
        """The fanout exchange that messages are published to, and return to from the meditating queue."""
        return f"{self.base}.check-in"

    @property
    def receiving_queue(self) -> str:
        """The queue that messages wait in for the relay to send them round, or to the levels."""
        return f"{self.base}.receiving"

    @property
    def meditating(self) -> str:
        """The fanout exchange, and its queue, where messages wait that have to go round.

        Its wait is part of the name, so that halls with other levels have another.
        """
        return f"{self.base}.meditating-{self.levels - 1:02}"

    @property
    def released_exchange(self) -> str:
        """The fanout exchange that every message passes after the levels."""
        return f"{self.base}.released"

    @property
    def distributing_queue(self) -> str:
        """The queue that messages wait in for the relay to bring them to their targets."""
        return f"{self.base}.distributing"

    @property
    def delivery_exchange(self) -> str:
        """The pick-up exchange, a topic exchange: the target of whatever names no other."""
        return f"{self.base}.pick-up"

    @property
    def undeliverable(self) -> str:
        """The exchange, and its queue, for messages that nothing takes."""
        return f"{self.base}.undeliverable"

    @property
    def relay_queues(self) -> tuple[str, str]:
        """The queues that a relay consumes from."""
        return self.receiving_queue, self.distributing_queue

    def level_name(self, level: int) -> str:
        """The exchange of a level, and its queue; 0 is the lowest."""
        return f"{self.base}.level-{level:02}"

    def owns(self, name: str) -> bool:
        """Whether an exchange or queue of this name belongs to this infrastructure."""
        return name.startswith(f"{self.base}.")

    def topology(self) -> Topology:
        """All exchanges, queues and bindings of the infrastructure."""
        return _topology(self)

    def probes(self) -> Topology:
        """The pick-up exchange, the highest level's queue, and the meditating one, which only as many levels have."""
        wanted = {self.level_name(self.levels - 1), self.meditating}
        return Topology(
            [Exchange(self.delivery_exchange, "topic")], [one for one in self.topology().queues if one.name in wanted]
        )

    def key(self, units: int) -> str:
        """The routing key in the levels: the binary digits of the wait, from the first ``1`` on."""
        return ".".join(f"{units:b}")

    def entry_exchange(self, units: int) -> str:
        """The exchange by which a wait of this many units, at least one, enters the levels."""
        return self.level_name(units.bit_length() - 1)

    def rounds(self, units: int) -> int:
        """How often a wait of this many units goes round before the levels can hold the rest."""
        beyond = units - ((1 << self.levels) - 1)
        return max(-(-beyond // (1 << self.levels - 1)), 0)

    def route(self, delay: timedelta, target: Target, *, message_id: str = "") -> DelayRoute:
        """Where and how to publish so that the message reaches ``target`` after ``delay``.

        A delay of zero goes straight to the target. Nothing has to be bound for a target: the relay addresses it.

        Args:
            delay: zero or more.
            target: a queue, ``isolated`` or not (each is: a message that its target refuses goes round once more), or
                an exchange of any type.
            message_id: makes no difference here: there is one queue per level.

        Raises:
            InvalidDelayError: negative, or longer than a hundred years.
            InvalidNameError: the target's name or the routing key is too long.
            UnsupportedTargetError: the default exchange (name the queue instead), or a part of the hall itself other
                than its pick-up exchange.
        """
        units = round_up(delay, self.resolution, maximum=MAX_DELAY)
        exchange, routing_key = self._address(target)
        expects = existing(target)
        wait = units * self.resolution
        if not units:
            return DelayRoute(
                exchange=exchange, routing_key=routing_key, delay=wait, hops=0, requires=Topology(), expects=expects
            )
        rounds = self.rounds(units)
        rest = units - rounds * (1 << self.levels - 1)
        return DelayRoute(
            exchange=self.check_in,
            routing_key=routing_key,
            headers={HEADER_TO: str(target), HEADER_REST: wait // _MILLISECOND},
            delay=wait,
            hops=2 * rounds + 1 + rest.bit_count() + 1,
            requires=Topology(),
            expects=expects,
        )

    def _address(self, target: Target) -> tuple[str, str]:
        """The exchange and the routing key of an undelayed publish to this target, checked."""
        address = address_of(target)
        kind, name = ("queue", target.queue) if isinstance(target, QueueTarget) else ("exchange", target.exchange)
        if self.owns(name) and (kind, name) != ("exchange", self.delivery_exchange):
            raise UnsupportedTargetError(
                f"the {kind} {name!r} is part of the waiting hall: name a queue or exchange of your own, or the "
                f"pick-up exchange {self.delivery_exchange!r}"
            )
        return address

    def steps(self, delay: timedelta, target: Target) -> tuple[Step, ...]:
        """Every exchange on the way of a message, and the relay in between, in order.

        Where there are many rounds, those in the middle are one step.
        """
        return tuple(self._steps(delay, target))

    def _steps(self, delay: timedelta, target: Target) -> Iterator[Step]:
        route = self.route(delay, target)
        exchange, key = self._address(target)
        to = target.queue if isinstance(target, QueueTarget) else target.exchange
        if not route.hops:
            yield Step(exchange=exchange or "(default)", segment=key, value="-", routed_to=to)
            return
        units = route.delay // self.resolution
        rounds = self.rounds(units)
        for first, count in _grouped(rounds):
            left = route.delay - (first - 1) * self.round
            yield self._checking_in(key, left)
            yield Step(
                exchange=RELAY,
                segment=_seconds(left),
                value=f"> {_seconds(self.span)}: round {first}" + (f" to {first + count - 1}" if count > 1 else ""),
                routed_to=self.meditating,
            )
            yield Step(
                exchange=self.meditating,
                segment="(any)",
                value="-" if count == 1 else f"{count} times",
                routed_to=self.meditating,
                delay=self.round * count,
                dead_letter_to=self.check_in,
            )
        units -= rounds * (1 << self.levels - 1)
        digits = self.key(units)
        yield self._checking_in(key, units * self.resolution)
        yield Step(
            exchange=RELAY,
            segment=_seconds(units * self.resolution),
            value=digits,
            routed_to=self.entry_exchange(units),
        )
        for level in range(units.bit_length() - 1, -1, -1):
            below = self._below(level)
            waits = units >> level & 1
            yield Step(
                exchange=self.level_name(level),
                segment=digits,
                value=str(waits),
                routed_to=self.level_name(level) if waits else below,
                delay=self.resolution * (1 << level) * waits,
                dead_letter_to=below if waits else None,
            )
        yield Step(exchange=self.released_exchange, segment="(any)", value="-", routed_to=self.distributing_queue)
        yield Step(exchange=RELAY, segment=digits, value=key, routed_to=exchange or "(default)")
        yield Step(
            exchange=exchange or "(default)",
            segment=key,
            value=key or "-",
            routed_to=to if isinstance(target, QueueTarget) else "its bindings",
        )

    def _checking_in(self, key: str, left: timedelta) -> Step:
        return Step(exchange=self.check_in, segment=key, value=_seconds(left), routed_to=self.receiving_queue)

    def _below(self, level: int) -> str:
        return self.level_name(level - 1) if level else self.released_exchange


def _grouped(rounds: int) -> Iterator[tuple[int, int]]:
    """The rounds to show: the number of the first one of each group, and how many there are in it."""
    if rounds <= _SHOWN_ROUNDS:
        yield from ((number, 1) for number in range(1, rounds + 1))
        return
    yield 1, 1
    yield 2, rounds - 2
    yield rounds, 1


def _seconds(wait: timedelta) -> str:
    return f"{wait.total_seconds():.15g} s"


@lru_cache(maxsize=16)
def _topology(hall: WaitingHall) -> Topology:
    alternate = {"alternate-exchange": hall.undeliverable}
    exchanges = [
        Exchange(hall.undeliverable, "fanout"),
        # Without an alternate exchange: what matches no binding comes back to the relay, which sets it aside with all
        # that it needs to be sent once more.
        Exchange(hall.delivery_exchange, "topic"),
        Exchange(hall.released_exchange, "fanout"),
        Exchange(hall.check_in, "fanout"),
        Exchange(hall.meditating, "fanout"),
    ]
    # What the relay rejects, and what makes relays die again and again, is set aside rather than dropped.
    given_up: dict[str, Argument] = {
        "x-dead-letter-exchange": hall.undeliverable,
        "x-delivery-limit": _GIVE_UP_AFTER,
    }
    queues = [
        final_queue(hall.undeliverable),
        safe_queue(hall.receiving_queue, given_up),
        safe_queue(hall.distributing_queue, given_up),
        waiting_queue(hall.meditating, hall.round, hall.check_in),
    ]
    bindings = [
        Binding(hall.undeliverable, hall.undeliverable),
        Binding(hall.check_in, hall.receiving_queue),
        Binding(hall.meditating, hall.meditating),
        Binding(hall.released_exchange, hall.distributing_queue),
    ]
    below = hall.released_exchange
    for level in range(hall.levels):
        name = hall.level_name(level)
        exchanges.append(Exchange(name, "topic", arguments=alternate))
        queues.append(waiting_queue(name, hall.resolution * (1 << level), below))
        # Counted from the end of the key, so that a level means the same whatever the number of levels.
        lower = ".*" * level
        bindings.append(Binding(name, name, f"#.1{lower}"))
        bindings.append(Binding(name, below, f"#.0{lower}", "exchange"))
        below = name
    return Topology(exchanges, queues, bindings)
