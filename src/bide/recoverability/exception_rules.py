"""Rules of a retry policy for classes of exceptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from bide.errors import InvalidInputError, UndecodableMessageError, UnknownMessageTypeError

Rule = Literal["never", "at_once", "later", "discard"]

NEVER_RETRIED: Final = (UndecodableMessageError, UnknownMessageTypeError)
"""Errors that a retry cannot fix: the message stays unreadable."""


@dataclass(frozen=True, slots=True)
class ExceptionRules:
    """A rule for each class of exceptions."""

    rules: Mapping[type[BaseException], Rule]

    @classmethod
    def make(cls, **given: Any) -> Self:
        """Build the rules from tuples of exception classes, passed under the name of their rule.

        Raises:
            InvalidInputError: a value is not an exception class, or has two rules.
        """
        rules: dict[type[BaseException], Rule] = {}
        for name, kinds in given.items():
            if isinstance(kinds, type) or not isinstance(kinds, tuple | list):
                raise InvalidInputError(f"{name}={kinds!r}: give a tuple of exception classes")
            for kind in kinds:
                if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                    raise InvalidInputError(f"{name} has {kind!r}, which is not an exception class")
                if kind in rules:
                    raise InvalidInputError(
                        f"{kind.__qualname__} is in both {rules[kind]} and {name}: an exception has one rule"
                    )
                rules[kind] = name  # type: ignore[assignment]  # checked above
        return cls({**dict.fromkeys(NEVER_RETRIED, "never"), **rules})

    def of(self, error: BaseException) -> Rule | None:
        """The rule of the most specific class of this exception, or None."""
        return next((self.rules[kind] for kind in type(error).__mro__ if kind in self.rules), None)
