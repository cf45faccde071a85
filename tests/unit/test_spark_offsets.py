"""Checkpoint positions, and the split of offsets into partitions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.errors import InvalidInputError
from bide.spark.offsets import begin_of, document, limited, positions_of, split
from bide.streams.range_reader import OffsetRange

names = st.sampled_from(["a", "b", "c", "d", "e"])
counts = st.integers(0, 2**40)


def test_offsets_are_written_as_in_version_1() -> None:
    """What checkpoints out there hold must stay readable, and the same text for the same positions."""
    assert json.dumps(document({"b": 2, "a": 1})) == '{"v": 1, "streams": {"a": 1, "b": 2}}'
    assert json.dumps(document({"a": 1}, initial=True)) == '{"v": 1, "streams": {"a": 1}, "initial": true}'
    assert json.dumps(document({"a": 9}, since={"b": 2, "a": 1})) == (
        '{"v": 1, "streams": {"a": 9}, "since": {"a": 1, "b": 2}}'
    )
    assert json.dumps(document({"a": 9}, since={"a": 1}, begin={"b": 2, "a": 1})) == (
        '{"v": 1, "streams": {"a": 9}, "since": {"a": 1}, "begin": {"a": 1, "b": 2}}'
    )
    assert json.dumps(document({"a": 9}, since={}, begin={})) == '{"v": 1, "streams": {"a": 9}}'


@given(st.dictionaries(st.text(max_size=5), counts))
def test_positions_survive_the_checkpoint(positions: dict[str, int]) -> None:
    assert positions_of(json.loads(json.dumps(document(positions)))) == positions


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"v": 2, "streams": {}},
        {"v": 1},
        {"v": 1, "streams": [1]},
        {"v": 1, "streams": {"a": -1}},
        {"v": 1, "streams": {"a": "1"}},
        {"v": 1, "streams": {"a": True}},
    ],
)
def test_a_checkpoint_of_something_else_is_refused(found: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"the checkpoint has (offsets of version|invalid offsets)"):
        positions_of(found)


def test_a_batch_begins_where_the_last_one_ended() -> None:
    first = document({"a": 5}, initial=True)
    later = document({"a": 7}, initial=True)
    batch = document({"a": 9}, since={"a": 5})
    # The first batch, then the same after a crash, when a new query would begin later.
    assert begin_of(first, batch) == begin_of(later, batch) == {"a": 5}
    # An empty first batch, repeated when there is more.
    assert begin_of(later, first) == {"a": 5}
    assert begin_of(batch, document({"a": 12})) == {"a": 9}
    # No end is written like this. Rather too much than nothing.
    assert begin_of(first, document({"a": 9})) == {"a": 5}


def test_a_batch_begins_at_the_start_of_a_new_stream() -> None:
    end = document({"a": 9, "b": 4, "c": 1}, since={"b": 2})
    assert begin_of(document({"a": 5}), end) == {"a": 5, "b": 2, "c": 0}
    # What is not read any more is not asked for.
    assert begin_of(document({"a": 5, "x": 1}), document({"a": 9})) == {"a": 5}


def test_the_start_of_a_new_query_does_not_apply_to_a_running_one() -> None:
    """Some Spark releases ask for the end without saying whether the query is new."""
    end = document({"a": 9, "b": 4}, since={"a": 0, "b": 2}, begin={"a": 7, "b": 4})
    new = document({"a": 8, "b": 4}, initial=True)
    assert begin_of(new, end) == {"a": 7, "b": 4}
    assert begin_of(document({"a": 5}), end) == {"a": 5, "b": 2}
    # As it was written before there was a key for it: the batch is what it was.
    assert begin_of(new, document({"a": 9, "b": 4}, since={"a": 7, "b": 4})) == {"a": 7, "b": 4}


@given(st.dictionaries(names, st.tuples(counts, counts), min_size=1), st.integers(1, 2**41))
def test_a_limit_is_used_up_and_shared_in_proportion(streams: dict[str, tuple[int, int]], limit: int) -> None:
    begin = {name: start for name, (start, _) in streams.items()}
    end = {name: start + count for name, (start, count) in streams.items()}
    total = sum(count for _, count in streams.values())
    shortened = limited(begin, end, limit)
    taken = {name: shortened[name] - begin[name] for name in streams}
    assert sum(taken.values()) == min(limit, total)
    for name, (_, count) in streams.items():
        assert 0 <= taken[name] <= count
        if total > limit:
            assert abs(taken[name] - limit * count / total) <= 1 + 1e-6 * count


def test_a_limit_of_one_makes_progress() -> None:
    assert limited({"a": 0, "b": 0}, {"a": 1, "b": 1}, 1) == {"a": 1, "b": 0}


@given(st.dictionaries(names, st.tuples(counts, st.integers(0, 1000))), st.none() | st.integers(1, 50))
def test_tasks_cover_everything_once(streams: dict[str, tuple[int, int]], at_least: int | None) -> None:
    ranges = [OffsetRange(stream=name, start=start, end=start + count) for name, (start, count) in streams.items()]
    tasks = split(ranges, at_least)
    for one in ranges:
        mine = [task for task in tasks if task.stream == one.stream]
        edges = [task.start for task in mine] + [one.end]
        assert [task.end for task in mine] == edges[1:]
        assert edges[0] == one.start
        assert all(task.end > task.start for task in mine)
    total = sum(count for _, count in streams.values())
    assert at_least is None or len(tasks) >= min(at_least, total) or total < at_least


def test_long_ranges_are_split_and_short_ones_not() -> None:
    tasks = split([OffsetRange(stream="a", start=0, end=90), OffsetRange(stream="b", start=5, end=15)], 4)
    assert [(task.stream, task.start, task.end) for task in tasks] == [
        ("a", 0, 22),
        ("a", 22, 45),
        ("a", 45, 67),
        ("a", 67, 90),
        ("b", 5, 15),
    ]
