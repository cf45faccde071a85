"""``WaitingHall``: a few binary levels, and a queue in which longer delays wait in rounds.

Every message is published to the check-in exchange with its due time. A relay (``bide relay``) consumes each message
and sends it on. A message whose remaining wait exceeds all levels together goes to the meditating queue, waits there as
long as at the highest level, and checks in again. Any other message goes through the levels of its binary digits, and
then to its target with its original routing key. With levels of 1, 2, 4 and 8 seconds, 27 seconds are two rounds of 8,
then ``1.0.1.1``: 8 + 2 + 1.

Exchanges (in brackets) and queues, from the publisher to the target (``P`` is the prefix and the layout's version,
``bide.hall.v1``)::

    [P.check-in] -> P.receiving -> relay -> [P.meditating] -> P.meditating -> [P.check-in] ...
                                   relay -> [P.level-03] -> P.level-03 -> [P.level-02] -> ... -> [P.released]
    [P.released] -> P.distributing -> relay -> the target: a queue, any exchange, or [P.pick-up]

The idea is from the project delayed-messaging-with-rabbitmq. For the relay's decisions see :mod:`bide.relay.decision`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

from bide.delay.hall_names import UNIT, HallNames
from bide.delay.protocol import (
    HEADER_TO,
    DelayInfrastructure,
    QueueTarget,
    Target,
    Wait,
    address_of,
    check_prefix,
    existing,
    round_up,
    target_name,
)
from bide.delay.queues import final_queue, safe_queue, waiting_queue
from bide.delay.routes import DelayRoute, Step
from bide.delay.waits import hall_wait
from bide.durations import MILLISECOND, DelayLike, format_delay, parse_delay
from bide.errors import InvalidDelayError, InvalidInputError, UnsupportedTargetError
from bide.topology import Argument, Binding, Exchange, Queue, Topology

DEFAULT_LEVELS: Final = 20
MAX_LEVELS: Final = 28

HEADER_REST: Final = "bide-rest"
"""Header of a message in the hall: its remaining wait when it was last sent on, in milliseconds."""

MAX_DELAY: Final = timedelta(days=36525)
"""A hundred years. Rounds have no limit of their own, but a longer delay is most likely a wrong unit."""

MAX_TTL: Final = timedelta(days=3650)
"""RabbitMQ's limit for the TTL of a queue."""

RELAY: Final = "(relay)"
"""The relay in explained routes. No exchange of the hall can have this name."""

DELIVERY_SUFFIX: Final = ".delivery"
"""End of the name of the exchange that gets the messages of an entry exchange; see :func:`delivery_exchange_of`."""

_DELIVERY_LIMIT: Final = 1000
"""The delivery limit of the relay's queues, after which they dead-letter a message as undeliverable. It is explicit,
because the default of RabbitMQ 4 is 20, and a lost connection of a relay counts for all its unacknowledged messages."""

_SHOWN_ROUNDS: Final = 4
"""The number of rounds that an explained route shows. Further rounds in the middle are shown as one."""


@dataclass(frozen=True, slots=True, init=False)
class WaitingHall(HallNames, DelayInfrastructure):
    """Delays of up to a hundred years on few queues, with a relay that routes the messages.

    Without a relay, messages wait but are not lost. Run ``bide relay --allow ...`` with the same settings, one process
    or several. Due times are compared with the relay's clock, so keep the clocks of relays and publishers in sync.

    Halls with different settings do not interfere: a resolution other than one second is part of the names, and a level
    is the same in a hall with more levels.

    Args:
        prefix: starts every name, so that several applications can share a virtual host.
        levels: the number of levels, 1 to 28; each holds messages twice as long as the one below it.
        resolution: the wait of the lowest level, in whole milliseconds; delays are rounded up to a multiple of it.

    Raises:
        InvalidInputError: ``levels`` is out of range.
        InvalidDelayError: the resolution is not in whole milliseconds, less than 10 ms, or so long that the wait of the
            highest level would exceed RabbitMQ's TTL limit.
        InvalidNameError: the prefix is empty, too long, or starts with ``amq.``.
    """

    # The digests of Spark's jobs leave out settings with these defaults.
    prefix: str = "bide"
    levels: int = DEFAULT_LEVELS
    resolution: timedelta = UNIT

    def __init__(self, *, prefix: str = "bide", levels: int = DEFAULT_LEVELS, resolution: DelayLike = UNIT) -> None:
        check_prefix(prefix)
        if not 1 <= levels <= MAX_LEVELS:
            raise InvalidInputError(f"{levels} levels: give 1 to {MAX_LEVELS}")
        step = parse_delay(resolution)
        if step < timedelta(milliseconds=10) or step % MILLISECOND:
            raise InvalidDelayError(
                f"the resolution {format_delay(step)} must be a whole number of milliseconds, at least 10: "
                "1s or 250ms for example"
            )
        if step > MAX_TTL // (1 << levels - 1):
            raise InvalidDelayError(
                f"the highest of {levels} levels of {format_delay(step)} would hold messages longer "
                f"than RabbitMQ's limit of {format_delay(MAX_TTL)}: give fewer levels; longer delays wait in rounds"
            )
        for name, value in {"prefix": prefix, "levels": levels, "resolution": step}.items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """The layout's name on the command line."""
        return "waiting-hall"

    @property
    def max_delay(self) -> timedelta:
        """A hundred years, with any number of levels."""
        return MAX_DELAY

    @property
    def span(self) -> timedelta:
        """The wait of all levels together. Longer delays wait in rounds."""
        return self.resolution * ((1 << self.levels) - 1)

    @property
    def round(self) -> timedelta:
        """The wait of one round: that of the highest level."""
        return self.resolution * (1 << self.levels - 1)

    def topology(self) -> Topology:
        """All exchanges, queues and bindings of the infrastructure."""
        return _topology(self)

    def probes(self) -> Topology:
        """The pick-up exchange, the queue of the highest level, and the meditating queue for this number of levels."""
        wanted = {self.level_name(self.levels - 1), self.meditating}
        return Topology(
            [Exchange(self.delivery_exchange, "topic")], [one for one in self.topology().queues if one.name in wanted]
        )

    def waiting_queues(self) -> tuple[Queue, ...]:
        """The queue that messages enter first, those in which they wait, and the one that they leave last."""
        receiving, distributing = (self.topology().queue(name) for name in self.relay_queues)
        assert receiving is not None
        assert distributing is not None
        return (receiving, *DelayInfrastructure.waiting_queues(self), distributing)

    def wait_in(self, queue: str, routing_key: str, headers: Mapping[str, Any]) -> Wait | None:
        """See :meth:`DelayInfrastructure.wait_in`."""
        return hall_wait(
            [self.level_name(level) for level in range(self.levels)],
            queue,
            routing_key,
            headers,
            unit=self.resolution,
            meditating=self.meditating,
            relay_queues=self.relay_queues,
            pick_up=self.delivery_exchange,
            rest_header=HEADER_REST,
        )

    def key(self, units: int) -> str:
        """The routing key in the levels: the binary digits of the wait, from the first ``1``."""
        return ".".join(f"{units:b}")

    def entry_exchange(self, units: int) -> str:
        """The first exchange of a wait of this many units (at least one) in the levels."""
        return self.level_name(units.bit_length() - 1)

    def rounds(self, units: int) -> int:
        """The number of rounds that a wait of this many units needs before the levels can hold the rest."""
        beyond = units - ((1 << self.levels) - 1)
        return max(-(-beyond // (1 << self.levels - 1)), 0)

    def route(self, delay: timedelta, target: Target, *, message_id: str = "") -> DelayRoute:
        """The route by which a message reaches ``target`` after ``delay``.

        A message with a delay of zero goes straight to the target. A target needs no binding: the relay publishes to
        it.

        Args:
            delay: zero or more.
            target: a queue or an exchange of any type. ``isolated`` makes no difference: a message that its target
                refuses waits one more round and blocks no others.
            message_id: not used, because there is one queue per level.

        Raises:
            InvalidDelayError: the delay is negative, or longer than a hundred years.
            InvalidNameError: the target's name or the routing key is too long.
            UnsupportedTargetError: the target is the default exchange (name the queue instead), or part of the hall
                other than its pick-up exchange.
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
            headers={HEADER_TO: str(target), HEADER_REST: wait // MILLISECOND},
            delay=wait,
            hops=2 * rounds + 1 + rest.bit_count() + 1,
            requires=Topology(),
            expects=expects,
        )

    def _address(self, target: Target) -> tuple[str, str]:
        """Check a target, and return the exchange and the routing key of an undelayed publish to it."""
        address = address_of(target)
        kind, name = ("queue", target.queue) if isinstance(target, QueueTarget) else ("exchange", target.exchange)
        if self.owns(name) and (kind, name) != ("exchange", self.delivery_exchange):
            raise UnsupportedTargetError(
                f"the {kind} {name!r} is part of the waiting hall: name a queue or exchange of your own, or the "
                f"pick-up exchange {self.delivery_exchange!r}"
            )
        return address

    def steps(self, delay: timedelta, target: Target) -> tuple[Step, ...]:
        """Every exchange on the route of a message, and the relay in between, in order.

        If there are many rounds, those in the middle are one step.
        """
        return tuple(self._steps(delay, target))

    def _steps(self, delay: timedelta, target: Target) -> Iterator[Step]:
        route = self.route(delay, target)
        exchange, key = self._address(target)
        to = target_name(target)
        if not route.hops:
            yield Step(exchange=exchange or "(default)", segment=key, value="-", routed_to=to)
            return
        units = route.delay // self.resolution
        rounds = self.rounds(units)
        for first, count in _round_groups(rounds):
            left = route.delay - (first - 1) * self.round
            yield self._check_in_step(key, left)
            yield Step(
                exchange=RELAY,
                segment=_seconds_text(left),
                value=f"> {_seconds_text(self.span)}: round {first}"
                + (f" to {first + count - 1}" if count > 1 else ""),
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
        yield self._check_in_step(key, units * self.resolution)
        yield Step(
            exchange=RELAY,
            segment=_seconds_text(units * self.resolution),
            value=digits,
            routed_to=self.entry_exchange(units),
        )
        for level in range(units.bit_length() - 1, -1, -1):
            below = self._exchange_below(level)
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

    def _check_in_step(self, key: str, left: timedelta) -> Step:
        return Step(exchange=self.check_in, segment=key, value=_seconds_text(left), routed_to=self.receiving_queue)

    def _exchange_below(self, level: int) -> str:
        return self.level_name(level - 1) if level else self.released_exchange


def delivery_exchange_of(entry: str) -> str:
    """The target of a message with ``x-delay`` that was published to ``entry``, an exchange bound to check-in."""
    return entry + DELIVERY_SUFFIX


def _round_groups(rounds: int) -> Iterator[tuple[int, int]]:
    """The rounds to show, in groups: the number of the first round of a group, and the size of the group."""
    if rounds <= _SHOWN_ROUNDS:
        yield from ((number, 1) for number in range(1, rounds + 1))
        return
    yield 1, 1
    yield 2, rounds - 2
    yield rounds, 1


def _seconds_text(wait: timedelta) -> str:
    return f"{wait.total_seconds():.15g} s"


@lru_cache(maxsize=16)
def _topology(hall: WaitingHall) -> Topology:
    alternate = {"alternate-exchange": hall.undeliverable}
    exchanges = [
        Exchange(hall.undeliverable, "fanout"),
        # No alternate exchange: an unroutable message is returned to the relay, which puts it in the undeliverable
        # queue with everything needed to send it again.
        Exchange(hall.delivery_exchange, "topic"),
        Exchange(hall.released_exchange, "fanout"),
        Exchange(hall.check_in, "fanout"),
        Exchange(hall.meditating, "fanout"),
    ]
    # A message that the relay rejects, or that makes relays crash repeatedly, goes to the undeliverable queue.
    given_up: dict[str, Argument] = {
        "x-dead-letter-exchange": hall.undeliverable,
        "x-delivery-limit": _DELIVERY_LIMIT,
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
        # Counted from the end of the key, so that a level is the same for any number of levels.
        lower = ".*" * level
        bindings.append(Binding(name, name, f"#.1{lower}"))
        bindings.append(Binding(name, below, f"#.0{lower}", "exchange"))
        below = name
    return Topology(exchanges, queues, bindings)
