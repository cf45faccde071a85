"""Checks of declarations: whether they are valid, and equal to what exists."""

from __future__ import annotations

from typing import Final

from bide.testing.rules.errors import inequivalent, locked, not_modelled, precondition_failed
from bide.testing.rules.exchange import TYPES
from bide.topology import Exchange, Queue
from bide.topology.queue_arguments import QUEUE_TYPES, RULES, Release, argument_refusals

_NOT_MODELLED: Final = {
    "x-consumer-timeout": "the acknowledgement timeout (x-consumer-timeout)",
    "x-consumer-disconnected-timeout": "lost nodes (x-consumer-disconnected-timeout)",
}


def check_exchange(exchange: Exchange) -> None:
    """Check a new exchange.

    Raises:
        BrokerError: RabbitMQ would refuse it, or its rules are not modelled.
    """
    if exchange.type not in TYPES:
        not_modelled(f"exchanges of the type {exchange.type!r}: use one of {', '.join(sorted(TYPES))}")
    if exchange.type == "x-consistent-hash" and "hash-property" in exchange.arguments:
        not_modelled("consistent-hash exchanges with hash-property: use the routing key, or hash-header")


def check_queue(queue: Queue, *, release: Release) -> None:
    """Check a new queue.

    Raises:
        BrokerError: RabbitMQ would refuse it, or its rules are not modelled.
    """
    kind = queue.type
    if kind not in QUEUE_TYPES:
        raise precondition_failed(f"invalid arg 'x-queue-type' for queue '{queue.name}': {kind!r}")
    refusals = argument_refusals(queue.arguments, kind, release)
    if refusals:
        raise precondition_failed(
            f"invalid arg '{refusals[0].partition(' ')[0]}' for queue '{queue.name}': {refusals[0]}"
        )
    if "x-dead-letter-routing-key" in queue.arguments and "x-dead-letter-exchange" not in queue.arguments:
        raise precondition_failed(f"invalid arg 'x-dead-letter-routing-key' for queue '{queue.name}' without exchange")
    for name, feature in _NOT_MODELLED.items():
        if name in queue.arguments:
            not_modelled(feature)
    if kind != "classic":
        for flag, is_wrong in (
            ("non-durable", not queue.durable),
            ("auto-delete", queue.auto_delete),
            ("exclusive", queue.exclusive),
        ):
            if is_wrong:
                raise precondition_failed(f"invalid property '{flag}' for queue '{queue.name}'")
        if kind == "quorum" and "x-max-length-bytes" in queue.arguments and release >= (4, 0):
            not_modelled(
                "x-max-length-bytes on quorum queues from RabbitMQ 4.0 on, which counts more than bodies: leave it out"
            )
    elif queue.arguments.get("x-single-active-consumer") is True and queue.exclusive:
        not_modelled("exclusive queues with a single active consumer")


def compare_exchange(wanted: Exchange, found: Exchange, vhost: str) -> None:
    """Check that an existing exchange has the declared properties.

    Raises:
        BrokerError: a property differs.
    """
    _compare_flags("exchange", ("type", "durable", "auto_delete", "internal"), wanted, found, vhost)
    mine, theirs = (one.arguments.get("alternate-exchange") for one in (wanted, found))
    if mine != theirs:
        raise inequivalent("exchange", wanted.name, "alternate-exchange", vhost, wanted=mine, found=theirs)


def compare_queue(wanted: Queue, found: Queue, vhost: str, *, release: Release) -> None:
    """Check that an existing queue has the declared properties.

    Raises:
        BrokerError: a property differs.
    """
    if wanted.exclusive != found.exclusive:
        raise locked(wanted.name, vhost)
    _compare_flags("queue", ("durable", "auto_delete"), wanted, found, vhost)
    if wanted.type != found.type:
        # From 4.0 on, the broker adds the default type to a queue that was declared without one.
        usual = "classic" if release >= (4, 0) else None
        mine, theirs = wanted.arguments.get("x-queue-type"), found.arguments.get("x-queue-type", usual)
        raise inequivalent("queue", wanted.name, "x-queue-type", vhost, wanted=mine, found=theirs)
    for name in sorted({*wanted.arguments, *found.arguments} & RULES.keys() - {"x-queue-type"}):
        mine, theirs = wanted.arguments.get(name), found.arguments.get(name)
        if mine != theirs:
            raise inequivalent("queue", wanted.name, name, vhost, wanted=mine, found=theirs)


def _compare_flags(kind: str, names: tuple[str, ...], wanted: object, found: object, vhost: str) -> None:
    for name in names:
        mine, theirs = (getattr(one, name) for one in (wanted, found))
        if mine != theirs:
            received, current = (str(one).lower() for one in (mine, theirs))
            raise precondition_failed(
                f"inequivalent arg '{name}' for {kind} '{getattr(wanted, 'name', '')}' in vhost '{vhost}': received "
                f"'{received}' but current is '{current}'"
            )
