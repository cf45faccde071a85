"""The buckets of a consistent-hash exchange, as RabbitMQ's plugin computes them.

The plugin hashes the key with Erlang's ``phash2``, seeds Erlang's random generator ``exs1024`` with the hash, and jumps
from bucket to bucket by the generator's numbers (the jump consistent hash of Lamping and Veach). This module computes
the same buckets. It was compared with Erlang, and the tests compare it with brokers of 3.10 and 4.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

_MASK_32: Final = (1 << 32) - 1
_MASK_64: Final = (1 << 64) - 1
_MASK_21: Final = (1 << 21) - 1
_HASH_RANGE: Final = 1 << 27
_GOLDEN: Final = 0x9E3779B9
_BINARY: Final = _GOLDEN * 13 & _MASK_32
"""The initial value of the hash of a binary."""

_EMPTY: Final = 13_708_901
_UNDEFINED: Final = 45_914_356
"""``phash2`` of the empty binary and of the atom ``undefined``, which are special cases."""


def phash2(text: str | None) -> int:
    """``erlang:phash2`` of a text as a binary; None is the atom ``undefined``, used for a missing header."""
    if text is None:
        return _UNDEFINED
    data = text.encode()
    if not data:
        return _EMPTY
    a = b = _GOLDEN
    c = _BINARY
    whole = len(data) - len(data) % 12
    for index in range(0, whole, 12):
        a, b, c = _mix(a + _word(data, index), b + _word(data, index + 4), c + _word(data, index + 8))
    rest = data[whole:]
    # The lowest byte of the last word is the length.
    c += len(data) + (int.from_bytes(rest[8:], "little") << 8)
    _, _, c = _mix(a + _word(rest, 0), b + _word(rest, 4), c)
    return c % _HASH_RANGE


def _word(data: bytes, index: int) -> int:
    return int.from_bytes(data[index : index + 4], "little")


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    """The mixing step of Bob Jenkins's hash."""
    for first, second, third in ((13, 8, 13), (12, 16, 5), (3, 10, 15)):
        a = (a - b - c) & _MASK_32 ^ (c & _MASK_32) >> first
        b = (b - c - a) & _MASK_32 ^ a << second & _MASK_32
        c = (c - a - b) & _MASK_32 ^ b >> third
    return a, b, c


def _uniform(seed: int) -> Iterator[float]:
    """The random numbers of ``exs1024`` after ``rand:seed_s(exs1024, {Seed, Seed, Seed})``, from 0 to 1."""
    low = (seed & _MASK_21) + 1
    first, second, third = (low * factor & _MASK_21 for factor in (2_097_131, 2_097_133, 2_097_143))
    x = first << 43 | second << 22 | third << 1 | 1
    state: list[int] = []
    for _ in range(16):
        x ^= x >> 12
        x ^= x << 25 & _MASK_64
        x ^= x >> 27
        state.insert(0, x * 2_685_821_657_736_338_717 & _MASK_64)
    index = 0
    while True:
        here, after = state[index], state[(index + 1) % 16]
        after ^= after << 31 & _MASK_64
        after ^= after >> 11
        here ^= here >> 30
        index = (index + 1) % 16
        state[index] = here ^ after
        yield ((state[index] * 1_181_783_497_276_652_981 & _MASK_64) >> 11) * 2.0**-53


@lru_cache(maxsize=4096)
def bucket(key: str | None, buckets: int) -> int:
    """The bucket that the exchange chooses for a key, from 0 to ``buckets`` - 1.

    Args:
        key: the routing key, or the hashed header; None if the message does not have that header.
        buckets: number of buckets, the sum of the weights of all bindings.
    """
    if buckets == 1:
        return 0
    chosen, following = -1, 0
    numbers = _uniform(phash2(key))
    while following < buckets:
        chosen = following
        following = int((chosen + 1) / next(numbers))
    return chosen
