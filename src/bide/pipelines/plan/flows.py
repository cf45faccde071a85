"""Flows of messages: a workload described by rates, delays and sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from bide.durations import MILLISECOND, parse_delay, parse_due_time, to_milliseconds
from bide.errors import InvalidInputError

MAX_POINTS: Final = 20_000
"""The largest number of delays that stand for a range of delays."""

_POINT_SPACING: Final = 10
_RATE: Final = re.compile(
    r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*(?:/|per)\s*(s|min|m|h|d|second|minute|hour|day)\s*"
)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_KEYS: Final = frozenset({"rate", "delay", "size", "start", "for", "profile"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Messages sent at an even rate, or at one that follows the hours of a day.

    Attributes:
        rate: messages per second, averaged over a day.
        shortest: the shortest delay in milliseconds.
        longest: the longest delay in milliseconds. Delays between the two are equally likely, in steps of 10 ms, or in
            larger steps if there would be more than :data:`MAX_POINTS`.
        size: the size of a body in bytes.
        first: the start of the flow, in milliseconds since the Unix epoch.
        length: the length of the flow, in milliseconds.
        profile: weights of equal parts of a day in UTC, for example 24, one for each hour; the mean weight stands for
            *rate*.
    """

    rate: float
    shortest: int
    longest: int
    size: int
    first: int
    length: int
    profile: tuple[float, ...] = (1.0,)

    @property
    def points(self) -> int:
        """The number of delays that represent the range."""
        return min((self.longest - self.shortest) // _POINT_SPACING + 1, MAX_POINTS)

    @property
    def messages(self) -> float:
        """The number of messages."""
        found, rate, since = 0.0, 0.0, self.first
        for at, change in self.changes():
            found += rate * (at - since) / 1000
            rate, since = rate + change, at
        return found

    @property
    def undelayed(self) -> float:
        """The number of messages without a delay."""
        return self.messages / self.points if not self.shortest else 0.0

    def changes(self) -> list[tuple[int, float]]:
        """The changes of the rate: time in milliseconds since the Unix epoch, and change in messages per second."""
        part = 86_400_000 / len(self.profile)
        mean = sum(self.profile) / len(self.profile)
        end, at, before = self.first + self.length, self.first, 0.0
        found = []
        number = int(at % 86_400_000 // part)
        while at < end:
            now = self.rate * self.profile[number % len(self.profile)] / mean
            if now != before:
                found.append((at, now - before))
            before = now
            number += 1
            at = self.first // 86_400_000 * 86_400_000 + round(number * part)
        if before:
            found.append((end, -before))
        return found


def parse_rate(text: str | float) -> float:
    """Parse a rate such as ``5000/s``, ``1e9/d``, ``1,000,000 per hour``, or a number per second.

    Raises:
        InvalidInputError: the rate is invalid or negative.
    """
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise InvalidInputError(f"{text!r} is not a rate: give one such as '5000/s' or '1e9/d'")
    if not isinstance(text, str):
        if text < 0:
            raise InvalidInputError(f"the rate {text} is negative: give zero or more")
        return float(text)
    found = _RATE.fullmatch(text)
    if found is None:
        raise InvalidInputError(f"the rate {text!r} is invalid: give one such as '5000/s' or '1e9/d'")
    return float(re.sub("[_,]", "", found[1])) / _SECONDS[found[2][0]]


def flows_of(
    specification: Sequence[Mapping[str, Any]],
    *,
    start: datetime = datetime(2000, 1, 1, tzinfo=UTC),
    length: timedelta = timedelta(days=1),
    size: int = 200,
) -> list[Flow]:
    """Convert the flows of a parsed TOML or JSON file.

    A flow of the file is a table with ``rate`` and ``delay``, and optionally with ``size``, ``start``, ``for`` and
    ``profile``. Its ``delay`` is a delay (``5m``), a range (``1h..2h``), or a table of these with weights. Such a
    table becomes several flows, one for each entry.

    Args:
        start: the start of flows without ``start``.
        length: the length of flows without ``for``.
        size: the size of bodies of flows without ``size``, in bytes.

    Raises:
        InvalidInputError: a key is missing or unknown, or a value is invalid.
    """
    found: list[Flow] = []
    for number, one in enumerate(specification, 1):
        where = f"flow {number}"
        if not isinstance(one, Mapping):
            raise InvalidInputError(f"{where} is {one!r}: give a table with rate and delay")
        if unknown := sorted(set(one) - _KEYS):
            raise InvalidInputError(
                f"{where} has unknown keys, {', '.join(unknown)}: choose from {', '.join(sorted(_KEYS))}"
            )
        if missing := sorted({"rate", "delay"} - set(one)):
            raise InvalidInputError(f"{where} has no {' and no '.join(missing)}: give both rate and delay")
        delays = _delays(where, one["delay"])
        weights = [_weight(where, value) for value in delays.values()]
        if not sum(weights):
            raise InvalidInputError(f"{where} has delays whose weights are all zero: give at least one above zero")
        span = parse_delay(one["for"]) if "for" in one else length
        for text, weight in zip(delays, weights, strict=True):
            shortest, longest = delay_range(text)
            found.append(
                Flow(
                    rate=parse_rate(one["rate"]) * weight / sum(weights),
                    shortest=shortest,
                    longest=longest,
                    size=_size(where, one.get("size", size)),
                    first=to_milliseconds(parse_due_time(one["start"]) if "start" in one else start),
                    length=span // MILLISECOND,
                    profile=_profile(where, one.get("profile", [1])),
                )
            )
    return found


def delay_range(text: str) -> tuple[int, int]:
    """Parse ``5m`` or ``1h..2h`` to the shortest and the longest delay, in milliseconds.

    Raises:
        InvalidInputError: a delay is invalid, or the second delay is shorter than the first.
    """
    first, dots, last = str(text).partition("..")
    shortest = parse_delay(first)
    longest = parse_delay(last) if dots else shortest
    if longest < shortest:
        raise InvalidInputError(f"the second delay of {text!r} is shorter than the first: give the shorter one first")
    return -(-shortest // MILLISECOND), -(-longest // MILLISECOND)


def _delays(where: str, value: Any) -> Mapping[str, Any]:
    """The delays and ranges of delays of a flow, each with its weight."""
    delays = value if isinstance(value, Mapping) else {value: 1} if isinstance(value, str) else {}
    if not delays or not all(isinstance(one, str) for one in delays):
        raise InvalidInputError(
            f"{where} has the delay {value!r}: give a delay such as '5m', a range such as '1h..2h', or a table of "
            "these with weights"
        )
    return delays


def _weight(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise InvalidInputError(f"{where} has a weight of {value!r}: give a number, zero or more")
    return float(value)


def _size(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidInputError(f"{where} has the size {value!r}: give the bytes of a body, zero or more")
    return value


def _profile(where: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= 1440:
        raise InvalidInputError(
            f"{where} has the profile {value!r}: give a list of 1 to 1,440 weights, such as 24 for the hours of a day"
        )
    weights = tuple(_weight(where, one) for one in value)
    if not sum(weights):
        raise InvalidInputError(f"{where} has a profile whose weights are all zero: give at least one above zero")
    return weights
