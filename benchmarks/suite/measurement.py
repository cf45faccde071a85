"""A measurement: the compared cases and their size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from bide.errors import InvalidInputError
from bide.runtime.arguments import whole_number

DEFAULT_PREFETCH: Final = 1000
"""Dead-letter prefetch of the private broker, see :func:`bide.local_broker.configuration.advanced_config`."""

SMALLEST: Final = 0.1
"""The smallest scale whose ratios mean something: below it delays are shortened too, which favours cascades."""

LARGEST: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How large, and how often.

    Args:
        scale: of the full size, over 0 up to 10. Durations and numbers of messages shrink with it. Above 1, only
            numbers of messages grow.
        rounds: how often every case is measured.

    Raises:
        InvalidInputError: a value is out of range.
    """

    scale: float = 1.0
    rounds: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.scale <= LARGEST:
            raise InvalidInputError(f"the scale {self.scale:g} is out of range: give more than 0 and at most {LARGEST}")
        whole_number("rounds", self.rounds, 1, 100)

    def seconds(self, full: float, *, least: float = 0.2) -> float:
        """A duration of this size."""
        return max(full * min(self.scale, 1), least)

    def count(self, full: int, *, least: int = 100) -> int:
        """A number of this size."""
        return max(round(full * self.scale), least)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One contestant in one setting.

    Attributes:
        name: the contestant, such as ``aio-pika``.
        setting: what several contestants are compared in, such as ``200 B``; empty where there is one alone.
        work: the function that measures it, see :class:`benchmarks.suite.task.Job`.
        options: its arguments.
        rival: the package that it needs, where that is not bide's own.
        dead_letter_prefetch: of the broker, where every run has a fresh one.
        timeout: seconds after which it is given up.
        unless_failed: a setting: this one is left out where the contestant did not sustain that one.
    """

    name: str
    setting: str = ""
    work: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rival: str | None = None
    dead_letter_prefetch: int = DEFAULT_PREFETCH
    timeout: float = 600.0
    unless_failed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Cases that are measured and compared together.

    Attributes:
        name: as it is asked for.
        title: over its table.
        about: how it is done; a paragraph in Markdown.
        cases: for a plan.
        most_rounds: where fewer rounds than asked for are enough.
        broker: ``shared`` by all cases; ``fresh`` for every run, for what leaves a broker with work to do; ``own``
            where the work starts one itself.
    """

    name: str
    title: str
    about: str
    cases: Callable[[Plan], Sequence[Case]]
    most_rounds: int | None = None
    broker: Literal["shared", "fresh", "own"] = "shared"
