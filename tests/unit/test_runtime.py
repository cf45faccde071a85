"""Backoff and bounded caches."""

from __future__ import annotations

from bide.runtime.backoff import Backoff
from bide.runtime.bounded_cache import BoundedCache


def test_pauses_grow_to_the_longest_and_differ() -> None:
    backoffs = [Backoff(0.1, 1.0) for _ in range(200)]
    for whole in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        pauses = [one.next() for one in backoffs]
        assert all(whole / 2 <= pause <= whole for pause in pauses)
        assert len(set(pauses)) > 100


def test_a_reset_starts_again_with_the_first_pause() -> None:
    backoff = Backoff(0.1, 1.0)
    for _ in range(5):
        backoff.next()
    backoff.reset()
    assert backoff.next() <= 0.1


def test_the_next_pause_can_be_limited() -> None:
    backoff = Backoff(0.1, 10.0)
    for _ in range(6):
        backoff.next()
    backoff.limit(0.25)
    assert backoff.next() <= 0.25


def test_a_full_cache_evicts_only_the_oldest_entry() -> None:
    cache = BoundedCache[str, int](3)
    for number, key in enumerate("abcd"):
        cache[key] = number
    assert dict(cache) == {"b": 1, "c": 2, "d": 3}
    cache["b"] = 9
    assert dict(cache) == {"b": 9, "c": 2, "d": 3}
    cache["e"] = 5
    assert "b" not in cache
