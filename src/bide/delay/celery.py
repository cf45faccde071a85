"""``Celery``: the delay infrastructure of Celery's native delayed delivery (kombu), name for name.

Workers declare the same exchanges and queues, so either side may come first. A message that bide delays enters at the
first level that has something to do, where Celery always enters at the highest; both arrive in the same way.

Celery addresses a message by its routing key alone, so every exchange that is bound under that key gets it. bide puts
one word before the key that names the exchange, or the queue, that it means::

    0.0. ... .1.0.1.0.~x:tasks.order.created     the exchange "tasks", with the routing key "order.created"
    0.0. ... .1.0.1.0.~q:orders                  the queue "orders", without any exchange

The bindings that a worker makes (``#.order.created``) take such a key as they take Celery's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

from bide.delay.cascade import LEVELS, RESOLUTION, Cascade, Policy, refuse_isolated, target_word
from bide.delay.infrastructure import (
    HEADER_TO,
    MAX_NAME_BYTES,
    DelayRoute,
    ExchangeTarget,
    QueueTarget,
    Step,
    Target,
    check_name,
    round_up,
)
from bide.errors import InvalidInputError, InvalidNameError, UnsupportedTargetError
from bide.topology import DEFAULT_EXCHANGE, Argument, Binding, DestinationType, Topology

if TYPE_CHECKING:
    from collections.abc import Mapping

_QUEUE_ARGUMENTS: Final[dict[str, dict[str, Argument]]] = {
    "quorum": {"x-queue-type": "quorum", "x-overflow": "reject-publish", "x-dead-letter-strategy": "at-least-once"},
    "classic": {"x-queue-type": "classic", "x-overflow": "reject-publish"},
}

_ROOM: Final = MAX_NAME_BYTES - 2 * LEVELS

_ANY_KEY: Final = ("topic", "fanout", "headers")
"""Types of exchanges for which a key with digits before it does what the key alone would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Celery:
    """Delays in whole seconds, of up to 3106 d 21:24:15, through the levels that Celery's workers declare.

    Which target to choose:

    ``ExchangeTarget(exchange, routing_key)``
        As Celery itself sends a task: the message reaches the exchange with the digits still before its key, and goes
        on to the queues that a Celery worker has bound there with ``#.<routing key>``. A topic exchange whose queues
        are bound with the plain key does not know the longer one: the message matches nothing, stays in the last
        level that it waited in, and no guard can help. So choose it for exchanges that Celery workers consume from,
        and for fanout and headers exchanges, which do not look at the key.
    ``QueueTarget(queue)``
        For everything else, and for a worker's queue as well: straight from the delivery exchange to the queue.
        It needs no exchange and no worker to have been there, and the guard holds.

    Direct exchanges are refused where the type is known (rule of Celery, which logs a warning instead): they compare
    the whole key. A delay of zero goes straight to the target.

    Args:
        prefix: starts every name (``<prefix>_celery_delayed_0``...), as kombu's own ``prefix`` does; None or the
            empty text for Celery's standard names.
        queue_type: type of the levels' queues; what ``broker_native_delayed_delivery_queue_type`` says to the workers.

    Raises:
        InvalidInputError: the queue type is neither ``quorum`` nor ``classic``.
        InvalidNameError: the prefix is too long, or starts with ``amq.``.
    """

    prefix: str | None = None
    queue_type: Literal["quorum", "classic"] = "quorum"

    def __post_init__(self) -> None:
        if self.queue_type not in _QUEUE_ARGUMENTS:
            raise InvalidInputError(f"the queue type {self.queue_type!r} is unknown: give 'quorum' or 'classic'")
        check_name("prefix", self.prefix or "", limit=200, empty=True)
        if (self.prefix or "").startswith("amq."):
            raise InvalidNameError(f"the prefix {self.prefix!r} starts with 'amq.', which RabbitMQ keeps for itself")

    @property
    def name(self) -> str:
        """The layout's name on the command line."""
        return "celery"

    @property
    def resolution(self) -> timedelta:
        """One second."""
        return RESOLUTION

    @property
    def max_delay(self) -> timedelta:
        """268,435,455 seconds. Celery does not check it, and makes a key that no level understands."""
        return self.cascade.max_delay

    @property
    def delivery_exchange(self) -> str:
        """The exchange that targets are bound to."""
        return self.cascade.delivery

    @property
    def undeliverable(self) -> str:
        """The exchange, and its queue, of the guard."""
        return self.cascade.undeliverable

    @property
    def cascade(self) -> Cascade:
        """The levels, as the binary cascade that they are."""
        return _cascade(self.prefix or "", self.queue_type)

    def topology(self) -> Topology:
        """All exchanges, queues and bindings of the infrastructure, without targets."""
        return self.cascade.topology()

    def probes(self) -> Topology:
        """The delivery exchange, and the queues of the highest and the lowest level."""
        return self.cascade.probes()

    def route(self, delay: timedelta, target: Target, *, message_id: str = "") -> DelayRoute:
        """Where and how to publish so that the message reaches ``target`` after ``delay``, rounded up to the second.

        Args:
            delay: zero or more.
            target: see the class.
            message_id: makes no difference here: there is one queue per level.

        Raises:
            InvalidDelayError: negative, or longer than ``max_delay``.
            InvalidNameError: the target's name and routing key do not fit beside the digits (196 bytes for a queue).
            UnsupportedTargetError: the default exchange, a direct exchange or another that compares or hashes the
                whole key, a topic exchange with an empty routing key, or an isolated queue.
        """
        seconds = round_up(delay, RESOLUTION, maximum=self.max_delay)
        address, requires = _bound(self, target)
        if not seconds:
            exchange, key = _direct(target)
            return DelayRoute(exchange=exchange, routing_key=key, delay=timedelta(0), hops=0, requires=Topology())
        return self.cascade.route(seconds, address, headers={HEADER_TO: str(target)}, requires=requires)

    def sender_headers(
        self, *, message_id: str, now: datetime, due: datetime | None, values: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """None: what a worker needs of a task, Celery's own message protocol says."""
        return {}

    def steps(self, delay: timedelta, target: Target) -> tuple[Step, ...]:
        """Every exchange on the way of a message, in order."""
        seconds = round_up(delay, RESOLUTION, maximum=self.max_delay)
        address, _ = _bound(self, target)
        name = str(target)[2:]
        if not seconds:
            exchange, key = _direct(target)
            to = name if isinstance(target, QueueTarget) else "its bindings"
            return (Step(exchange=exchange or "(default)", segment=key, value=key, routed_to=to),)
        return tuple(self.cascade.steps(seconds, address, value=address, routed_to=name))

    def label(self, name: str) -> str | None:
        """What people call an exchange or queue of the infrastructure; None for any other."""
        return self.cascade.label(name)

    def owns(self, name: str) -> bool:
        """Whether an exchange or queue of this name belongs to the infrastructure or to its guard."""
        return self.cascade.owns(name)

    def guard_topology(self) -> Topology:
        """The exchange and the queue for messages whose target is gone; see :meth:`guard_policy`."""
        return self.cascade.guard_topology()

    def guard_policy(self) -> Policy:
        """The policy that leads undeliverable messages to the guard's queue; see :meth:`Cascade.guard_policy`."""
        return self.cascade.guard_policy()


@lru_cache(maxsize=64)
def _cascade(prefix: str, queue_type: str) -> Cascade:
    family = f"{prefix}_celery" if prefix else "celery"
    return Cascade(
        family=family,
        level_names=tuple(f"{family}_delayed_{level}" for level in range(LEVELS)),
        delivery=f"{family}_delayed_delivery",
        queue_arguments=_QUEUE_ARGUMENTS[queue_type],
    )


def _direct(target: Target) -> tuple[str, str]:
    """The exchange and the routing key of a publish without delay."""
    if isinstance(target, QueueTarget):
        return DEFAULT_EXCHANGE, target.queue
    return target.exchange, target.routing_key


@lru_cache(maxsize=4096)
def _bound(infrastructure: Celery, target: Target) -> tuple[str, Topology]:
    """The address of a target, checked, and the binding that it needs."""
    kind: DestinationType
    if isinstance(target, QueueTarget):
        if target.isolated:
            raise refuse_isolated("Celery", target.queue)
        kind, destination = "queue", target.queue
        pattern = address = _word("q", target.queue)
    else:
        _check_exchange(target)
        kind, destination = "exchange", target.exchange
        word = _word("x", target.exchange)
        check_name("routing key", target.routing_key, limit=_ROOM - len(word.encode()) - 1, empty=True)
        address = f"{word}.{target.routing_key}" if target.routing_key else word
        # One binding serves every routing key: the word before the "#" is nobody else's.
        pattern = f"{word}.#"
    cascade = infrastructure.cascade
    return address, Topology(bindings=[Binding(cascade.delivery, destination, cascade.exact_key(pattern), kind)])


def _word(kind: Literal["q", "x"], name: str) -> str:
    word = target_word(kind, name)
    check_name("queue" if kind == "q" else "exchange", word[3:], limit=_ROOM - 3)
    return word


def _check_exchange(target: ExchangeTarget) -> None:
    if target.exchange == DEFAULT_EXCHANGE:
        raise UnsupportedTargetError(
            "a delayed message cannot go to the default exchange: name the queue as the target (to=...)"
        )
    known = target.type or ("direct" if target.exchange == "amq.direct" else None)
    if known is not None and known not in _ANY_KEY:
        raise UnsupportedTargetError(
            f"Celery's infrastructure cannot delay messages to the {known} exchange {target.exchange!r}, which would "
            "compare the routing key with the delay's digits before it: name the queue as the target, use a topic, "
            "fanout or headers exchange, or the clock layout"
        )
    if known == "topic" and not target.routing_key:
        raise UnsupportedTargetError(
            f"the routing key for the topic exchange {target.exchange!r} is empty: a delayed message to a topic "
            "exchange needs one of at least one word"
        )
