"""The queues and exchanges that messages of other senders may be delivered to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Self

from bide.delay.protocol import QueueTarget, Target
from bide.errors import InvalidInputError, TargetNotAllowedError


@dataclass(frozen=True, slots=True)
class AllowedTargets:
    """An allow-list: patterns of the names of queues and exchanges.

    A process that delivers messages for their senders does so with its own permissions. RabbitMQ cannot tell that the
    sender may not write to the target, so the process needs a list of its own.

    Attributes:
        patterns: ``*`` stands for any text, ``?`` for one character, ``[ab]`` for one of these. ``q:`` or ``x:`` before
            a pattern restricts it to queues or exchanges.
    """

    patterns: tuple[str, ...]

    @classmethod
    def of(cls, patterns: Iterable[str]) -> Self:
        """Read patterns.

        Raises:
            InvalidInputError: a pattern is empty.
        """
        if isinstance(patterns, str):
            raise InvalidInputError(f"allow={patterns!r} is one text: give a list of patterns, such as [{patterns!r}]")
        given = tuple(patterns)
        for one in given:
            if one in ("", "q:", "x:"):
                raise InvalidInputError(
                    f"the allowed target {one!r} is not a pattern: give the name of a queue or exchange, "
                    "'orders.*' for all that start so, or '*' for any"
                )
        return cls(given)

    def allow(self, target: Target) -> bool:
        """Whether messages may go to this target."""
        kind, name = ("q:", target.queue) if isinstance(target, QueueTarget) else ("x:", target.exchange)
        for pattern in self.patterns:
            restricted = pattern.startswith(("q:", "x:"))
            if (pattern.startswith(kind) or not restricted) and fnmatchcase(
                name, pattern[2:] if restricted else pattern
            ):
                return True
        return False

    def check(self, target: Target) -> None:
        """Refuse a target that no pattern matches.

        Raises:
            TargetNotAllowedError: none does.
        """
        if not self.allow(target):
            raise TargetNotAllowedError(
                f"the target {str(target)!r} is not among the allowed ones ({', '.join(self.patterns) or 'none'}): "
                "allow it with --allow, or with allow=[...] in Python, if its senders may write there"
            )


ANY_TARGET = AllowedTargets(("*",))
"""Allow every queue and exchange."""
