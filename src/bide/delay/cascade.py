"""The binary cascade that NServiceBus and Celery share.

A cascade encodes the delay in seconds as binary digits. Level ``n`` is a topic exchange and a queue of the same name
that holds messages for 2^n seconds. The routing key starts with one word per level, highest first: ``1`` waits at the
level, ``0`` skips it. The key ends with the address of the target. After level 0, the delivery exchange routes by the
address::

    1.0.1.0.orders    with four levels: 8 s + 2 s, then to the target bound for the address ``orders``

Both systems bind targets with ``#.<address>``, which also matches every longer address that ends with these words
(``#.orders`` also matches messages for ``billing.orders``). bide binds with one ``*`` per level instead, which matches
the target's messages and no others.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from bide.delay.cascade_keys import LEVELS, WILDCARDS
from bide.delay.cascade_route import CascadeRoute
from bide.delay.protocol import (
    MAX_NAME_BYTES,
    DelayInfrastructure,
    QueueTarget,
    Target,
    Wait,
    address_of,
    check_name,
    existing,
)
from bide.delay.release import release_queue, release_word
from bide.delay.routes import DelayRoute, Step
from bide.delay.waits import cascade_wait
from bide.errors import InvalidNameError
from bide.topology import Argument, Arguments, Binding, Exchange, Queue, Topology

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bide.delay.compiled import WireFormat
    from bide.delay.taps import Taps

RESOLUTION: Final = timedelta(seconds=1)

_STRATEGY: Final = "x-dead-letter-strategy"
_AT_LEAST_ONCE: Final = "at-least-once"


def check_address(kind: str, address: str, *, levels: int = LEVELS) -> None:
    """Check that an address can end a routing key, and the binding key with one ``*`` per level.

    Args:
        kind: what the address names, for the error: ``"queue"`` or ``"exchange"``.
        address: the address.
        levels: the number of digits before the address in the key.

    Raises:
        InvalidNameError: the address is empty, does not fit beside the digits, or has ``*`` or ``#`` as a word.
    """
    check_name(kind, address, limit=MAX_NAME_BYTES - 2 * levels)
    wild = sorted(WILDCARDS.intersection(address.split(".")))
    if wild:
        raise InvalidNameError(
            f"the {kind} {address!r} has {wild[0]!r} as a word: its binding for delayed messages would also match "
            "messages of other targets; rename it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A RabbitMQ policy, as in the management API.

    Attributes:
        pattern: a regular expression for the names of exchanges and queues.
        definition: for example ``{"alternate-exchange": "..."}``.
        apply_to: ``exchanges``, ``queues``, ``all``...
    """

    name: str
    pattern: str
    definition: Mapping[str, Argument]
    apply_to: str
    priority: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "definition", Arguments(self.definition))


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTarget:
    """How the delivery exchange reaches one target.

    Attributes:
        address: the end of the routing key.
        routed_to: the exchange or queue that the delivery exchange routes to.
        requires: the binding, and the release queue if there is one.
        expects: the target, if declaring ``requires`` succeeds without it, so that it has to be checked.
        onward: the exchange and the routing key after the release queue; None without a release queue.
    """

    address: str
    routed_to: str
    requires: Topology
    expects: Topology = field(default_factory=Topology)
    onward: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cascade:
    """The exchanges, queues and keys of one binary cascade.

    Attributes:
        family: the common part of all names; also part of the guard's names.
        level_names: the names of the levels, lowest first; exchange and queue of a level have the same name.
        delivery: the name of the delivery exchange.
        queue_arguments: the arguments of each level's queue, besides TTL and dead-letter exchange.
    """

    family: str
    level_names: tuple[str, ...]
    delivery: str
    queue_arguments: Mapping[str, Argument]

    def __post_init__(self) -> None:
        object.__setattr__(self, "queue_arguments", Arguments(self.queue_arguments))

    @property
    def levels(self) -> int:
        """The number of levels."""
        return len(self.level_names)

    def tap_stream(self, which: str) -> str:
        """The name of a tap's stream (see :mod:`bide.delay.taps`). NServiceBus and Celery use no such names."""
        return f"bide.tap.{self.family}.{which}"

    def below(self, level: int) -> str:
        """The exchange after a level."""
        return self.level_names[level - 1] if level else self.delivery

    def entry_level(self, seconds: int) -> int:
        """The highest level at which this delay waits; 0 if it waits at none."""
        return max(seconds.bit_length() - 1, 0)

    def key(self, seconds: int, address: str) -> str:
        """The routing key of a message for ``address``."""
        return f"{'.'.join(f'{seconds:0{self.levels}b}')}.{address}"

    def exact_key(self, address: str) -> str:
        """The binding key that matches the messages for this address, with any delay, and no others."""
        return "*." * self.levels + address

    @property
    def release_prefix(self) -> str:
        """The start of the names of release queues. NServiceBus and Celery use no such names."""
        return f"bide.release.{self.family}:"

    def released(self, target: Target) -> BoundTarget:
        """A target behind its own release queue.

        The address is one word that only bide binds: no ``#.<address>`` binding of NServiceBus or Celery matches it.

        Raises:
            InvalidNameError: the target's name and its routing key do not fit beside the digits.
            UnsupportedTargetError: the target is the default exchange.
        """
        exchange, routing_key = address_of(target)
        address = release_word(exchange, routing_key)
        size, limit = len(address.encode()), MAX_NAME_BYTES - 2 * self.levels
        if size > limit:
            raise InvalidNameError(
                f"the exchange {exchange!r} and the routing key {routing_key!r} take {size} bytes beside the digits of "
                f"the delay, the limit is {limit}: use shorter ones"
            )
        queue = release_queue(self.release_prefix, exchange, routing_key)
        return BoundTarget(
            address=address,
            routed_to=queue.name,
            requires=Topology(queues=[queue], bindings=[Binding(self.delivery, queue.name, self.exact_key(address))]),
            expects=existing(target),
            onward=(exchange, routing_key),
        )

    def route(self, seconds: int, bound: BoundTarget, *, headers: Mapping[str, Any]) -> DelayRoute:
        """The route to a target."""
        return DelayRoute(
            exchange=self.level_names[self.entry_level(seconds)],
            routing_key=self.key(seconds, bound.address),
            headers=headers,
            delay=seconds * RESOLUTION,
            hops=seconds.bit_count() + (bound.onward is not None),
            requires=bound.requires,
            expects=bound.expects,
        )

    def compile(
        self, bound: BoundTarget, wire: WireFormat, *, headers: Mapping[str, str], delay_header: str | None = None
    ) -> CascadeRoute:
        """:meth:`route` for many messages.

        Args:
            headers: the headers that do not depend on the delay.
            delay_header: the name of a header for the delay in seconds, which comes before the others.
        """
        return CascadeRoute(
            wire,
            level_names=self.level_names,
            address=bound.address,
            target_hops=int(bound.onward is not None),
            headers=headers,
            delay_header=delay_header,
        )

    def steps(self, seconds: int, bound: BoundTarget, target: Target) -> Iterator[Step]:
        """Every exchange on the route, from the entry to the target."""
        key = self.key(seconds, bound.address)
        for level in range(self.entry_level(seconds), -1, -1):
            name, below = self.level_names[level], self.below(level)
            if seconds >> level & 1:
                wait = (1 << level) * RESOLUTION
                yield Step(exchange=name, segment=key, value="1", routed_to=name, delay=wait, dead_letter_to=below)
            else:
                yield Step(exchange=name, segment=key, value="0", routed_to=below)
        if bound.onward is None:
            yield Step(exchange=self.delivery, segment=key, value=bound.address, routed_to=bound.routed_to)
            return
        exchange, routing_key = bound.onward[0] or "(default)", bound.onward[1]
        yield Step(
            exchange=self.delivery,
            segment=key,
            value=bound.address,
            routed_to=bound.routed_to,
            dead_letter_to=exchange,
        )
        yield Step(
            exchange=exchange,
            segment=routing_key,
            value=routing_key,
            routed_to=target.queue if isinstance(target, QueueTarget) else "its bindings",
        )


class CascadeInfrastructure(DelayInfrastructure):
    """A delay infrastructure whose messages wait in one binary cascade."""

    __slots__ = ()

    @property
    @abstractmethod
    def cascade(self) -> Cascade:
        """The levels as a binary cascade."""

    @property
    def resolution(self) -> timedelta:
        """One second."""
        return RESOLUTION

    @property
    def max_delay(self) -> timedelta:
        """The sum of the waits of all levels: 268,435,455 seconds with 28 levels."""
        return ((1 << self.cascade.levels) - 1) * self.resolution

    @property
    def delivery_exchange(self) -> str:
        """The exchange that targets are bound to."""
        return self.cascade.delivery

    @property
    def undeliverable(self) -> str:
        """The name of the guard's exchange and queue for undeliverable messages."""
        return f"bide.undeliverable.{self.cascade.family}"

    @property
    def release_prefix(self) -> str:
        """The start of the names of release queues."""
        return self.cascade.release_prefix

    def topology(self) -> Topology:
        """All exchanges, queues and bindings of the infrastructure, without targets."""
        return _topology(self.cascade)

    def probes(self) -> Topology:
        """The delivery exchange, and the queues of the highest and the lowest level."""
        ends = {self.cascade.level_names[0], self.cascade.level_names[-1]}
        return Topology(
            [Exchange(self.delivery_exchange, "topic")],
            [queue for queue in self.topology().queues if queue.name in ends],
        )

    def taps(self) -> Taps:
        """Taps bound to the levels and to the delivery exchange."""
        return _taps(self.cascade)

    def label(self, name: str) -> str | None:
        """A readable name of an exchange or queue of the cascade (``Level 03``, ``Delivery``); None for any other."""
        levels = self.cascade.level_names
        if name == self.delivery_exchange:
            return "Delivery"
        return f"Level {levels.index(name):02}" if name in levels else None

    def owns(self, name: str) -> bool:
        """Whether an exchange or queue of this name belongs to the cascade, its guard or its release queues."""
        return (
            name in (self.delivery_exchange, self.undeliverable)
            or name in self.cascade.level_names
            or name.startswith(self.release_prefix)
        )

    def target_of(self, address: str) -> Target:
        """The target of another system's messages with this address: by default the queue of that name."""
        return QueueTarget(address)

    def wait_in(self, queue: str, routing_key: str, headers: Mapping[str, Any]) -> Wait | None:
        """See :meth:`DelayInfrastructure.wait_in`."""
        names = self.cascade.level_names
        return cascade_wait(names, queue, routing_key, unit=RESOLUTION, target_of=self.target_of)

    def guard_topology(self) -> Topology:
        """The exchange and the queue for messages that no target takes; see :meth:`guard_policy`."""
        return Topology(
            [Exchange(self.undeliverable, "fanout")],
            [Queue.quorum(self.undeliverable, {"x-overflow": "reject-publish"})],
            [Binding(self.undeliverable, self.undeliverable)],
        )

    def guard_policy(self) -> Policy:
        """The policy that sends unroutable messages of the cascade's exchanges to the undeliverable queue.

        Without the policy, such a message stays in its level's queue, and 32 of them block that level for all targets.
        An ``alternate-exchange`` argument instead of a policy would make the declarations of NServiceBus and Celery
        fail. The policy does not cover a message that is unroutable at its target exchange. For example, if the queue
        of an NServiceBus endpoint was deleted, the endpoint's exchange drops the message.
        """
        names = "|".join(re.escape(name) for name in (*self.cascade.level_names, self.delivery_exchange))
        return Policy(
            name=f"bide.guard.{self.cascade.family}",
            pattern=f"^({names})$",
            definition={"alternate-exchange": self.undeliverable},
            apply_to="exchanges",
        )


@lru_cache(maxsize=32)
def _topology(cascade: Cascade) -> Topology:
    exchanges, queues, bindings = [Exchange(cascade.delivery, "topic")], [], []
    for level, name in enumerate(cascade.level_names):
        below = cascade.below(level)
        wildcards = "*." * (cascade.levels - 1 - level)
        exchanges.append(Exchange(name, "topic"))
        waiting: dict[str, Argument] = {"x-message-ttl": 1000 << level, "x-dead-letter-exchange": below}
        queues.append(Queue(name, arguments={**cascade.queue_arguments, **waiting}))
        bindings.append(Binding(name, name, f"{wildcards}1.#"))
        bindings.append(Binding(name, below, f"{wildcards}0.#", "exchange"))
    return Topology(exchanges, queues, bindings)


@lru_cache(maxsize=32)
def _taps(cascade: Cascade) -> Taps:
    from bide.delay.taps import DELIVERED, SCHEDULED, Taps, passage_to

    scheduled, delivered = cascade.tap_stream(SCHEDULED), cascade.tap_stream(DELIVERED)
    passage = Topology() if cascade.queue_arguments.get(_STRATEGY) == _AT_LEAST_ONCE else passage_to(delivered)
    first = passage.queues[0].name if passage.queues else delivered
    return Taps(
        scheduled=scheduled,
        delivered=delivered,
        to_scheduled=tuple(_entry_bindings(cascade, scheduled)),
        to_delivered=(Binding(cascade.delivery, first, "#"),),
        passage=passage,
        defeats=cascade.delivery,
    )


def _entry_bindings(cascade: Cascade, stream: str) -> Iterator[Binding]:
    """One binding per level for the keys whose highest ``1`` is at that level, and one for the keys without a ``1``."""
    for level, name in enumerate(cascade.level_names):
        yield Binding(name, stream, "0." * (cascade.levels - 1 - level) + "1.#")
    yield Binding(cascade.level_names[0], stream, "0." * cascade.levels + "#")
