"""Exponential backoff with jitter."""

from __future__ import annotations

import random


class Backoff:
    """Pauses between attempts: doubled each time, and randomised so that clients do not retry in step.

    Args:
        first: seconds of the first pause, before it is randomised.
        longest: seconds of the longest pause, before it is randomised.
    """

    def __init__(self, first: float, longest: float) -> None:
        self._first = self._next = first
        self._longest = longest

    def next(self) -> float:
        """Seconds to wait before the next attempt: a random share of the pause, from half of it to all of it."""
        pause = self._next
        self._next = min(pause * 2, self._longest)
        return pause * random.uniform(0.5, 1.0)  # noqa: S311 (no secret)

    def limit(self, seconds: float) -> None:
        """Make the next pause at most this long."""
        self._next = min(self._next, seconds)

    def reset(self) -> None:
        """Start again with the first pause. Call this after a success."""
        self._next = self._first
