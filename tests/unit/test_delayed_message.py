from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.errors import InvalidDelayError, InvalidInputError
from bide.messaging.delayed_message import delay_of


@pytest.mark.parametrize(
    ("value", "milliseconds"),
    [
        (1500, 1500),
        ("1500", 1500),
        (1500.0, 1500),
        (1500.5, 1500.5),
        ("1500.5", 1500.5),
        (0.25, 0.25),
        (" 20 ", 20),
        (5_000_000_000, 5_000_000_000),  # beyond what the plugin holds
    ],
)
def test_x_delay_can_be_a_number_or_numeric_text(value: object, milliseconds: float) -> None:
    assert delay_of({"x-delay": value}) == timedelta(milliseconds=milliseconds)


@pytest.mark.parametrize("value", [0, -1, "-1500", 0.0, "0", None])
def test_without_a_positive_x_delay_there_is_no_delay(value: object) -> None:
    assert delay_of({"x-delay": value}) is None
    assert delay_of(None) is None
    assert delay_of({}) is None


@pytest.mark.parametrize(
    "value", ["soon", "", True, b"5", [5], float("nan"), float("inf"), "1e999", 10**30, "5s", "1_000", "١٥"]
)
def test_an_x_delay_that_is_not_a_number_is_refused(value: object) -> None:
    with pytest.raises(InvalidDelayError, match="x-delay"):
        delay_of({"x-delay": value})


def test_headers_that_are_not_a_mapping_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="of type list: give a mapping"):
        delay_of([("x-delay", 5)])  # type: ignore[arg-type]  # wrong on purpose


@given(st.integers(min_value=1, max_value=10**10), st.sampled_from([int, str, float]))
def test_a_delay_is_never_shorter_than_x_delay(milliseconds: int, form: type) -> None:
    wait = delay_of({"x-delay": form(milliseconds)})
    assert wait is not None
    assert wait >= timedelta(milliseconds=milliseconds)
