"""Headers as JSON that keeps their types."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.errors import InvalidInputError
from bide.spark.typed_headers import headers_from_json, headers_to_json

NAMES = st.text(max_size=5) | st.sampled_from(["$bytes", "$table", "$other"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.datetimes(timezones=st.just(UTC))
    | st.decimals(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=10,
)


def kinds(value: Any) -> Any:
    """The value with the types in it, since 1 equals 1.0 and True."""
    if isinstance(value, list):
        return [kinds(one) for one in value]
    if isinstance(value, dict):
        return {name: kinds(one) for name, one in value.items()}
    return type(value), value


@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_headers_come_back_with_their_types(headers: dict[str, Any]) -> None:
    assert kinds(headers_from_json(headers_to_json(headers))) == kinds(headers)


def test_the_form_is_as_documented() -> None:
    headers = {
        "text": "ä",
        "whole": 2,
        "fraction": 2.0,
        "flag": True,
        "nothing": None,
        "bytes": b"\xff\x00",
        "time": datetime(2026, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))),
        "decimal": Decimal("1.50"),
        "list": [1, b"a"],
        "table": {"a": {"$b": 1}},
        "inf": math.inf,
    }
    assert headers_to_json(headers) == (
        '{"text":"ä","whole":2,"fraction":2.0,"flag":true,"nothing":null,"bytes":{"$bytes":"/wA="},'
        '"time":{"$time":"2026-01-01T00:00:00Z"},"decimal":{"$decimal":"1.50"},"list":[1,{"$bytes":"YQ=="}],'
        '"table":{"a":{"$table":{"$b":1}}},"inf":{"$number":"inf"}}'
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "are not JSON"),
        ('{"a":NaN}', "are not JSON"),
        ("[1]", "not an object"),
        ('{"a":{"$bytes":"!"}}', r"the header 'a' is \{\"\$bytes\": \"!\"\}: give \$bytes with Base64"),
        ('{"a":[{"$time":"2026-01-01"}]}', "the header 'a' is"),
        ('{"a":{"$time":5}}', "the header 'a' is"),
        ('{"a":{"$decimal":"x"}}', "the header 'a' is"),
        ('{"a":{"$number":"1"}}', "the header 'a' is"),
        ('{"a":{"$unknown":"1"}}', "the header 'a' is"),
        ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON|nested too deeply"),
    ],
    ids=range(10),
)
def test_another_form_is_refused_with_the_name_of_the_header(text: str, expected: str) -> None:
    with pytest.raises(InvalidInputError, match=expected):
        headers_from_json(text)
