"""Allow-lists of queues and exchanges for messages of other senders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Self

from bide.delay.protocol import QueueTarget, Target
from bide.delay.recognition import refuse_target, refuse_target_exchange
from bide.errors import InvalidInputError, TargetNotAllowedError


@dataclass(frozen=True, slots=True)
class AllowedTargets:
    """An allow-list: patterns for the names of queues and exchanges.

    A process that delivers messages on behalf of their senders uses its own permissions. RabbitMQ does not check
    whether the sender may write to the target, so the process needs its own list.

    Attributes:
        patterns: ``*`` matches any text, ``?`` one character, ``[ab]`` one of these characters. A pattern with the
            prefix ``q:`` or ``x:`` matches only queues or only exchanges.
    """

    patterns: tuple[str, ...]

    @classmethod
    def of(cls, patterns: Iterable[str]) -> Self:
        """Parse patterns.

        Raises:
            InvalidInputError: a pattern is empty or not text, or the patterns are not a list.
        """
        if isinstance(patterns, str):
            raise InvalidInputError(f"allow={patterns!r} is a string: give a list of patterns, such as [{patterns!r}]")
        given: Any = patterns  # callers without a type checker give anything
        if not isinstance(given, Iterable):
            kind = type(given).__name__
            raise InvalidInputError(f"allow={given!r} is of type {kind}: give a list of patterns, such as ['*']")
        given = tuple(given)
        for one in given:
            if not isinstance(one, str) or one in ("", "q:", "x:"):
                raise InvalidInputError(
                    f"the allowed target {one!r} is not a pattern: give the name of a queue or exchange, "
                    "'orders.*' for all names with that start, or '*' for any"
                )
        return cls(given)

    def allow(self, target: Target) -> bool:
        """Whether messages may be delivered to this target."""
        kind, name = ("q:", target.queue) if isinstance(target, QueueTarget) else ("x:", target.exchange)
        for pattern in self.patterns:
            restricted = pattern.startswith(("q:", "x:"))
            if (pattern.startswith(kind) or not restricted) and fnmatchcase(
                name, pattern[2:] if restricted else pattern
            ):
                return True
        return False

    def check(self, target: Target) -> None:
        """Refuse a target that is not on the list.

        Raises:
            TargetNotAllowedError: no pattern matches the target.
        """
        if not self.allow(target):
            raise TargetNotAllowedError(
                f"the target {str(target)!r} matches no allowed pattern ({', '.join(self.patterns) or 'none'}): "
                "allow it with allow=[...], if its senders may write there"
            )

    def check_delivery(self, target: Target) -> None:
        """Refuse targets that are not on the list, delay queues, and the exchanges of the schedule log.

        For a process that knows only the name of the target.

        Raises:
            TargetNotAllowedError: no pattern matches the target.
            DelayQueueError: the name of the target is one of a delay infrastructure or a schedule log.
        """
        self.check(target)
        if isinstance(target, QueueTarget):
            refuse_target(target.queue)
        else:
            refuse_target_exchange(target.exchange)


ANY_TARGET = AllowedTargets(("*",))
"""Allow every queue and exchange."""
