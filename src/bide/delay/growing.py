"""Delay infrastructures that grow with use, and the digits whose queues exist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from bide.delay.clock_digits import Digit, Level

if TYPE_CHECKING:
    from bide.topology import Exchange, Topology

Keys = list[list[bytes | None]]
"""The encoded keys by level and digit; None for a digit whose queues and bindings are not known to exist."""


class Growing(Protocol):
    """The growing part of an infrastructure: first its core is declared, then each queue when a message needs it."""

    @property
    def complete_mark(self) -> Exchange:
        """The exchange that ``bide delay apply`` declares last: if it exists, the whole topology was declared."""

    @property
    def digit_levels(self) -> Sequence[Level]:
        """The levels, highest first."""

    def digit_key(self, digit: Digit) -> str:
        """The key that leads to the queue of a digit."""

    def core_topology(self) -> Topology:
        """The part that is declared first."""

    def digit_topology(self, digits: Iterable[Digit]) -> Topology:
        """The queues of these digits, and their bindings."""

    def has_core_bindings(self, padding: str) -> bool:
        """Whether the core topology binds the digit 0 of every level with this padding."""


class ReadyDigits:
    """The digits whose queues and bindings exist, with their keys.

    Args:
        encode: encodes a key.
    """

    def __init__(self, growing: Growing, encode: Callable[[str], bytes]) -> None:
        self._growing = growing
        self._encode = encode
        self._index = {level.letter: index for index, level in enumerate(growing.digit_levels)}
        self._keys: dict[tuple[str, int], Keys] = {}

    def keys(self, padding: str, lane: int) -> Keys:
        """The keys of the digits that are ready. :meth:`add` and :meth:`reset` change the lists in place."""
        keys = self._keys.get((padding, lane))
        if keys is None:
            keys = [[None] * (level.highest + 1) for level in self._growing.digit_levels]
            self._keys[padding, lane] = keys
            self._add_zeros(padding, keys)
        return keys

    def has(self, digits: Iterable[Digit]) -> bool:
        """Whether all of these digits are ready."""
        return not self.missing(digits)

    def missing(self, digits: Iterable[Digit]) -> list[Digit]:
        """The digits that are not ready."""
        return [
            one for one in digits if self.keys(one.padding, one.lane)[self._index[one.level.letter]][one.value] is None
        ]

    def add(self, digit: Digit) -> None:
        """Mark a digit as ready."""
        key, index = self._encode(self._growing.digit_key(digit)), self._index[digit.level.letter]
        self.keys(digit.padding, digit.lane)[index][digit.value] = key
        if not digit.value:
            # The digit 0 has no queue, and so no lanes.
            for (padding, _), keys in self._keys.items():
                if padding == digit.padding:
                    keys[index][0] = key

    def reset(self) -> None:
        """Mark all digits as not ready, except those that the core topology covers."""
        for (padding, _), keys in self._keys.items():
            for level in keys:
                level[:] = [None] * len(level)
            self._add_zeros(padding, keys)

    def _add_zeros(self, padding: str, keys: Keys) -> None:
        if self._growing.has_core_bindings(padding):
            for level, digit_keys in zip(self._growing.digit_levels, keys, strict=True):
                digit_keys[0] = self._encode(self._growing.digit_key(Digit(level, 0, padding=padding)))
