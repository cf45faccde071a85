"""Routing keys of ``Celery`` and of kombu, equal for all delays and keys."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kombu.transport import native_delayed_delivery

from bide.delay.cascade_keys import original_key
from bide.delay.celery import Celery
from bide.delay.protocol import ExchangeTarget, QueueTarget
from bide.errors import InvalidDelayError
from tests.cascade_keys import split_key

# Only part of kombu has type annotations.
kombu_key: Any = native_delayed_delivery.calculate_routing_key

LAYOUT = Celery()
MAXIMUM = 2**28 - 1

delays = st.integers(min_value=1, max_value=MAXIMUM) | st.integers(min_value=0, max_value=27).map(lambda bit: 1 << bit)
names = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="~"), min_size=1, max_size=20
)
# A key that starts with 28 digits of its own is to kombu one that was delayed before.
keys = names.filter(lambda key: original_key(key) == key)


@given(delays, keys)
@example(1, "order.created")
@example(MAXIMUM, "order.created")
@example(5, "1.0.1.order")
@example(5, ".")
def test_cascade_keys_equal_those_of_kombu(delay: int, key: str) -> None:
    made = kombu_key(delay, key)
    assert LAYOUT.cascade.key(delay, key) == made
    assert split_key(made) == (delay, key)
    assert original_key(made) == key


@given(delays, names, keys)
def test_route_keys_equal_those_of_kombu_for_the_target(delay: int, name: str, key: str) -> None:
    to_exchange = LAYOUT.route(timedelta(seconds=delay), ExchangeTarget(name, key)).routing_key
    to_queue = LAYOUT.route(timedelta(seconds=delay), QueueTarget(name)).routing_key
    assert to_exchange == kombu_key(delay, split_key(to_exchange)[1])
    assert to_queue == kombu_key(delay, split_key(to_queue)[1])
    assert (original_key(to_exchange), original_key(to_queue)) == (key, name)


@given(delays, delays, names, keys)
def test_a_retry_by_celery_has_the_key_that_bide_would_use(delay: int, countdown: int, name: str, key: str) -> None:
    """Celery's retry delays a message anew under the key that it came with: the digits do not pile up."""
    came_with = LAYOUT.route(timedelta(seconds=delay), QueueTarget(name)).routing_key
    again = LAYOUT.route(timedelta(seconds=countdown), QueueTarget(name)).routing_key
    assert kombu_key(countdown, came_with) == again
    # Through a release queue it came with its own key, which is the one that workers bind.
    assert kombu_key(countdown, key) == LAYOUT.cascade.key(countdown, key)


@given(st.timedeltas(min_value=timedelta(microseconds=1), max_value=timedelta(seconds=MAXIMUM)))
def test_fractions_of_a_second_are_rounded_up(delay: timedelta) -> None:
    """Where Celery cuts them off, and is up to a second early."""
    whole = -(-delay // timedelta(seconds=1))
    assert split_key(LAYOUT.route(delay, QueueTarget("orders")).routing_key)[0] == whole
    assert LAYOUT.cascade.key(whole, "orders") == kombu_key(whole, "orders")


def test_delays_for_which_kombu_makes_a_key_of_29_digits_are_refused() -> None:
    digits = kombu_key(MAXIMUM + 1, "orders").removesuffix(".orders").split(".")
    assert len(digits) == 29
    with pytest.raises(InvalidDelayError):
        LAYOUT.route(timedelta(seconds=MAXIMUM + 1), QueueTarget("orders"))
