"""Building blocks of patterns: checked names, queues that lose nothing, final validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Final

from bide.delay.protocol import check_name
from bide.durations import DelayLike, format_delay, parse_delay
from bide.errors import InvalidDelayError, InvalidInputError, InvalidNameError
from bide.topology import Argument, Queue, Topology
from bide.topology.validation import validate

QUEUE_TYPES: Final = ("quorum", "classic")

_MILLISECOND: Final = timedelta(milliseconds=1)
_LONGEST: Final = timedelta(days=3650)
"""The broker's limit for TTLs and expiries."""

Rules = Mapping[str, Mapping[str, Argument]]
"""Queue -> the headers that it asks for, with ``x-match`` among them where not all have to match."""


def distinct(kind: str, names: Sequence[str], *, option: str) -> tuple[str, ...]:
    """The names, if there are any, each can be a name, and none comes twice.

    Args:
        kind: what they name, for the message: ``"queue"``.
        option: the argument that they came by.

    Raises:
        InvalidInputError: it is a single text, or empty.
        InvalidNameError: a name cannot be carried, or comes twice.
    """
    if isinstance(names, str):
        raise InvalidInputError(f"{option}={names!r} is a single text: give a list of names")
    if not names:
        raise InvalidInputError(f"{option} is empty: name one {kind} at least")
    for name in names:
        check_name(kind, name)
    for name, count in Counter(names).items():
        if count > 1:
            raise InvalidNameError(f"the {kind} {name!r} is named {count} times in {option}: name it once")
    return tuple(names)


def keys_of(keys: Sequence[str], *, option: str) -> tuple[str, ...]:
    """Binding keys, if there are any and the broker can carry them.

    Raises:
        InvalidInputError: it is a single text, or empty.
        InvalidNameError: a key cannot be carried.
    """
    if isinstance(keys, str):
        raise InvalidInputError(f"{option}={keys!r} is a single text: give a list of binding keys")
    if not keys:
        raise InvalidInputError(f"{option} is empty: give one binding key at least")
    for key in keys:
        check_name("binding key", key, empty=True)
    return tuple(dict.fromkeys(keys))


def literal_word(kind: str, name: str) -> str:
    """A name that is going to be part of a topic binding key.

    Raises:
        InvalidNameError: it cannot be carried, or is a wildcard there.
    """
    check_name(kind, name)
    if {"*", "#"} & set(name.split(".")):
        raise InvalidNameError(
            f"the {kind} {name!r} would be part of a binding key, in which '*' and '#' are wildcards: choose another"
        )
    return name


def one_of(option: str, value: str, allowed: Sequence[str]) -> str:
    """The value, if it is one of those.

    Raises:
        InvalidInputError: it is not.
    """
    if value not in allowed:
        raise InvalidInputError(f"{option}={value!r} is not one of {', '.join(map(repr, allowed))}: choose one")
    return value


def milliseconds(option: str, value: DelayLike) -> int:
    """A time as whole milliseconds, rounded up, that the broker takes as TTL or expiry.

    Raises:
        InvalidDelayError: it is not a time, less than a millisecond, or more than 3,650 days.
    """
    wait = parse_delay(value)
    if not _MILLISECOND <= wait <= _LONGEST:
        raise InvalidDelayError(
            f"{option} {format_delay(wait)} is not between 1 ms and {format_delay(_LONGEST)}: give another"
        )
    return -(-wait // _MILLISECOND)


def make_queue(name: str, queue_type: str, arguments: Mapping[str, Argument] | None = None) -> Queue:
    """A durable queue that passes its dead letters on at least once, where its type can.

    Raises:
        InvalidInputError: the type is neither quorum nor classic.
    """
    given = dict(arguments or {})
    if one_of("queue_type", queue_type, QUEUE_TYPES) == "classic":
        return Queue(name, arguments=given)
    if "x-dead-letter-exchange" in given:
        # Without these two a quorum queue drops a message whose dead-lettering fails.
        given = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish", **given}
    return Queue.quorum(name, given)


def references(topology: Topology) -> frozenset[str]:
    """Exchanges and queues that a topology leads to, or is led from, without holding them: others declare them."""
    named = {one.source for one in topology.bindings} | {one.destination for one in topology.bindings}
    for queue in topology.queues:
        named |= {str(queue.arguments.get(f"x-dead-letter-{what}", "")) for what in ("exchange", "routing-key")}
    named |= {str(one.arguments.get("alternate-exchange", "")) for one in topology.exchanges}
    own = {one.name for one in topology.exchanges} | {one.name for one in topology.queues}
    return frozenset(named - own - {""})


def refuse_same(names: Iterable[tuple[str, str]]) -> None:
    """See to it that things which must be different have different names.

    Args:
        names: what each is, and its name.

    Raises:
        InvalidNameError: two have the same.
    """
    seen: dict[str, str] = {}
    for what, name in names:
        if name in seen:
            raise InvalidNameError(f"{name!r} is both {seen[name]} and {what}: give one of them another name")
        seen[name] = what


def finished(topology: Topology, *, external: Collection[str] = ()) -> Topology:
    """The topology, after a last look at it.

    Raises:
        InvalidTopologyError: the broker would refuse it, or take it and do something else.
    """
    validate(topology, external=external)
    return topology
