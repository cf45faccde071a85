"""A gate claims each occurrence once, and leaves others those that it cannot read."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from bide.gate.claims import CLAIM_ITEMS, ClaimPlanner
from bide.schedules.entries import WaitingSchedule
from bide.schedules.message import ScheduledMessage
from bide.schedules.records import Claim

MESSAGE = ScheduledMessage(b"\0\0", b"")


def waiting(key: str, **changed: Any) -> WaitingSchedule:
    values: dict[str, Any] = {"version": "a-1", "nominal": 5, "due": 5, "recurrence": None, **changed}
    return WaitingSchedule(key=key, id="a-1", target="q:x", routing_key="", message=MESSAGE, **values)


def keys(claim: Claim | None) -> list[str]:
    return [] if claim is None else [one.key for one in claim.items]


def test_an_occurrence_is_claimed_once_until_the_claim_was_read_back() -> None:
    planner = ClaimPlanner("g")
    first = planner.claim([waiting("a")], 9)
    assert keys(first) == ["a"]
    assert keys(planner.claim([waiting("a"), waiting("b")], 9)) == ["b"]
    assert planner.passed_over == 2
    assert first is not None
    planner.read(first)
    assert keys(planner.claim([waiting("a"), waiting("b")], 9)) == ["a"]


@pytest.mark.parametrize("changed", [{"version": "a-2"}, {"due": 6}, {"nominal": 6}])
def test_a_schedule_that_was_changed_is_claimed_beside_the_claim_that_is_void(changed: dict[str, Any]) -> None:
    planner = ClaimPlanner("g")
    planner.claim([waiting("a")], 9)
    assert keys(planner.claim([waiting("a", **changed)], 9)) == ["a"]


def test_claims_of_other_gates_free_nothing() -> None:
    planner = ClaimPlanner("g")
    sent = planner.claim([waiting("a")], 9)
    assert sent is not None
    planner.read(Claim(gate="h", items=sent.items))
    assert planner.claim([waiting("a")], 9) is None


def test_a_claim_that_may_be_lost_is_repeated() -> None:
    planner = ClaimPlanner("g")
    planner.claim([waiting("a")], 9)
    planner.on_connection_lost()
    assert keys(planner.claim([waiting("a")], 9)) == ["a"]


def test_a_claim_has_a_limit() -> None:
    planner, due = ClaimPlanner("g"), [waiting(str(number)) for number in range(CLAIM_ITEMS + 5)]
    assert len(keys(planner.claim(due, 9))) == CLAIM_ITEMS
    assert len(keys(planner.claim(due, 9))) == 5


def test_a_recurrence_of_an_unknown_zone_holds_up_no_other_schedule(caplog: pytest.LogCaptureFixture) -> None:
    planner = ClaimPlanner("g")
    unknown = waiting("a", recurrence={"cron": "0 8 * * *", "time_zone": "Mars/Base", "catch_up": "last"})
    with caplog.at_level(logging.WARNING):
        assert keys(planner.claim([unknown, waiting("b")], 9)) == ["b"]
        assert planner.claim([unknown], 9) is None
    (record,) = caplog.records
    assert "'a' is not claimed" in record.getMessage()
    assert "Mars/Base" in record.getMessage()
    assert planner.passed_over == 2
