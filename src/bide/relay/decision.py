"""The relay's decision for each message of a waiting hall, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final, Literal, Self

from bide.delay.allowed_targets import ANY_TARGET, AllowedTargets
from bide.delay.forwarding import LONGEST_PAUSE, carry_user_id, parse_target, set_aside_values
from bide.delay.protocol import (
    HEADER_DUE,
    HEADER_EXPIRATION,
    HEADER_PICK_UP_KEY,
    HEADER_PRIORITY,
    HEADER_SET_ASIDE,
    HEADER_TO,
    ExchangeTarget,
    QueueTarget,
    Target,
)
from bide.delay.received import DEATH_HEADERS
from bide.delay.waiting_hall import HEADER_REST, MAX_DELAY, WaitingHall, delivery_exchange_of
from bide.durations import MILLISECOND, format_delay
from bide.errors import InvalidDelayError, InvalidInputError, UnsupportedTargetError

RelayStep = Literal["round", "levels", "target", "aside"]
"""Where the relay sends a message: to the meditating queue for a round, through the levels, to its target, or to the
undeliverable queue."""

HEADER_DELAY: Final = "x-delay"
"""Header with the delay of a message, set by a client without bide: milliseconds, as a number or text."""

HEADER_REFUSALS: Final = "bide-refusals"
"""Header with the number of times that the target has refused a message."""

HEADER_CC: Final = "bide-cc"
"""Header that holds a message's CC header while it waits in the hall, where the broker would route by the CC header."""

_CARRIED_PROPERTIES: Final = (("expiration", HEADER_EXPIRATION), ("priority", HEADER_PRIORITY))
"""Properties that would act on the hall's own queues, and the headers that hold them while a message waits."""

_COUNT_HEADERS: Final = frozenset({"x-delivery-count", "x-acquired-count"})
_REMOVED_HEADERS: Final = DEATH_HEADERS | {
    "BCC",
    "x-delivery-count",
    "x-acquired-count",
    HEADER_PICK_UP_KEY,
    HEADER_SET_ASIDE,
}
"""Headers that the relay removes.

RabbitMQ before 4.0.1 mistakes a message with its old ``x-death`` for a cycle. RabbitMQ removes a BCC header when it
routes by it, but only the first of several (``strip_header`` in 3.10 to 4.3), and the next one would name queues that
the relay's allow-list was not checked for.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayDecision:
    """How the relay sends a message on.

    Attributes:
        rest: the remaining wait after this step, in milliseconds; 0 for the target.
        values: the properties by their AMQP names.
    """

    step: RelayStep
    exchange: str
    routing_key: str
    rest: int
    values: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedMessage:
    """A message that the relay has received.

    Attributes:
        target: its final target.
        routing_key: its original routing key.
        due: its due time, in milliseconds since the Unix epoch.
        headers: its headers while it waits in the hall.
        properties: its other properties while it waits in the hall.
    """

    hall: WaitingHall
    target: Target
    routing_key: str
    due: int
    headers: Mapping[str, Any] = field(repr=False)
    properties: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read(
        cls,
        hall: WaitingHall,
        routing_key: str,
        values: Mapping[str, Any],
        *,
        now: int,
        user: str | None = None,
        allowed: AllowedTargets = ANY_TARGET,
        exchange: str = "",
    ) -> Self:
        """Read a message from one of the relay's queues.

        The due time is ``x-delay`` counted from now, or else ``bide-due``; without either header, the message is due at
        once. ``x-delay`` has no effect on a message that bide has delayed.

        The target is the one in ``bide-to``. Without this header it is the pick-up exchange, with one exception: a
        message with ``x-delay`` that reached the hall from another exchange, through a binding, goes to the delivery
        exchange of that exchange.

        Args:
            values: the properties by their AMQP names.
            now: milliseconds since the Unix epoch, rounded down.
            user: the user of the relay's connection.
            allowed: the targets that the relay may deliver to, besides the pick-up exchange.
            exchange: the exchange that the message was published to.

        Raises:
            TargetNotAllowedError: the message names a target that is not allowed.
            InvalidInputError: a header is invalid, or names a part of the hall or another delay queue as the target.
        """
        given: Mapping[str, Any] = values.get("headers") or {}
        headers = {name: value for name, value in given.items() if name not in _REMOVED_HEADERS}
        if HEADER_REST not in given and HEADER_DELAY in given:
            headers[HEADER_DUE] = now + _milliseconds(headers.pop(HEADER_DELAY))
            if exchange and not hall.owns(exchange):
                headers.setdefault(HEADER_TO, f"x:{delivery_exchange_of(exchange)}")
        key = given.get(HEADER_PICK_UP_KEY, routing_key)
        if not isinstance(key, str):
            raise InvalidInputError(f"the header {HEADER_PICK_UP_KEY} is {key!r}: it must be a routing key")
        target = _target(headers.get(HEADER_TO), key, hall)
        due = headers.setdefault(HEADER_DUE, now)
        if isinstance(due, bool) or not isinstance(due, int):
            raise InvalidInputError(f"the header {HEADER_DUE} is {due!r}: it must be milliseconds since 1970")
        headers[HEADER_TO] = str(target)
        properties = {name: value for name, value in values.items() if name != "headers"}
        for name, header in _CARRIED_PROPERTIES:
            if (value := properties.pop(name, None)) is not None:
                headers[header] = value
        if "CC" in headers:
            headers[HEADER_CC] = headers.pop("CC")
        _check_allowed(target, headers.get(HEADER_CC), hall, allowed)
        carry_user_id(properties, headers, user)
        return cls(hall=hall, target=target, routing_key=key, due=due, headers=headers, properties=properties)

    def forward(self, now: int) -> RelayDecision:
        """Send the message to the meditating queue, through the levels, or to its target if it is due.

        Args:
            now: milliseconds since the Unix epoch, rounded down.

        Raises:
            InvalidDelayError: the message is due in more than a hundred years.
        """
        hall = self.hall
        unit = hall.resolution // MILLISECOND
        units = -(-(self.due - now) // unit)
        if units <= 0:
            return self.deliver()
        if units * unit > MAX_DELAY // MILLISECOND:
            raise InvalidDelayError(
                f"it is due in {units * unit} ms, but a waiting hall holds messages for at most "
                f"{format_delay(MAX_DELAY)}"
            )
        if units < 1 << hall.levels:
            return self._through_levels(units)
        rest = (units - (1 << hall.levels - 1)) * unit
        return RelayDecision(
            step="round",
            exchange=hall.meditating,
            routing_key=self.routing_key,
            rest=rest,
            values={**self.properties, "headers": {**self.headers, HEADER_REST: rest}},
        )

    def deliver(self) -> RelayDecision:
        """Send the message to its target as it was sent to the hall, with the headers ``bide-to`` and ``bide-due``."""
        headers, properties = dict(self.headers), dict(self.properties)
        for name, header in _CARRIED_PROPERTIES:
            if (value := headers.pop(header, None)) is not None:
                properties[name] = value
        for name in (HEADER_REST, HEADER_REFUSALS):
            headers.pop(name, None)
        if HEADER_CC in headers:
            headers["CC"] = headers.pop(HEADER_CC)
        exchange, key = (
            ("", self.target.queue)
            if isinstance(self.target, QueueTarget)
            else (self.target.exchange, self.routing_key)
        )
        return RelayDecision(
            step="target", exchange=exchange, routing_key=key, rest=0, values={**properties, "headers": headers}
        )

    def again(self) -> RelayDecision:
        """Send a message that its target refused through the levels again, with a longer wait after each refusal."""
        refusals = self.headers.get(HEADER_REFUSALS, 0)
        if not isinstance(refusals, int) or not 0 <= refusals < 64:
            refusals = 63
        most = max(min((1 << self.hall.levels) - 1, LONGEST_PAUSE // self.hall.resolution), 1)
        return self._through_levels(min(1 << refusals, most), {HEADER_REFUSALS: min(refusals + 1, 63)})

    def _through_levels(self, units: int, more: Mapping[str, Any] | None = None) -> RelayDecision:
        rest = units * (self.hall.resolution // MILLISECOND)
        headers = {**self.headers, HEADER_REST: rest, HEADER_PICK_UP_KEY: self.routing_key, **(more or {})}
        return RelayDecision(
            step="levels",
            exchange=self.hall.entry_exchange(units),
            routing_key=self.hall.key(units),
            rest=rest,
            values={**self.properties, "headers": headers},
        )


def set_aside(
    hall: WaitingHall, routing_key: str, values: Mapping[str, Any], *, reason: str, user: str | None = None
) -> RelayDecision:
    """Send a message to the undeliverable queue as it was received, with the reason in a header.

    Args:
        user: the user of the relay's connection.
    """
    properties = set_aside_values(values, reason, user=user)
    headers = {name: value for name, value in properties["headers"].items() if name not in _COUNT_HEADERS}
    if (priority := properties.pop("priority", None)) is not None:
        headers[HEADER_PRIORITY] = priority
    return RelayDecision(
        step="aside",
        exchange=hall.undeliverable,
        routing_key=routing_key,
        rest=0,
        values={**properties, "headers": headers},
    )


def _check_allowed(target: Target, cc: Any, hall: WaitingHall, allowed: AllowedTargets) -> None:
    targets = [target]
    if isinstance(target, QueueTarget) and isinstance(cc, list):
        # On the default exchange each key of a CC list is the name of one more queue.
        targets += [_target(f"q:{key}", "", hall) for key in cc]
    for one in targets:
        if one != ExchangeTarget(hall.delivery_exchange, getattr(one, "routing_key", "")):
            allowed.check_delivery(one)


def _target(text: Any, routing_key: str, hall: WaitingHall) -> Target:
    if text is None:
        return ExchangeTarget(hall.delivery_exchange, routing_key)
    target = parse_target(text, routing_key)
    if hall.owns(text[2:]) and text != f"x:{hall.delivery_exchange}":
        raise UnsupportedTargetError(f"the header {HEADER_TO} is {text!r}, a part of the waiting hall itself")
    return target


def _milliseconds(delay: Any) -> int:
    """The value of ``x-delay``, rounded up; a negative value is zero."""
    try:
        number = float("nan" if isinstance(delay, bool) else delay)
    except (TypeError, ValueError):
        number = float("nan")
    if not isfinite(number):
        raise InvalidDelayError(f"the header {HEADER_DELAY} is {delay!r}: it must be milliseconds")
    if number > MAX_DELAY // MILLISECOND:
        raise InvalidDelayError(
            f"the header {HEADER_DELAY} is {delay!r}, but a waiting hall holds messages for at most "
            f"{format_delay(MAX_DELAY)}"
        )
    return max(-int(-number // 1), 0)
