"""The binary cascade that NServiceBus and Celery share.

A cascade counts the delay in seconds, in binary. Level ``n`` is a topic exchange and a queue of the same name that
holds messages for 2^n seconds; the routing key starts with one word per level, highest first, ``1`` to wait and ``0``
to pass on, and ends with the address. After level 0 comes the delivery exchange, where the address decides::

    1.0.1.0.orders    with four levels: 8 s + 2 s, then to whatever is bound for the address ``orders``

Both systems bind targets with ``#.<address>``, which also matches every longer address that ends in these words
(``#.orders`` takes the messages for ``billing.orders``). bide binds with one ``*`` per level instead, which matches
the same messages and no others.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from bide.delay.cascade_keys import LEVELS
from bide.delay.cascade_route import CascadeRoute
from bide.delay.protocol import (
    MAX_NAME_BYTES,
    DelayRoute,
    QueueTarget,
    Step,
    Target,
    address_of,
    check_name,
    existing,
)
from bide.delay.release import release_queue, release_word
from bide.errors import InvalidNameError
from bide.topology import Argument, Arguments, Binding, Exchange, Queue, Topology

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from bide.delay.compiled import WireFormat
    from bide.delay.taps import Taps

RESOLUTION: Final = timedelta(seconds=1)

_STRATEGY: Final = "x-dead-letter-strategy"
_AT_LEAST_ONCE: Final = "at-least-once"
_WILDCARDS: Final = frozenset({"*", "#"})


def check_address(kind: str, address: str, *, levels: int = LEVELS) -> None:
    """Check that an address can end a routing key, and a binding of exact width.

    Args:
        kind: what it names, for the message: ``"queue"`` or ``"exchange"``.
        address: the name itself.
        levels: digits before it in the key.

    Raises:
        InvalidNameError: it is empty, does not fit beside the digits, or has ``*`` or ``#`` for a word.
    """
    check_name(kind, address, limit=MAX_NAME_BYTES - 2 * levels)
    wild = sorted(_WILDCARDS.intersection(address.split(".")))
    if wild:
        raise InvalidNameError(
            f"the {kind} {address!r} has {wild[0]!r} for a word: in the binding that brings delayed messages there it "
            "would match the messages of others; rename it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A RabbitMQ policy, as the management API takes it.

    Attributes:
        pattern: regular expression for the names it applies to.
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
        address: what ends the routing key.
        routed_to: the exchange or queue that the delivery exchange routes to.
        requires: the binding, and the release queue where there is one.
        expects: the target, where binding does not show that it is missing.
        onward: the exchange and the routing key after the release queue; None where there is none.
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
        family: what the names have in common; part of the names of the guard.
        level_names: names of the levels, lowest first; a level's exchange and queue share it.
        delivery: name of the delivery exchange.
        queue_arguments: arguments of every level's queue, beside the TTL and the dead-letter exchange.
    """

    family: str
    level_names: tuple[str, ...]
    delivery: str
    queue_arguments: Mapping[str, Argument]

    def __post_init__(self) -> None:
        object.__setattr__(self, "queue_arguments", Arguments(self.queue_arguments))

    @property
    def levels(self) -> int:
        """How many levels there are."""
        return len(self.level_names)

    @property
    def max_delay(self) -> timedelta:
        """The wait of all levels together."""
        return timedelta(seconds=(1 << self.levels) - 1)

    @property
    def undeliverable(self) -> str:
        """The exchange, and its queue, that the guard leads undeliverable messages to."""
        return f"bide.undeliverable.{self.family}"

    def tap_stream(self, which: str) -> str:
        """The name of a tap's stream, see :mod:`bide.delay.taps`; outside of the owner's own names."""
        return f"bide.tap.{self.family}.{which}"

    def topology(self) -> Topology:
        """All exchanges, queues and bindings, without targets."""
        return _topology(self)

    def probes(self) -> Topology:
        """The delivery exchange, and the queues of the highest and the lowest level."""
        ends = {self.level_names[0], self.level_names[-1]}
        return Topology(
            [Exchange(self.delivery, "topic")], [queue for queue in self.topology().queues if queue.name in ends]
        )

    def below(self, level: int) -> str:
        """The exchange that comes after a level."""
        return self.level_names[level - 1] if level else self.delivery

    def entry_level(self, seconds: int) -> int:
        """The first level that has something to do for this delay; 0 where none has."""
        return max(seconds.bit_length() - 1, 0)

    def key(self, seconds: int, address: str) -> str:
        """The routing key of a message for ``address``."""
        return f"{'.'.join(f'{seconds:0{self.levels}b}')}.{address}"

    def exact_key(self, address: str) -> str:
        """The binding key that matches messages for this address, after any delay, and no others."""
        return "*." * self.levels + address

    @property
    def release_prefix(self) -> str:
        """What the names of the release queues start with; outside of the owner's own names."""
        return f"bide.release.{self.family}:"

    def released(self, target: Target) -> BoundTarget:
        """A target behind a release queue of its own.

        The address is one word that only bide binds: no binding of the owner (``#.<address>``) takes the message too.

        Raises:
            InvalidNameError: the target's name and its routing key do not fit beside the digits.
            UnsupportedTargetError: the default exchange.
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
        """How to publish to a target."""
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
            headers: those that are the same after every delay.
            delay_header: one with the delay in seconds, before them.
        """
        return CascadeRoute(
            wire,
            level_names=self.level_names,
            address=bound.address,
            target_hops=int(bound.onward is not None),
            headers=headers,
            delay_header=delay_header,
        )

    def taps(self) -> Taps:
        """See :mod:`bide.delay.taps`."""
        return _taps(self)

    def steps(self, seconds: int, bound: BoundTarget, target: Target) -> Iterator[Step]:
        """Every exchange on the way, from the entry to the target."""
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

    def label(self, name: str) -> str | None:
        """What people call an exchange or queue of the cascade: ``Level 03``, ``Delivery``; None for any other."""
        if name == self.delivery:
            return "Delivery"
        return f"Level {self.level_names.index(name):02}" if name in self.level_names else None

    def owns(self, name: str) -> bool:
        """Whether an exchange or queue of this name belongs to the cascade, its guard or its release queues."""
        return (
            name in (self.delivery, self.undeliverable)
            or name in self.level_names
            or name.startswith(self.release_prefix)
        )

    def guard_topology(self) -> Topology:
        """The exchange and the queue for messages that no target takes; see :meth:`guard_policy`."""
        return Topology(
            [Exchange(self.undeliverable, "fanout")],
            [Queue.quorum(self.undeliverable, {"x-overflow": "reject-publish"})],
            [Binding(self.undeliverable, self.undeliverable)],
        )

    def guard_policy(self) -> Policy:
        """The policy that leads what matches nothing in an exchange of the cascade to the undeliverable queue.

        Without it such a message stays in the queue that it came from, and 32 of them stop that level for all targets.
        It has to be a policy: with an ``alternate-exchange`` argument the owner's own declare would be refused.
        A message that reaches its target exchange, and matches nothing there, is beyond its reach.
        """
        names = "|".join(re.escape(name) for name in (*self.level_names, self.delivery))
        return Policy(
            name=f"bide.guard.{self.family}",
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
        to_scheduled=tuple(_entries(cascade, scheduled)),
        to_delivered=(Binding(cascade.delivery, first, "#"),),
        passage=passage,
        defeats=cascade.delivery,
    )


def _entries(cascade: Cascade, stream: str) -> Iterator[Binding]:
    """One binding per level, for the keys whose highest ``1`` is its own, and one for the keys without any."""
    for level, name in enumerate(cascade.level_names):
        yield Binding(name, stream, "0." * (cascade.levels - 1 - level) + "1.#")
    yield Binding(cascade.level_names[0], stream, "0." * cascade.levels + "#")


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossDelivery:
    """A binding of a delivery exchange that also takes messages for other addresses.

    Attributes:
        binding: the binding, of the form ``#.<address>``.
        addresses: the addresses whose delayed messages it takes too, sorted.
    """

    binding: Binding
    addresses: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"the {self.binding.destination_type} {self.binding.destination!r} also receives the delayed messages for "
            f"{', '.join(map(repr, self.addresses))}, by its binding {self.binding.routing_key!r} on "
            f"{self.binding.source!r}"
        )


def foreign_suffix_bindings(bindings: Iterable[Binding], addresses: Iterable[str] = ()) -> list[CrossDelivery]:
    """The ``#.`` bindings that deliver delayed messages to queues that they are not for.

    Two bindings for the very same address are taken for intended.

    Args:
        bindings: the bindings of one delivery exchange.
        addresses: further addresses that exist, such as the names of endpoints that are not bound at present.
    """
    # Only here, because nothing else that "import bide" brings in needs a model of the routing.
    from bide.topology.exchange_types import RoutedMessage, binding_table

    bindings = list(bindings)
    takers: dict[str, set[str]] = {address: {address} for address in addresses}
    for binding in bindings:
        address = _address_of(binding.routing_key)
        if address is not None:
            takers.setdefault(address, set()).add(binding.destination)
    suffixed = [binding for binding in bindings if binding.routing_key.startswith("#.")]
    # Each binding under its number, so that what matches is a binding and not merely its destination.
    numbered = [Binding(one.source, str(number), one.routing_key) for number, one in enumerate(suffixed)]
    table = binding_table(Exchange("", "topic"), numbered)
    stolen: defaultdict[int, list[str]] = defaultdict(list)
    for address, own in sorted(takers.items()):
        for _, number in table.matches(RoutedMessage(("0." * LEVELS + address,), {})):
            if suffixed[int(number)].destination not in own:
                stolen[int(number)].append(address)
    return [
        CrossDelivery(binding=suffixed[number], addresses=tuple(addresses))
        for number, addresses in sorted(stolen.items())
    ]


def _address_of(binding_key: str) -> str | None:
    """The one address that a binding of a delivery exchange is for, or None if it is for several."""
    for start in ("#.", "*." * LEVELS):
        if binding_key.startswith(start):
            address = binding_key.removeprefix(start)
            return None if _WILDCARDS.intersection(address.split(".")) else address
    return None
