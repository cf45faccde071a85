"""Queue arguments: the queue types that accept them, and their valid values.

These are the rules of RabbitMQ 3.10 to 4.3. The broker refuses an argument that belongs to another type of queue, but
ignores arguments that it does not know. So unknown arguments are accepted here too, unless a later release knows them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bide.topology import Argument

QUEUE_TYPES: Final = ("classic", "quorum", "stream")

MAX_TTL_MS: Final = 315_360_000_000
"""The longest TTL and expiry that the broker accepts: 10 years of 365 days."""

Release = tuple[int, ...]
"""A release of RabbitMQ: ``(3, 10)``, ``(4, 3, 5)``."""

_Check = Callable[["Argument"], "str | None"]


@dataclass(frozen=True, slots=True)
class _Rule:
    """A check of an argument's value, and the queue types that accept the argument, with their first releases."""

    check: _Check
    types: Mapping[str, Release]


def argument_problems(arguments: Mapping[str, Argument], queue_type: str, release: Release | None) -> list[str]:
    """Find problems of a queue's arguments; each problem starts with the argument's name.

    Args:
        arguments: the arguments of the queue.
        queue_type: ``classic``, ``quorum`` or ``stream``.
        release: the broker's release; if it is None, arguments that any release from 3.10 on accepts are valid.
    """
    return [*argument_refusals(arguments, queue_type, release), *_combinations(arguments, queue_type, release)]


def argument_refusals(arguments: Mapping[str, Argument], queue_type: str, release: Release | None) -> list[str]:
    """The problems of :func:`argument_problems` for which the broker refuses the queue."""
    found = []
    for name, value in arguments.items():
        rule = RULES.get(name)
        if rule is None:
            continue
        since = rule.types.get(queue_type)
        if since is None:
            takers = " and ".join(one for one in QUEUE_TYPES if one in rule.types)
            found.append(
                f"{name} is for {takers} queues only, and this is a {queue_type} queue: "
                "remove it, or change x-queue-type"
            )
        elif release is not None and release < since:
            found.append(
                f"{name} on {queue_type} queues needs RabbitMQ {_dotted(since)} or later, and the broker is "
                f"{_dotted(release)}: remove it, or upgrade the broker"
            )
        elif (wanted := rule.check(value)) is not None:
            found.append(f"{name} is {value!r}, but must be {wanted}: correct it")
    return found


def _combinations(arguments: Mapping[str, Argument], queue_type: str, release: Release | None) -> list[str]:
    """Find arguments that are valid alone, but wrong in combination or on this release."""
    found = []
    dead_letter_exchange = arguments.get("x-dead-letter-exchange")
    if "x-dead-letter-routing-key" in arguments and dead_letter_exchange is None:
        found.append(
            f"x-dead-letter-routing-key is {arguments['x-dead-letter-routing-key']!r} without x-dead-letter-exchange: "
            "add the exchange, or remove the key"
        )
    if queue_type == "quorum" and arguments.get("x-dead-letter-strategy") == "at-least-once":
        if dead_letter_exchange is None:
            found.append(
                "x-dead-letter-strategy is 'at-least-once' without x-dead-letter-exchange: add the exchange, or remove "
                "the strategy"
            )
        overflow = arguments.get("x-overflow", "drop-head")
        if overflow != "reject-publish":
            found.append(
                f"x-dead-letter-strategy is 'at-least-once' with x-overflow {overflow!r}, which makes it at-most-once: "
                "set x-overflow to 'reject-publish'"
            )
    if queue_type == "quorum" and arguments.get("x-overflow") == "reject-publish-dlx":
        found.append(
            "x-overflow is 'reject-publish-dlx', which quorum queues treat like 'drop-head': set it to "
            "'reject-publish' or 'drop-head'"
        )
    if arguments.get("x-delayed-retry-type", "disabled") != "disabled" and "x-delayed-retry-min" not in arguments:
        found.append(
            f"x-delayed-retry-type is {arguments['x-delayed-retry-type']!r} without x-delayed-retry-min, which "
            "disables it: add the minimum in milliseconds"
        )
    shortest, longest = arguments.get("x-delayed-retry-min"), arguments.get("x-delayed-retry-max")
    if isinstance(shortest, int) and isinstance(longest, int) and longest < shortest:
        found.append(f"x-delayed-retry-max is {longest}, less than x-delayed-retry-min, which is {shortest}: swap them")
    if release is not None:
        limit = arguments.get("x-delivery-limit")
        if release < (4, 0) and isinstance(limit, int) and limit < 0:
            found.append(
                f"x-delivery-limit is {limit}, which means no limit only from RabbitMQ 4.0 on, and the broker is "
                f"{_dotted(release)}: remove it"
            )
        if release >= (4, 3) and "x-queue-master-locator" in arguments:
            found.append(
                "x-queue-master-locator is deprecated, and RabbitMQ 4.3 does not permit it by default: use "
                "x-queue-leader-locator"
            )
        if release >= (4, 3) and arguments.get("x-queue-version") == 1:
            found.append("x-queue-version is 1, which RabbitMQ 4.3 and later do not support: remove it")
    return found


def _dotted(release: Release) -> str:
    return ".".join(map(str, release))


def _integer(low: int, high: int | None = None, *, unit: str = "") -> _Check:
    span = f"from {low} to {high}" if high is not None else f"of {low} or more"
    wanted = f"a whole number {span}{unit}"

    def check(value: Argument) -> str | None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return None if whole and low <= int(value) and (high is None or int(value) <= high) else wanted

    return check


def _choice(*allowed: str) -> _Check:
    def check(value: Argument) -> str | None:
        return None if value in allowed else "one of " + ", ".join(map(repr, allowed))

    return check


def _text(value: Argument) -> str | None:
    return None if isinstance(value, str) else "a text"


def _some_text(value: Argument) -> str | None:
    return None if isinstance(value, str) and value else "a text that is not empty"


def _key(value: Argument) -> str | None:
    if isinstance(value, str) and len(value.encode(errors="replace")) <= 255:
        return None
    return "a text of at most 255 bytes"


def _flag(value: Argument) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _any_integer(value: Argument) -> str | None:
    return None if isinstance(value, int) and not isinstance(value, bool) else "a whole number"


def _age(value: Argument) -> str | None:
    if isinstance(value, str) and re.fullmatch("0*[1-9][0-9]*[YMDhms]", value):
        return None
    return "a positive number with one of the units Y, M, D, h, m, s, such as '7D'"


def _accepted_by(*types: str, since: Release = (3, 10)) -> dict[str, Release]:
    return dict.fromkeys(types, since)


_ALL: Final = _accepted_by(*QUEUE_TYPES)
_CLASSIC: Final = _accepted_by("classic")
_QUORUM: Final = _accepted_by("quorum")
_QUEUES: Final = _accepted_by("classic", "quorum")
_STREAM: Final = _accepted_by("stream")
_QUORUM_4_3: Final = _accepted_by("quorum", since=(4, 3))
_MILLISECONDS: Final = _integer(0, unit=" (milliseconds)")
_POSITIVE_MILLISECONDS: Final = _integer(1, unit=" (milliseconds)")

RULES: Final[Mapping[str, _Rule]] = {
    "x-queue-type": _Rule(_choice(*QUEUE_TYPES), _ALL),
    "x-expires": _Rule(_integer(1, MAX_TTL_MS, unit=" (milliseconds; 10 years)"), _QUEUES),
    "x-message-ttl": _Rule(_integer(0, MAX_TTL_MS, unit=" (milliseconds; 10 years)"), _QUEUES),
    "x-dead-letter-exchange": _Rule(_text, _QUEUES),
    "x-dead-letter-routing-key": _Rule(_key, _QUEUES),
    "x-dead-letter-strategy": _Rule(_choice("at-most-once", "at-least-once"), _QUORUM),
    "x-max-length": _Rule(_integer(0), _QUEUES),
    "x-max-length-bytes": _Rule(_integer(0, unit=" (bytes)"), _ALL),
    "x-max-in-memory-length": _Rule(_integer(0), _QUORUM),
    "x-max-in-memory-bytes": _Rule(_integer(0, unit=" (bytes)"), _QUORUM),
    "x-max-priority": _Rule(_integer(1, 255), _CLASSIC),
    "x-overflow": _Rule(_choice("drop-head", "reject-publish", "reject-publish-dlx"), _QUEUES),
    "x-queue-mode": _Rule(_choice("default", "lazy"), _CLASSIC),
    "x-queue-version": _Rule(_integer(1, 2), _CLASSIC),
    "x-queue-master-locator": _Rule(_choice("client-local", "random", "min-masters"), _CLASSIC),
    "x-queue-leader-locator": _Rule(
        _choice("client-local", "balanced", "random", "least-leaders"),
        {"quorum": (3, 10), "stream": (3, 10), "classic": (4, 0)},
    ),
    "x-single-active-consumer": _Rule(_flag, _QUEUES),
    "x-quorum-initial-group-size": _Rule(_integer(1), _QUORUM),
    "x-delivery-limit": _Rule(_any_integer, _QUORUM),
    "x-delayed-retry-type": _Rule(_choice("disabled", "all", "failed", "returned"), _QUORUM_4_3),
    "x-delayed-retry-min": _Rule(_POSITIVE_MILLISECONDS, _QUORUM_4_3),
    "x-delayed-retry-max": _Rule(_POSITIVE_MILLISECONDS, _QUORUM_4_3),
    "x-consumer-disconnected-timeout": _Rule(_MILLISECONDS, _QUORUM_4_3),
    "x-consumer-timeout": _Rule(_MILLISECONDS, _QUORUM_4_3),
    "x-member-placement-tag": _Rule(_some_text, _QUORUM_4_3),
    "x-max-age": _Rule(_age, _STREAM),
    "x-stream-max-segment-size-bytes": _Rule(_integer(0, 3_000_000_000, unit=" (bytes)"), _STREAM),
    "x-stream-filter-size-bytes": _Rule(_integer(16, 255, unit=" (bytes)"), _accepted_by("stream", since=(3, 13))),
    "x-initial-cluster-size": _Rule(_integer(1), _STREAM),
}
"""All arguments that any release knows, by name."""
