"""Views of the console: computed values, parameters, operations, edits."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bide
import bide.console.vhost
import bide.testing
from bide.admin.locate import management_api
from bide.amqp.url import BrokerUrl
from bide.client.schedules import Schedules
from bide.console import failures, schedules
from bide.console.lateness import percentile
from bide.console.operations import BackgroundOperation, BackgroundOperations
from bide.console.parameters import Parameters
from bide.console.values import MAX_BODY, body_of, json_value
from bide.console.vhost import ConsoleVhost
from bide.console.waiting import grid_of
from bide.errors import InvalidInputError, NotFoundError, PublishError
from bide.schedules.records import Action
from bide.schedules.timeline import MAX_TARGETS, OTHER_TARGETS, TimeGrid, TimelineCount, largest, merged


@given(st.integers(0, 2**43), st.integers(1, 2**42))
def test_a_grid_contains_its_time_in_at_most_as_many_intervals_as_fit(start: int, length: int) -> None:
    grid = grid_of(start, start + length)
    assert grid.start <= start
    assert grid.end >= start + length
    assert 1 <= grid.number <= 121
    assert grid.start % grid.width == 0


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=200), st.integers(1, 99))
def test_a_percentile_is_the_smallest_value_that_enough_values_do_not_exceed(values: list[int], percent: int) -> None:
    ordered = sorted(values)
    found = percentile(ordered, percent)
    assert sum(1 for one in ordered if one <= found) * 100 >= percent * len(ordered)
    assert sum(1 for one in ordered if one < found) * 100 < percent * len(ordered)


COUNTS = st.builds(
    TimelineCount,
    target=st.sampled_from(["q:a", "q:b", "x:c"]),
    interval=st.integers(-1, 4),
    count=st.integers(1, 50),
    first=st.integers(0, 100),
    last=st.integers(100, 200),
)


@given(st.lists(COUNTS, max_size=30))
def test_the_timeline_of_all_partitions_has_every_schedule_once(counts: list[TimelineCount]) -> None:
    found = merged(TimeGrid(start=0, width=10, number=4), counts)
    assert found.total == sum(one.count for one in counts)
    assert found.before == sum(one.count for one in counts if one.interval < 0)
    assert found.after == sum(one.count for one in counts if one.interval >= 4)
    for target, numbers in found.targets.items():
        inside = Counter[int]()
        for one in counts:
            if one.target == target:
                inside[one.interval] += one.count
        assert list(numbers) == [inside[place] for place in range(4)]
    assert found.first == min((one.first for one in counts), default=None)


def test_only_the_largest_targets_have_numbers_of_their_own() -> None:
    counts = [
        TimelineCount(target=f"q:{number}", interval=0, count=number + 1, first=number, last=number)
        for number in range(MAX_TARGETS + 50)
    ]
    found = largest(counts)
    assert len(found) == MAX_TARGETS + 1
    assert found[-1] == TimelineCount(target=OTHER_TARGETS, interval=0, count=sum(range(1, 51)), first=0, last=49)
    assert sum(one.count for one in found) == sum(one.count for one in counts)
    assert list(merged(TimeGrid(start=0, width=1, number=1), found).targets)[-1] == OTHER_TARGETS


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"a": [1, {"b": b"text"}]}, {"a": [1, {"b": "text"}]}),
        (b"\xff", "/w=="),
        (Decimal("1.50"), "1.50"),
        (float("nan"), "nan"),
        (2**60, str(2**60)),
        (True, True),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00.000+00:00"),
    ],
)
def test_each_value_of_a_header_has_a_value_in_json(value: object, shown: object) -> None:
    assert json_value(value) == shown


def test_a_long_body_is_cut_also_within_a_character() -> None:
    found = body_of("ä".encode() * MAX_BODY)
    assert (found["size"], found["is_text"], found["is_cut"]) == (2 * MAX_BODY, True, True)
    assert set(found["text"]) == {"ä"}
    assert body_of(b"\xff\x00")["is_text"] is False


class TestParametersOfARequest:
    def test_texts_of_another_type_are_refused(self) -> None:
        with pytest.raises(InvalidInputError, match="key is 5"):
            Parameters(values={"key": 5}).text("key")
        with pytest.raises(InvalidInputError, match="missing"):
            Parameters(values={"key": ""}).required("key")
        with pytest.raises(InvalidInputError, match="list"):
            Parameters(values={"ids": "a"}).texts("ids")

    def test_numbers_have_limits(self) -> None:
        assert Parameters(values={"minutes": "5"}).number("minutes", lowest=1, highest=9) == 5
        assert Parameters(values={}).number("minutes", lowest=1, highest=9) is None
        for value in ("0", "10", "x", [1]):
            with pytest.raises(InvalidInputError):
                Parameters(values={"minutes": value}).number("minutes", lowest=1, highest=9)


class TestOperations:
    async def test_a_stopped_operation_keeps_its_result_so_far(self) -> None:
        operations = BackgroundOperations()

        async def work(running: BackgroundOperation) -> dict[str, object]:
            running.progress(3, 10)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                running.result = {"done": 3}
                raise
            return {}

        running = operations.start("retry", "error", "all", work)
        await asyncio.sleep(0)  # starts the operation
        with pytest.raises(InvalidInputError, match="is running"):
            operations.start("discard", "error", "all", work)
        stopped = await operations.stop(running.id)
        assert (stopped.state, stopped.result, stopped.done, stopped.total) == ("stopped", {"done": 3}, 3, 10)
        assert stopped.ended is not None

    async def test_an_operation_that_fails_says_why(self) -> None:
        operations = BackgroundOperations()

        async def work(_: BackgroundOperation) -> dict[str, object]:
            raise PublishError("the broker refuses")

        running = operations.start("retry", "error", "all", work)
        assert running.task is not None
        await running.task
        assert (running.state, running.error) == ("failed", "the broker refuses")

    async def test_an_unknown_operation_is_not_found(self) -> None:
        with pytest.raises(NotFoundError):
            await BackgroundOperations().stop("7")


async def test_an_edit_leaves_a_schedule_that_replaces_the_edited_one_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    b = bide.testing.broker(release=(4, 3))
    api = management_api(BrokerUrl.parse("amqp://localhost/"))
    monkeypatch.setattr(bide.console.vhost, "management_api", lambda *_: api)
    change = Schedules.change

    async def change_after_another_client(schedules: Schedules, action: Action, key: str, **given: Any) -> object:
        if action == "pause":
            await client.schedule(b"theirs", key="k", to="mails", delay="5d")
        return await change(schedules, action, key, **given)

    async with b.gate(), b.connect() as client:
        await client.declare(bide.Topology(queues=[bide.Queue("mails")]))
        await client.schedule(b"first", key="k", to="mails", delay="1d")
        version = (await client.pause("k")).version
        async with ConsoleVhost(url=b.url, infrastructure=await client.infrastructure()) as console_vhost:
            monkeypatch.setattr(Schedules, "change", change_after_another_client)
            edited = await schedules.edit(
                console_vhost, Parameters(values={"key": "k", "version": version, "body": "ours"})
            )
        waiting = await client.scheduled("k")
        assert waiting is not None
        assert (waiting.body, waiting.state) == (b"theirs", "waiting")
        assert waiting.due_time == b.clock.now() + timedelta(days=5)
        assert edited == {"key": "k", "outcome": "changed", "version": waiting.version}


@pytest.mark.parametrize("operation", [failures.retry, failures.archive, failures.discard])
async def test_an_operation_begins_when_no_view_reads_its_queue(
    monkeypatch: pytest.MonkeyPatch, operation: Callable[[ConsoleVhost, Parameters], Awaitable[dict[str, Any]]]
) -> None:
    b = bide.testing.broker(release=(4, 3))
    api = management_api(BrokerUrl.parse("amqp://localhost/"))
    monkeypatch.setattr(bide.console.vhost, "management_api", lambda *_: api)
    chosen = Parameters(values={"all": True, "to": "shop"}, operator="ann")
    async with b.connect() as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("error"), bide.Queue.quorum("shop")]))
        for _ in range(20):
            await client.publish(b"", to="error")
        async with ConsoleVhost(url=b.url, infrastructure=await client.infrastructure()) as vhost:
            reader = vhost.error_queue("error", "ann")
            async with vhost.reading("error"), aclosing(reader.messages()) as messages:
                await anext(messages)
                await operation(vhost, chosen)
                # The view holds all messages while another one reads the queue as often as the operation does.
                for _ in range(3):
                    assert await vhost.error_queue("error", "ann").count() == 0
            counted = await failures.count(vhost, Parameters(values={"queue": "error"}))
            (done,) = (await failures.operations(vhost, chosen))["operations"]
            assert (done["state"], done["result"]["done"], done["total"]) == ("done", 20, 20)
            # A view that is loaded during the operation does not show a part of the messages.
            assert counted["count"] == 0
