"""Conditions of a replay that need no Spark."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bide.pipelines.engine import NeedsSparkError
from bide.pipelines.replay.condition import TextCondition
from bide.pipelines.replay.small import due_times, spread
from bide.recoverability.failed import FailedMessage

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)


def message(**values: Any) -> FailedMessage:
    return FailedMessage.read("", "error", {"message_id": "m1", "type": "Order", **values}, b"")


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("message_id = 'm1'", True),
        ("message_id='m2'", False),
        ("message_id <> 'm2' AND Type != 'Bill'", True),
        ("message_id <> 'm1'", False),
        ("message_id in ('m0','m1')", True),
        ("message_id not in ( 'm0' , 'm1' )", False),
        ("type like 'Or%' and type like '%er' and type like 'O_der' and type like '%'", True),
        ("type like 'Ord' or type = 'Order'", None),
        ("type like 'Or_'", False),
        ("type LIKE 'order'", False),
        ("type not like 'Bill%'", True),
        ("type like 'O.*'", False),
        ("type <> 'Outer$Inner' and type not like '%$%'", True),
        # In SQL, no comparison with null is true.
        ("exception = 'E'", False),
        ("exception <> 'E'", False),
        ("exception not in ('E')", False),
        ("exception not like 'E%'", False),
    ],
)
def test_a_condition_holds_as_in_sql(where: str, expected: bool | None) -> None:
    if expected is None:
        with pytest.raises(NeedsSparkError, match="more than comparisons of columns with text"):
            TextCondition.parse(where)
    else:
        assert TextCondition.parse(where).holds(message()) is expected


def test_any_character_matches_an_underscore() -> None:
    for text in ("a\nb", "a😀b", "a_b", "a'b"):
        assert TextCondition.parse("type like 'a_b'").holds(message(type=text))
        assert TextCondition.parse("type like '%a%b'").holds(message(type=text))


def test_a_long_text_with_a_repeated_part_is_compared_in_linear_time() -> None:
    """With backtracking, this would take days, during which Ctrl-C has no effect."""
    for pattern, expected in (("%a%a%a%a%b", False), ("%a%a%a%a%b%", False), ("%a%_a%a%a", True)):
        assert TextCondition.parse(f"type like '{pattern}'").holds(message(type="a" * 20_000)) is expected


@pytest.mark.parametrize(
    "where",
    [
        "",
        "type",
        "type = ",
        "type = 'a",
        "type = 'a''b'",
        r"type = 'a\'b'",
        r"type like 'a\%'",
        # Spark replaces variables, also in text.
        "type = '${env:HOME}'",
        "type in ('a', 'b') and text like '%${spark.app.name}%'",
        'type = "a"',
        "type = 'a' and",
        "type = 'a' andtype = 'b'",
        "type = 'a' 'b'",
        "type = 'a'; drop table x",
        "type = 'a' -- comment",
        "(type = 'a')",
        "not type = 'a'",
        "exeption = 'a'",
        "typed = 'a'",
        "group = 'a'",
        "attempts = '3'",
        "body like 'a%'",
        "type is null",
        "type in ()",
        "typein ('a')",
        "typelike 'a'",
        "type notlike 'a'",
        "type = 'a' collate UNICODE",
        "type like 'a' escape '/'",
    ],
)
def test_any_other_condition_is_left_to_spark(where: str) -> None:
    with pytest.raises(NeedsSparkError, match="more than comparisons of columns with text"):
        TextCondition.parse(where)


def test_due_times_are_spread_evenly() -> None:
    found = spread(8, timedelta(seconds=4), begin=NOW)
    assert found == [int(NOW.timestamp() * 1e6) + 500_000 * place for place in range(8)]
    assert due_times(found, timedelta(seconds=1)) == [(NOW + timedelta(seconds=place), 2) for place in range(4)]
    assert spread(2, timedelta(0), begin=NOW) == [int(NOW.timestamp() * 1e6)] * 2
    assert spread(0, timedelta(hours=1), begin=NOW) == []
    assert due_times([], timedelta(seconds=1)) == []
