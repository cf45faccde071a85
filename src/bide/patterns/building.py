"""Building blocks of patterns: checks of names, queues, and the final validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Final

from bide.delay.protocol import check_name
from bide.durations import MILLISECOND, DelayLike, format_delay, parse_delay
from bide.errors import InvalidDelayError, InvalidInputError, InvalidNameError
from bide.topology import Argument, Queue, Topology
from bide.topology.validation import validate

QUEUE_TYPES: Final = ("quorum", "classic")

_MAX_TTL: Final = timedelta(days=3650)
"""The broker's limit for TTLs and expiries."""

Rules = Mapping[str, Mapping[str, Argument]]
"""Queue -> the headers that a message must have, with ``x-match`` if not all have to match."""


def distinct(kind: str, names: Collection[str], *, option: str, owner: str | None = None) -> tuple[str, ...]:
    """Check that there are names, that each is valid, and that none is given twice.

    Args:
        kind: the kind of object that has the names, for error messages: ``"queue"``.
        names: the names, or a mapping with the names as keys.
        option: the argument of the pattern that contains the names.
        owner: if the argument is a mapping with the names as one of its values, the key of that value; None if the
            names are the whole argument.

    Raises:
        InvalidInputError: the value is a single text, or empty.
        InvalidNameError: a name is invalid, or given twice.
    """
    if isinstance(names, str):
        raise InvalidInputError(f"{option}={names!r} is a single text: give a list of names")
    argument = _argument(option, names, owner)
    if not names:
        raise InvalidInputError(f"no {kind} is given: give at least one in {argument}")
    for name in names:
        check_name(kind, name)
    for name, count in Counter(tuple(names)).items():
        if count > 1:
            raise InvalidNameError(f"the {kind} {name!r} is named {count} times in {argument}: name it once")
    return tuple(names)


def _argument(option: str, values: Collection[str], owner: str | None) -> str:
    """The form in which errors name an argument with several values. The command line replaces it by the option."""
    shape = "{...}" if isinstance(values, Mapping) or owner is not None else "[...]"
    return f"{option}={shape}" if owner is None else f"{option}={shape} for {owner!r}"


def keys_of(keys: Sequence[str], *, option: str, owner: str | None = None) -> tuple[str, ...]:
    """Check that there are binding keys, and that each is valid.

    Args:
        keys: the binding keys.
        option: the argument of the pattern that contains the keys.
        owner: as for :func:`distinct`.

    Raises:
        InvalidInputError: the value is a single text, or empty.
        InvalidNameError: a key is invalid.
    """
    if isinstance(keys, str):
        raise InvalidInputError(f"{option}={keys!r} is a single text: give a list of binding keys")
    if not keys:
        raise InvalidInputError(f"no binding key is given: give at least one in {_argument(option, keys, owner)}")
    for key in keys:
        check_name("binding key", key, empty=True)
    return tuple(dict.fromkeys(keys))


def literal_word(kind: str, name: str) -> str:
    """Check a name that becomes part of a topic binding key.

    Raises:
        InvalidNameError: the name is invalid, or a wildcard in a binding key.
    """
    check_name(kind, name)
    if {"*", "#"} & set(name.split(".")):
        raise InvalidNameError(
            f"the {kind} {name!r} would be part of a binding key, in which '*' and '#' are wildcards: choose another"
        )
    return name


def one_of(option: str, value: str, allowed: Sequence[str]) -> str:
    """Check that a value is allowed, and return it.

    Raises:
        InvalidInputError: the value is not allowed.
    """
    if value not in allowed:
        raise InvalidInputError(f"{option}={value!r} is not one of {', '.join(map(repr, allowed))}: choose one")
    return value


def milliseconds(option: str, value: DelayLike) -> int:
    """Convert a TTL or expiry to milliseconds, rounded up.

    Raises:
        InvalidDelayError: the value is not a duration, or not between 1 ms and 3,650 days.
    """
    wait = parse_delay(value)
    if not MILLISECOND <= wait <= _MAX_TTL:
        raise InvalidDelayError(
            f"{option} {format_delay(wait)} is not between 1 ms and {format_delay(_MAX_TTL)}: give a value in between"
        )
    return -(-wait // MILLISECOND)


def make_queue(name: str, queue_type: str, arguments: Mapping[str, Argument] | None = None) -> Queue:
    """A durable queue. A quorum queue with a dead-letter exchange dead-letters at least once.

    Raises:
        InvalidInputError: the type is neither quorum nor classic.
    """
    given = dict(arguments or {})
    if one_of("queue_type", queue_type, QUEUE_TYPES) == "classic":
        return Queue(name, arguments=given)
    if "x-dead-letter-exchange" in given:
        # Without these two arguments, a quorum queue drops a message whose dead-lettering fails.
        given = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish", **given}
    return Queue.quorum(name, given)


def references(topology: Topology) -> frozenset[str]:
    """Names of exchanges and queues that a topology refers to without containing them."""
    named = {one.source for one in topology.bindings} | {one.destination for one in topology.bindings}
    for queue in topology.queues:
        named |= {str(queue.arguments.get(f"x-dead-letter-{what}", "")) for what in ("exchange", "routing-key")}
    named |= {str(one.arguments.get("alternate-exchange", "")) for one in topology.exchanges}
    own = {one.name for one in topology.exchanges} | {one.name for one in topology.queues}
    return frozenset(named - own - {""})


def refuse_same(names: Iterable[tuple[str, str]]) -> None:
    """Check that exchanges or queues that must be different have different names.

    Args:
        names: pairs of a description and a name.

    Raises:
        InvalidNameError: two have the same name.
    """
    seen: dict[str, str] = {}
    for what, name in names:
        if name in seen:
            raise InvalidNameError(f"{name!r} is both {seen[name]} and {what}: give one of them another name")
        seen[name] = what


def finished(topology: Topology, *, external: Collection[str] = ()) -> Topology:
    """Validate a finished topology, and return it.

    Raises:
        InvalidTopologyError: the broker would refuse the topology, or messages would not go where they should.
    """
    validate(topology, external=external)
    return topology
