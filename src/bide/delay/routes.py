"""The route of a delayed message: how to publish it, and the exchanges that it passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from bide.delay.clock_digits import Digit
from bide.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayRoute:
    """How to publish one delayed message.

    Attributes:
        exchange: the exchange to publish to.
        routing_key: the routing key to publish with.
        headers: headers to add to the message's own.
        delay: the wait on this route: the requested delay, rounded up to the resolution.
        hops: the number of queues that the message passes before it reaches its target.
        requires: the topology to declare for this message besides the infrastructure's own: the target's binding. It
            depends on the target alone.
        expects: the target, if declaring ``requires`` succeeds without it, so that it has to be checked.
        digits: the digits whose queues this message needs, for an infrastructure that declares them at first use; see
            :meth:`bide.delay.growing.Growing.digit_topology`.
    """

    exchange: str
    routing_key: str
    headers: Mapping[str, Any] = field(default_factory=dict)
    delay: timedelta
    hops: int
    requires: Topology
    expects: Topology = field(default_factory=Topology)
    digits: tuple[Digit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One exchange on the route of a message, for :func:`bide.delay.explain.explain`.

    Attributes:
        exchange: the exchange.
        segment: the key, or part of the key, by which the exchange routes the message.
        value: the digit of this level.
        routed_to: the queue or exchange that the message goes to.
        delay: how long the message waits there; zero if it does not wait.
        dead_letter_to: the exchange after the wait, or None.
    """

    exchange: str
    segment: str
    value: str
    routed_to: str
    delay: timedelta = timedelta(0)
    dead_letter_to: str | None = None
