"""``Celery``: the delay infrastructure of Celery's native delayed delivery, from kombu.

Workers declare the same exchanges and queues, so either side may declare them first. bide publishes a message to the
first level at which the message waits, Celery always to level 27, the highest. Workers receive both in the same way.

Celery addresses a message by its routing key alone: every exchange bound with that key gets it. bide ends the key with
one word that names the target::

    0.0. ... .1.0.1.0.~r:tasks~order/created     the exchange "tasks", with the routing key "order.created"
    0.0. ... .1.0.1.0.~q:orders                  the queue "orders", without any exchange

A message with the first key goes through a release queue (:mod:`bide.delay.release`), which dead-letters it to the
exchange with the message's own routing key. No binding of a worker (``#.order.created``) matches such a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

from bide.delay.cascade import RESOLUTION, BoundTarget, Cascade, CascadeInfrastructure
from bide.delay.cascade_keys import LEVELS, queue_word
from bide.delay.protocol import (
    HEADER_TO,
    MAX_NAME_BYTES,
    ExchangeTarget,
    QueueTarget,
    Target,
    address_of,
    check_name,
    check_prefix,
    check_topic_key,
    round_up,
)
from bide.delay.routes import DelayRoute, Step
from bide.errors import InvalidInputError
from bide.topology import Argument, Binding, Topology

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bide.delay.cascade_route import CascadeRoute
    from bide.delay.compiled import WireFormat
    from bide.delay.growing import ReadyDigits

_QUEUE_ARGUMENTS: Final[dict[str, dict[str, Argument]]] = {
    "quorum": {"x-queue-type": "quorum", "x-overflow": "reject-publish", "x-dead-letter-strategy": "at-least-once"},
    "classic": {"x-queue-type": "classic", "x-overflow": "reject-publish"},
}

_MAX_ADDRESS_BYTES: Final = MAX_NAME_BYTES - 2 * LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Celery(CascadeInfrastructure):
    """Delays in whole seconds, of up to 3106 d 21:24:15, through the levels that Celery's workers declare.

    Which target to choose:

    ``QueueTarget(queue)``
        A worker's queue, bound to the delivery exchange. No exchange is needed, and no worker has to run first.
    ``ExchangeTarget(exchange, routing_key)``
        An exchange of any type, including direct, with the message's own routing key. Each pair of exchange and routing
        key has its own release queue, which costs one hop: use few different keys.

    If an exchange or an isolated queue accepts no messages, only messages for that target wait. A message with a delay
    of zero goes straight to the target. Celery itself does not check for delays above the maximum: their routing keys
    match no level.

    Args:
        prefix: starts every name (``<prefix>_celery_delayed_0``...), as kombu's own ``prefix`` does; None or the
            empty string for Celery's standard names.
        queue_type: the type of the levels' queues; the same as ``broker_native_delayed_delivery_queue_type`` of the
            workers.

    Raises:
        InvalidInputError: the queue type is neither ``quorum`` nor ``classic``.
        InvalidNameError: the prefix is too long, or starts with ``amq.``.
    """

    prefix: str | None = None
    queue_type: Literal["quorum", "classic"] = "quorum"

    def __post_init__(self) -> None:
        if self.queue_type not in _QUEUE_ARGUMENTS:
            raise InvalidInputError(f"the queue type {self.queue_type!r} is unknown: give 'quorum' or 'classic'")
        check_prefix(self.prefix or "", limit=200, empty=True)

    @property
    def name(self) -> str:
        """The layout's name on the command line."""
        return "celery"

    @property
    def cascade(self) -> Cascade:
        """The levels as a binary cascade."""
        return _cascade(self.prefix or "", self.queue_type)

    def route(self, delay: timedelta, target: Target, *, message_id: str = "") -> DelayRoute:
        """The route by which a message reaches ``target`` after ``delay``, rounded up to the second.

        Args:
            delay: zero or more.
            target: see the class.
            message_id: not used, because there is one queue per level.

        Raises:
            InvalidDelayError: the delay is negative, or longer than ``max_delay``.
            InvalidNameError: the target's name and routing key do not fit beside the digits (196 bytes for a queue).
            UnsupportedTargetError: the target is the default exchange, or a topic exchange with an empty routing key.
        """
        seconds = round_up(delay, RESOLUTION, maximum=self.max_delay)
        bound = _bound(self, target)
        if not seconds:
            exchange, key = address_of(target)
            return DelayRoute(exchange=exchange, routing_key=key, delay=timedelta(0), hops=0, requires=Topology())
        return self.cascade.route(seconds, bound, headers={HEADER_TO: str(target)})

    def compile(self, target: Target, wire: WireFormat, ready: ReadyDigits | None = None) -> CascadeRoute:
        """See :meth:`DelayInfrastructure.compile`."""
        return self.cascade.compile(_bound(self, target), wire, headers={HEADER_TO: str(target)})

    def compile_headers(self, values: Mapping[str, Any], wire: WireFormat) -> None:
        """None: Celery's message protocol has all the headers that a worker needs."""

    def target_of(self, address: str) -> ExchangeTarget:
        """The delivery exchange, with the key of a message that waits no longer.

        Every exchange and queue that workers bound for the address gets such a message, as after the levels.
        """
        return ExchangeTarget(self.delivery_exchange, self.cascade.key(0, address))

    def steps(self, delay: timedelta, target: Target) -> tuple[Step, ...]:
        """Every exchange on the route of a message, in order."""
        seconds = round_up(delay, RESOLUTION, maximum=self.max_delay)
        bound = _bound(self, target)
        if not seconds:
            exchange, key = address_of(target)
            to = target.queue if isinstance(target, QueueTarget) else "its bindings"
            return (Step(exchange=exchange or "(default)", segment=key, value=key, routed_to=to),)
        return tuple(self.cascade.steps(seconds, bound, target))


@lru_cache(maxsize=64)
def _cascade(prefix: str, queue_type: str) -> Cascade:
    family = f"{prefix}_celery" if prefix else "celery"
    return Cascade(
        family=family,
        level_names=tuple(f"{family}_delayed_{level}" for level in range(LEVELS)),
        delivery=f"{family}_delayed_delivery",
        queue_arguments=_QUEUE_ARGUMENTS[queue_type],
    )


@lru_cache(maxsize=4096)
def _bound(infrastructure: Celery, target: Target) -> BoundTarget:
    check_topic_key(target)
    cascade = infrastructure.cascade
    if isinstance(target, ExchangeTarget) or target.isolated:
        return cascade.released(target)
    word = queue_word(target.queue)
    check_name("queue", word[3:], limit=_MAX_ADDRESS_BYTES - 3)
    binding = Binding(cascade.delivery, target.queue, cascade.exact_key(word))
    return BoundTarget(address=word, routed_to=target.queue, requires=Topology(bindings=[binding]))
