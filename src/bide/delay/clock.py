"""``Clock``: bide's own delay infrastructure, one level per unit of time.

There is one level per unit of time and one queue per digit value, so a delay takes as many hops as it has non-zero
digits: five minutes are one hop, ninety seconds are two, and any delay is at most six.

The digits are keys in the CC header (or BCC, if the broker keeps BCC keys through dead-lettering; see
:func:`carrier_for`). The broker routes by these keys as by the routing key: the message keeps its own routing key, and
each hop is one exact match in a direct exchange.

Exchanges, from the publisher to the target (``P`` is the prefix and the layout version, ``bide.v1``)::

    P.in.h (fanout) -> P.h (direct) -> queue P.h5 -> P.m -> ... -> P.released (fanout) -> P.delivery (direct) -> target

A message that is unroutable on this route goes to the queue ``P.undeliverable``.

The infrastructure grows with use: :meth:`Clock.core_topology` is declared first, and the queues of a digit when a
message first needs them (:meth:`Clock.digit_topology`). ``bide delay apply`` declares all of them in advance, and then
the exchange ``P.complete``: clients without the permission to declare check for that exchange.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Self

from bide.delay.clock_digits import LEVELS, MAX_DELAY, RESOLUTION, Digit, Level, digits_of, longest_delay
from bide.delay.clock_keys import Carrier, carrier_for, digit_key, hashed, is_transport_key, padding_of, target_key
from bide.delay.clock_names import ClockNames
from bide.delay.clock_route import ClockRoute, all_keys
from bide.delay.clock_topology import PADDINGS_AT_APPLY, WORDS_AT_APPLY, core_topology, digit_topology
from bide.delay.protocol import (
    HEADER_TO,
    MAX_NAME_BYTES,
    DelayInfrastructure,
    ExchangeTarget,
    QueueTarget,
    Target,
    Wait,
    address_of,
    check_prefix,
    check_topic_key,
    existing,
    round_up,
    target_name,
)
from bide.delay.queues import waiting_queue
from bide.delay.release import release_key, release_queue
from bide.delay.routes import DelayRoute, Step
from bide.delay.waits import clock_wait
from bide.durations import MILLISECOND, DelayLike, parse_delay
from bide.errors import InvalidNameError, InvalidTopologyError
from bide.topology import Binding, Exchange, Topology

if TYPE_CHECKING:
    from bide.delay.compiled import WireFormat
    from bide.delay.growing import ReadyDigits
    from bide.delay.levels import DelayLevels
    from bide.delay.taps import Taps

MAX_LANES: Final = 64


@dataclass(frozen=True, slots=True, init=False)
class Clock(ClockNames, DelayInfrastructure):
    """Delays by units of time, from 10 ms to 3199 days, with one hop per non-zero digit.

    Clients with different settings can share a prefix: levels, keys and queue names are the same for all of them. A
    message that needs a queue which no client has declared goes to the undeliverable queue; it does not arrive early.

    Args:
        prefix: starts every name, so that several applications can share a virtual host.
        max_delay: the longest delay that gets queues. The default is the longest possible delay, rounded down to a
            multiple of the resolution.
        resolution: delays are rounded up to a multiple of it, and finer queues are not created: 10 ms, or a multiple
            of a unit that divides the next unit (50 ms, 1 s, 15 s, 1 min...).
        lanes: parallel queues per digit, so that many messages due at the same time leave faster. The message id
            selects the lane, and order is kept within a lane.
        carrier: the header for the digits; None lets the client choose by the broker's release.
        hides_keys: deliver without the CC header, for receivers that cannot copy it (.NET, before RabbitMQ 4.0). Each
            queue, and each pair of exchange and routing key, then has a release queue, which costs one hop. The client
            turns this on if the broker is older than 4.0 and NServiceBus uses the virtual host. On newer brokers the
            client uses BCC instead.

    Raises:
        InvalidDelayError: ``max_delay`` or ``resolution`` is out of range or not a valid multiple.
        InvalidNameError: the prefix is empty, too long, or starts with ``amq.``.
        InvalidTopologyError: ``lanes`` is out of range.
    """

    # The digests of Spark's jobs leave out settings with these defaults.
    prefix: str = "bide"
    max_delay: timedelta = MAX_DELAY
    resolution: timedelta = RESOLUTION
    lanes: int = 1
    carrier: Carrier | None = None
    hides_keys: bool = False

    def __init__(
        self,
        *,
        prefix: str = "bide",
        max_delay: DelayLike = MAX_DELAY,
        resolution: DelayLike = RESOLUTION,
        lanes: int = 1,
        carrier: Carrier | None = None,
        hides_keys: bool = False,
    ) -> None:
        check_prefix(prefix)
        step = parse_delay(resolution)
        longest = longest_delay(parse_delay(max_delay), step)
        if lanes.__class__ is not int or not 1 <= lanes <= MAX_LANES:
            raise InvalidTopologyError([f"{lanes} lanes: give 1 to {MAX_LANES}"])
        checked = {"prefix": prefix, "max_delay": longest, "resolution": step, "lanes": lanes}
        for name, value in (checked | {"carrier": carrier, "hides_keys": hides_keys}).items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """The layout's name on the command line."""
        return "clock"

    def used_digits(self, level: Level) -> tuple[int, ...]:
        """The non-zero digits of a level that have queues with these settings."""
        return tuple(
            digit
            for digit in range(1, level.highest + 1)
            if level.unit * digit <= self.max_delay and not level.unit * digit % self.resolution
        )

    @property
    def digit_levels(self) -> tuple[Level, ...]:
        """The levels, highest first."""
        return LEVELS

    def digit_key(self, digit: Digit) -> str:
        """The key that leads to the queue of a digit, padding included."""
        return digit.padding + digit_key(digit.level, digit.value, digit.lane if digit.value else 0)

    def topology(self) -> Topology:
        """All exchanges, queues and bindings of the infrastructure, without targets."""
        return _topology(self)

    def core_topology(self) -> Topology:
        """The part that is declared first: all exchanges, and the bindings between them."""
        return core_topology(self)

    def digit_topology(self, digits: Iterable[Digit]) -> Topology:
        """The queues of these digits, and their bindings."""
        return digit_topology(self, digits)

    def probes(self) -> Topology:
        """The mark of ``bide delay apply``, and the exchange that targets are bound to."""
        return Topology([Exchange(self.delivery_exchange), self.complete_mark])

    def lane_of(self, message_id: str) -> int:
        """The lane of a message."""
        return zlib.crc32(message_id.encode()) % self.lanes if self.lanes > 1 else 0

    def route(self, delay: timedelta, target: Target, *, message_id: str = "") -> DelayRoute:
        """The route by which a message reaches ``target`` after ``delay``.

        A message with a delay of zero goes straight to the target.

        Raises:
            InvalidDelayError: the delay is negative, or longer than ``max_delay``.
            InvalidNameError: the target's name or the routing key is too long, or has the form of a transport key.
            UnsupportedTargetError: the target is the default exchange (name the queue instead), or a topic exchange
                with an empty routing key.
        """
        wait = round_up(delay, self.resolution, maximum=self.max_delay) * self.resolution
        exchange, routing_key = _address(target)
        if not wait:
            return DelayRoute(
                exchange=exchange,
                routing_key=routing_key,
                delay=wait,
                hops=0,
                requires=Topology(),
                expects=existing(target),
            )
        digits = digits_of(wait)
        padding = self.padding(target)
        lane = self.lane_of(message_id)
        headers: dict[str, Any] = {
            self.carrier or "CC": [
                *(padding + digit_key(level, digit, lane if digit else 0) for level, digit in digits),
                self.target_key(target),
            ],
            HEADER_TO: str(target),
        }
        return DelayRoute(
            exchange=self.entry_exchange(digits[0][0]),
            routing_key=routing_key,
            headers=headers,
            delay=wait,
            hops=sum(1 for _, digit in digits if digit) + self._is_isolated(target),
            requires=_target_requirements(self, target if self.hides_keys else _binding_target(target)),
            expects=existing(target),
            digits=tuple(
                Digit(level, digit, lane if digit else 0, padding)
                for level, digit in digits
                if digit or not self.has_core_bindings(padding)
            ),
        )

    def has_core_bindings(self, padding: str) -> bool:
        """Whether the core topology binds the digit 0 of every level with this padding."""
        return len(padding) // 2 < WORDS_AT_APPLY

    def compile(self, target: Target, wire: WireFormat, ready: ReadyDigits | None = None) -> ClockRoute:
        """See :meth:`DelayInfrastructure.compile`."""
        # This checks the target. A delay of one resolution step has one digit.
        shortest = self.route(self.resolution, target)
        padding = self.padding(target)
        return ClockRoute(
            wire,
            routing_key=shortest.routing_key,
            entries=[self.entry_exchange(level) for level in LEVELS],
            tables=[
                all_keys(padding, lane, wire.field_value) if ready is None else ready.keys(padding, lane)
                for lane in range(self.lanes)
            ],
            resolution=self.resolution,
            max_delay=self.max_delay,
            carrier=self.carrier or "CC",
            target_key=self.target_key(target),
            to=(HEADER_TO, str(target)),
            target_hops=shortest.hops - 1,
        )

    def compile_headers(self, values: Mapping[str, Any], wire: WireFormat) -> None:
        """None: receivers need no headers of bide."""

    def delay_levels(self) -> DelayLevels:
        """The units of time, each with a queue for every digit."""
        from bide.delay.levels import DelayLevel, DelayLevels

        levels = (
            DelayLevel(
                name=level.letter,
                unit=level.unit // MILLISECOND,
                highest=level.highest,
                queue=self.digit_queue(level, 1).removesuffix("1"),
                has_queue_per_digit=True,
            )
            for level in LEVELS
        )
        return DelayLevels(levels=tuple(levels), lanes=self.lanes)

    def taps(self) -> Taps:
        """Taps at the exchanges that publishers use, and at the exchange that messages pass when due."""
        from bide.delay.taps import DELIVERED, SCHEDULED, Taps

        scheduled, delivered = (f"{self.base}.tap.{which}" for which in (SCHEDULED, DELIVERED))
        return Taps(
            scheduled=scheduled,
            delivered=delivered,
            to_scheduled=tuple(Binding(self.entry_exchange(level), scheduled) for level in LEVELS),
            to_delivered=(Binding(self.released_exchange, delivered),),
        )

    def wait_in(self, queue: str, routing_key: str, headers: Mapping[str, Any]) -> Wait | None:
        """See :meth:`DelayInfrastructure.wait_in`."""
        return clock_wait(self.base, queue, routing_key, headers)

    def growing(self) -> Self:
        """This infrastructure: clients declare the queues of a digit when they first use it."""
        return self

    def for_release(self, release: tuple[int, ...]) -> Self:
        """The same infrastructure with the carrier for this release; see :func:`carrier_for`."""
        return replace(self, carrier=carrier_for(release)) if self.carrier is None else self

    def beside_nservicebus(self, release: tuple[int, ...]) -> Self:
        """The same infrastructure without a CC header at receivers, because .NET cannot copy it."""
        if self.carrier != "CC" or self.hides_keys:
            return self
        return replace(self, hides_keys=True) if carrier_for(release) == "CC" else replace(self, carrier="BCC")

    def steps(self, delay: timedelta, target: Target) -> tuple[Step, ...]:
        """Every exchange on the route of a message, in order."""
        return tuple(self._steps(delay, target))

    def _steps(self, delay: timedelta, target: Target) -> Iterator[Step]:
        route = self.route(delay, target)
        if not route.hops:
            yield Step(
                exchange=route.exchange or "(default)",
                segment=route.routing_key,
                value="-",
                routed_to=target_name(target),
            )
            return
        digits = digits_of(route.delay)
        keys = route.headers[self.carrier or "CC"]
        yield Step(exchange=route.exchange, segment="(any)", value="-", routed_to=self.level_exchange(digits[0][0]))
        below = [*(self.level_exchange(level) for level, _ in digits[1:]), self.released_exchange]
        for (level, digit), key, following in zip(digits, keys, below, strict=False):
            yield Step(
                exchange=self.level_exchange(level),
                segment=key,
                value=str(digit),
                routed_to=self.digit_queue(level, digit) if digit else following,
                delay=level.unit * digit,
                dead_letter_to=following if digit else None,
            )
        yield Step(exchange=self.released_exchange, segment="(any)", value="-", routed_to=self.delivery_exchange)
        isolated = self._is_isolated(target)
        exchange, _ = _address(target)
        yield Step(
            exchange=self.delivery_exchange,
            segment=keys[-1],
            value=target_name(target),
            routed_to=self.release_queue(target) if isolated else target_name(target),
            dead_letter_to=(exchange or "(default)") if isolated else None,
        )
        if isolated:
            yield Step(
                exchange=exchange or "(default)",
                segment=route.routing_key,
                value=route.routing_key,
                routed_to=target_name(target) if isinstance(target, QueueTarget) else "its bindings",
            )

    def padding(self, target: Target) -> str:
        """See :func:`padding_of`; empty if the keys do not reach the target."""
        return "" if self.hides_keys else padding_of(target)

    def target_key(self, target: Target) -> str:
        """The key that the delivery exchange routes to a target, padding included.

        Raises:
            InvalidNameError: the routing key has too many words: the padded key would be too long.
        """
        if not self.hides_keys:
            return target_key(target)
        if isinstance(target, ExchangeTarget):
            return release_key(target)
        return target_key(QueueTarget(target.queue, isolated=True))

    def release_queue(self, target: Target) -> str:
        """The name of the release queue between the delivery exchange and a target that may refuse messages."""
        if self.hides_keys and isinstance(target, ExchangeTarget):
            return release_queue(f"{self.base}.release.k:", *_address(target)).name
        name = f"{self.base}.release.{target}"
        return name if len(name.encode()) <= MAX_NAME_BYTES else f"{self.base}.release.{str(target)[0]}#{hashed(name)}"

    def _is_isolated(self, target: Target) -> bool:
        return isinstance(target, ExchangeTarget) or target.isolated or self.hides_keys

    def target_topology(self, target: Target) -> Topology:
        """The binding of a target, and its release queue if it has one."""
        key = self.target_key(target)
        if not self._is_isolated(target):
            return Topology(bindings=[Binding(self.delivery_exchange, str(target)[2:], key)])
        exchange, routing_key = _address(target)
        fixed = routing_key if self.hides_keys or isinstance(target, QueueTarget) else None
        queue = waiting_queue(self.release_queue(target), timedelta(0), exchange, dead_letter_key=fixed)
        return Topology(queues=[queue], bindings=[Binding(self.delivery_exchange, queue.name, key)])


def _address(target: Target) -> tuple[str, str]:
    """The exchange and routing key of an undelayed publish to this target, checked."""
    exchange, routing_key = address_of(target)
    check_topic_key(target)
    if is_transport_key(routing_key):
        raise InvalidNameError(
            f"{routing_key!r} has the form of a key that bide uses between its exchanges: choose another name or "
            "routing key"
        )
    return exchange, routing_key


def _binding_target(target: Target) -> Target:
    """The part of a target that its bindings depend on. Equal bindings are then created once."""
    if isinstance(target, QueueTarget):
        return target
    return ExchangeTarget(target.exchange, "." * target.routing_key.count("."))


@lru_cache(maxsize=4096)
def _target_requirements(clock: Clock, target: Target) -> Topology:
    return clock.target_topology(target)


@lru_cache(maxsize=16)
def _topology(clock: Clock) -> Topology:
    return clock.core_topology() | clock.digit_topology(
        Digit(level, value, lane, padding)
        for padding in PADDINGS_AT_APPLY
        for level in LEVELS
        for value in clock.used_digits(level)
        for lane in range(clock.lanes)
    )
