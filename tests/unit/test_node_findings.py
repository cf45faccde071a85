"""Findings about releases and clocks of a cluster's nodes, from canned answers and readings."""

from __future__ import annotations

from typing import Any

import pytest

from bide.admin.node_findings import ClockReading, clock_findings, release_findings
from bide.management.api import ManagementApi
from bide.management.endpoint import ManagementEndpoint


class CannedApi(ManagementApi):
    """A management API that answers every call with the same value."""

    def __init__(self, answer: Any) -> None:
        super().__init__(ManagementEndpoint(base="http://localhost", user="guest", password="guest"))
        self._answer = answer

    async def call(self, *_: Any, **__: Any) -> Any:
        return self._answer


async def test_the_release_of_a_node_is_read_from_the_answers_of_3_10_and_4_3() -> None:
    applications = [{"name": "kernel", "version": "8.5.3"}, {"name": "rabbit", "version": "3.10.8"}]
    answer = [
        {"name": "old", "running": True, "applications": applications},
        {"name": "new", "running": True, "rabbitmq_version": "4.3.6"},
        {"name": "started", "running": True, "type": "disc"},
        {"name": "stopped", "running": False, "cluster_links": []},
    ]
    assert await CannedApi(answer).releases() == {"old": "3.10.8", "new": "4.3.6", "started": ""}


@pytest.mark.parametrize(
    ("releases", "expected"),
    [
        ({"a": "3.13.7", "b": "3.13.7"}, [("ok", "RabbitMQ 3.13.7 on 2 nodes")]),
        (
            {"a": "4.0.5", "b": "3.13.7", "c": "3.13.7"},
            [("warning", "different releases of RabbitMQ (3.13.7 on 'b' and 'c', 4.0.5 on 'a')")],
        ),
        ({"a": "4.0.5", "b": ""}, [("not checked", "does not know the release of 'b' yet")]),
        ({"a": "4.0.5", "b": "", "c": "3.13.7"}, [("warning", "different releases"), ("not checked", "of 'b' yet")]),
        ({"a": "", "b": ""}, [("not checked", "of 'a' and 'b' yet")]),
    ],
)
def test_different_releases_are_reported(releases: dict[str, str], expected: list[tuple[str, str]]) -> None:
    found = release_findings(releases)
    assert [one.status for one in found] == [status for status, _ in expected]
    assert all(text in one.text for one, (_, text) in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("readings", "status", "text"),
    [
        ({"a": (-5, 3), "b": (-1, 2)}, "ok", "the clocks of 2 nodes agree to 8 ms"),
        ({"a": (-5, 3), "b": (1_004, 1_010)}, "problem", "the clock of b is at least 1,001 ms ahead of that of a."),
        ({"a": (-5, 3), "b": (1_003, 1_010)}, "not checked", "may differ by up to 1,015 ms"),
        ({"a": (-5, 3), "b": (0, 1), "c": (-7_010, -7_000)}, "problem", "the clock of b is at least 7,000 ms ahead"),
        ({"a": (-600, 500), "b": (-500, 600)}, "not checked", "may differ by up to 1,200 ms, or not at all"),
    ],
)
def test_clocks_that_differ_by_more_than_a_second_are_reported(
    readings: dict[str, tuple[int, int]], status: str, text: str
) -> None:
    (found,) = clock_findings({node: ClockReading(*bounds) for node, bounds in readings.items()})
    assert (found.status, text in found.text) == (status, True), found.text
