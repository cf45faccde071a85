"""Spark's hashes of a row, which decide its part and the checksum, computed with numpy.

They are the SQL functions ``hash`` and ``xxhash64``: Murmur3_x86_32 and XXH64 with the seed 42 (``Murmur3_x86_32.java``
and ``XXH64.java`` in Spark's sources). Only digests are hashed. A digest has 32 ASCII characters, which are four words
of eight bytes, or eight words of four bytes, so the steps for other lengths are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_SEED: Final = 42
_LENGTH: Final = 32

_P1, _P2, _P3, _P4 = (
    np.uint64(one) for one in (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63)
)
"""Primes of XXH64."""


def checksum_of(digests: Sequence[str]) -> int:
    """``bit_xor(xxhash64(digest))`` over all digests, as a signed number; 0 without digests."""
    if not digests:
        return 0
    return int(np.bitwise_xor.reduce(_xxhash64(_words(digests, "<u8"))).astype(np.int64))


def parts_of(digests: Sequence[str], parts: int) -> list[int]:
    """``pmod(hash(digest), parts)`` of each digest."""
    if not digests:
        return []
    hashes = _murmur3(_words(digests, "<u4")).astype(np.int32).astype(np.int64)
    return (hashes % parts).tolist()  # type: ignore[no-any-return]  # numpy types the list as Any


def _words(digests: Sequence[str], kind: str) -> NDArray[Any]:
    data = np.frombuffer("".join(digests).encode("ascii"), dtype=kind)
    return data.reshape(len(digests), -1)


def _xxhash64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    seed = np.uint64(_SEED)
    with np.errstate(over="ignore"):
        starts = (seed + _P1 + _P2, seed + _P2, seed, seed - _P1)
        lanes = [_rotated_left(start + words[:, number] * _P2, 31) * _P1 for number, start in enumerate(starts)]
        found: Any = np.zeros(len(words), np.uint64)
        for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True):
            found += _rotated_left(lane, bits)
        for lane in lanes:
            found = (found ^ (_rotated_left(lane * _P2, 31) * _P1)) * _P1 + _P4
        found = found + np.uint64(_LENGTH)
        found ^= found >> np.uint64(33)
        found *= _P2
        found ^= found >> np.uint64(29)
        found *= _P3
        found ^= found >> np.uint64(32)
    return found  # type: ignore[no-any-return]  # Any, because numpy types shifts too narrowly


def _rotated_left(value: Any, bits: int) -> Any:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


def _murmur3(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    found: Any = np.full(len(words), _SEED, np.uint32)
    with np.errstate(over="ignore"):
        for number in range(words.shape[1]):
            mixed = _rotated_left32(words[:, number] * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
            found = _rotated_left32(found ^ mixed, 13) * np.uint32(5) + np.uint32(0xE6546B64)
        found ^= np.uint32(_LENGTH)
        found ^= found >> np.uint32(16)
        found *= np.uint32(0x85EBCA6B)
        found ^= found >> np.uint32(13)
        found *= np.uint32(0xC2B2AE35)
        found ^= found >> np.uint32(16)
    return found  # type: ignore[no-any-return]  # Any, because numpy types shifts too narrowly


def _rotated_left32(value: Any, bits: int) -> Any:
    return (value << np.uint32(bits)) | (value >> np.uint32(32 - bits))
