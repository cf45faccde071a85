"""The buckets of a consistent hash exchange, compared with values from Erlang."""

from __future__ import annotations

import pytest

from bide.errors import UnsupportedTargetError
from bide.topology import Binding, Exchange
from bide.topology.consistent_hash import bucket, phash2
from bide.topology.exchange_types import RoutedMessage, binding_table

HASHES = {
    "": 13_708_901,
    "a": 112_802_447,
    "abc": 98_228_475,
    "order.created": 41_994_547,
    "123456789012": 40_293_642,
    "1234567890123": 94_740_708,
    "hello world hello world": 36_293_578,
    None: 45_914_356,
}
"""``erlang:phash2`` of these, as Erlang 25 prints it; None is ``undefined``."""

BUCKETS = {
    "a": [1, 1, 6, 6, 47],
    "b": [1, 1, 1, 1, 13],
    "order.created": [0, 0, 0, 0, 0],
    "customer-17": [1, 2, 2, 2, 43],
    "1": [1, 2, 2, 8, 33],
    "3": [0, 2, 2, 2, 10],
    "": [0, 0, 6, 9, 45],
}
"""For 2, 3, 7, 10 and 50 buckets: what the plugin's function gives when Erlang runs it."""


@pytest.mark.parametrize(("key", "value"), HASHES.items())
def test_phash2_equals_that_of_erlang(key: str | None, value: int) -> None:
    assert phash2(key) == value


@pytest.mark.parametrize(("key", "expected"), BUCKETS.items())
def test_buckets_equal_those_of_rabbitmq(key: str, expected: list[int]) -> None:
    assert [bucket(key, number) for number in (2, 3, 7, 10, 50)] == expected
    assert bucket(key, 1) == 0


def test_few_keys_move_when_a_bucket_is_added() -> None:
    keys = [f"customer-{number}" for number in range(2000)]
    moved = [key for key in keys if bucket(key, 10) != bucket(key, 11)]
    assert all(bucket(key, 11) == 10 for key in moved)
    assert len(moved) == pytest.approx(2000 / 11, rel=0.2)


def test_the_exchange_gives_each_message_to_one_queue() -> None:
    bindings = [Binding("x", "one", "1"), Binding("x", "two", "2"), Binding("x", "one", "5")]
    table = binding_table(Exchange("x", "x-consistent-hash"), bindings)
    for number in range(100):
        key = str(number)
        expected = "one" if bucket(key, 3) == 0 else "two"
        assert list(table.matches(RoutedMessage((key, "other"), {}))) == [("queue", expected)]
    assert not binding_table(Exchange("x", "x-consistent-hash"), []).matches(RoutedMessage(("a",), {}))


def test_the_exchange_hashes_the_header_of_its_hash_header_argument() -> None:
    exchange = Exchange("x", "x-consistent-hash", arguments={"hash-header": "h"})
    table = binding_table(exchange, [Binding("x", f"q{number}", "1") for number in range(3)])
    (found,) = table.matches(RoutedMessage(("key",), {"h": "a"}))
    assert found == ("queue", f"q{bucket('a', 3)}")
    (found,) = table.matches(RoutedMessage(("key",), {}))
    assert found == ("queue", f"q{bucket(None, 3)}")
    with pytest.raises(UnsupportedTargetError, match="which is 7, but the model supports only text"):
        table.matches(RoutedMessage(("key",), {"h": 7}))
