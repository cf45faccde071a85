"""Request ids of rows with keys: equal for equal rows, different for any others."""

from __future__ import annotations

from typing import Any

import pytest

from bide.schedules.names import PARTITIONS, partition_of
from bide.schedules.requests import AppliedNumbers, RequestId
from bide.spark.request_ids import CHUNK_ROWS, request_ids

KEYS = [f"k{number}" for number in range(2_500)]
BODIES = [b"%d" % number for number in range(2_500)]


def ids(
    *, keys: Any = KEYS, bodies: Any = BODIES, run: str = "w-0", first: int = 0, seed: str = ""
) -> list[str | None]:
    return request_ids({"value": bodies, "key": keys}, run=run, first=first, seed=seed)


def test_equal_rows_at_the_same_place_have_equal_ids() -> None:
    assert ids() == ids(keys=list(KEYS), bodies=list(BODIES))
    assert len({*ids()}) == 2_500


def test_each_chunk_and_partition_of_the_log_numbers_its_rows_without_gaps() -> None:
    numbers: dict[str, list[int]] = {}
    partitions: dict[str, set[int]] = {}
    for key, text in zip(KEYS, ids(), strict=True):
        request = RequestId.parse(text)
        numbers.setdefault(request.session, []).append(request.number)
        partitions.setdefault(request.session, set()).add(partition_of(key))
    assert all(found == list(range(1, len(found) + 1)) for found in numbers.values())
    assert all(len(found) == 1 for found in partitions.values())
    assert len(numbers) == 3 * PARTITIONS


@pytest.mark.parametrize(
    "other",
    [
        {"run": "w-1"},
        {"seed": "to another queue"},
        {"first": CHUNK_ROWS},
        {"bodies": [b"changed", *BODIES[1:]], "until": CHUNK_ROWS},
        {"keys": ["changed", *KEYS[1:]], "until": CHUNK_ROWS},
        {"keys": [KEYS[1], KEYS[0], *KEYS[2:]], "bodies": [BODIES[1], BODIES[0], *BODIES[2:]], "until": CHUNK_ROWS},
    ],
)
def test_rows_of_another_chunk_have_other_ids(other: dict[str, Any]) -> None:
    """A gate takes a request whose id it knows for a repeat, and drops it."""
    until = other.pop("until", len(KEYS))
    found = ids(**other)
    assert not {*found[:until]} & {*ids()}
    assert found[until:] == ids()[until:]


def test_a_chunk_of_which_any_rows_are_left_out_stays_below_the_limit_of_a_session() -> None:
    keys = [f"k{number}" for number in range(20_000)]
    in_one = [one for one in keys if partition_of(one) == 0][:CHUNK_ROWS]
    applied = AppliedNumbers()
    for text in ids(keys=in_one, bodies=BODIES[:CHUNK_ROWS])[::2]:
        applied = applied.including(RequestId.parse(text).number)
    assert len(applied.starts) <= CHUNK_ROWS // 2


def test_a_row_without_a_key_has_no_id() -> None:
    first, second, third = ids(keys=["a", None, "a"], bodies=[b"", b"", b""])
    assert second is None
    assert None not in (first, third)
