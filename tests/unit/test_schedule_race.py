"""The check of a race finds each broken promise in its history."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.readme import ROOT, read
from tests.schedule_race.checking import check
from tests.schedule_race.history import (
    Change,
    Event,
    Fate,
    HistoryWriter,
    Kill,
    LogSummary,
    Receipt,
    Start,
    What,
    read_history,
)

HISTORIES = ROOT / "tests" / "schedule_race" / "histories"


def fate(schedule: str, ending: str, *, due: int = 100) -> Fate:
    return Fate(id=schedule, key="k", body=schedule, due=due, fate=ending)


def receipt(schedule: str, *, at: int = 100, body: str | None = None, is_redelivered: bool = False) -> Receipt:
    return Receipt(id=schedule, body=schedule if body is None else body, at=at, is_redelivered=is_redelivered)


def change(what: What, outcome: str, *, second: str | None = None) -> Change:
    return Change(what=what, key="k", first="a", second=second, outcome=outcome)


def violations(*events: Event) -> list[str]:
    return check([Start(seed=1, operations=1), *events]).violations


UNKNOWN = Change(what="schedule", key="k")
"""A schedule in doubt."""

RIGHT: dict[str, list[Event]] = {
    "cancelled": [change("cancel", "cancelled"), fate("a", "cancelled")],
    "too late to cancel": [change("cancel", "too-late"), fate("a", "delivered"), receipt("a")],
    "replaced": [
        change("replace-if", "scheduled", second="b"),
        *(fate("a", "superseded"), fate("b", "delivered"), receipt("b")),
    ],
    "too late to replace": [change("replace-if", "changed"), fate("a", "delivered"), receipt("a")],
    "replaced in time": [
        change("replace", "scheduled", second="b"),
        *(fate("a", "superseded"), fate("b", "delivered"), receipt("b")),
    ],
    "scheduled behind the first": [
        change("replace", "scheduled", second="b"),
        *(fate("a", "delivered"), fate("b", "delivered"), receipt("a"), receipt("b")),
    ],
    "delivered twice": [change("cancel", "too-late"), fate("a", "delivered"), receipt("a"), receipt("a")],
    "a cancel in doubt had an error": [
        Change(what="cancel", key="k", first="a", error="NoGateAnswerError()"),
        fate("a", "cancelled"),
    ],
    "a cancel in doubt came late": [change("cancel", "error"), fate("a", "delivered"), receipt("a")],
    "a replace in doubt was in time": [
        change("replace-if", "error"),
        *(fate("a", "superseded"), fate("b", "delivered"), receipt("b")),
    ],
    "a replace in doubt came late": [change("replace-if", "error"), fate("a", "delivered"), receipt("a")],
    "a replace in doubt is not in the log": [change("replace", "error"), fate("a", "delivered"), receipt("a")],
    "a replace in doubt was behind the first": [
        change("replace", "error"),
        *(fate("a", "delivered"), fate("b", "delivered"), receipt("a"), receipt("b")),
    ],
    "a schedule in doubt is not in the log": [UNKNOWN],
    "a schedule in doubt was made": [UNKNOWN, fate("a", "delivered"), receipt("a")],
    "the client was killed before the change": [change("schedule", "scheduled"), fate("a", "delivered"), receipt("a")],
}

WRONG: dict[str, tuple[list[Event], str]] = {
    "cancelled and delivered": (
        [change("cancel", "cancelled"), fate("a", "delivered"), receipt("a")],
        "cancelled, and a was received",
    ),
    "neither": (
        [change("cancel", "too-late"), fate("a", "delivered")],
        "too-late, and a was not received",
    ),
    "cancelled by the log, and delivered": (
        [change("cancel", "cancelled"), fate("a", "cancelled"), receipt("a")],
        "cancelled by the log, and was received",
    ),
    "not found": ([change("cancel", "not-found"), fate("a", "cancelled")], "not-found is impossible"),
    "the first one came after a replacement": (
        [
            change("replace-if", "scheduled", second="b"),
            *(fate("a", "superseded"), fate("b", "delivered"), receipt("a"), receipt("b")),
        ],
        "scheduled, and a was received",
    ),
    "a superseded one came": (
        [
            change("replace", "scheduled", second="b"),
            *(fate("a", "superseded"), fate("b", "delivered"), receipt("a"), receipt("b")),
        ],
        "superseded by the log, and was received",
    ),
    "a replacement was lost": (
        [change("replace", "scheduled", second="b"), fate("a", "superseded"), fate("b", "delivered")],
        "scheduled, and b was not received",
    ),
    "not in the log": ([change("cancel", "cancelled")], "a is not in the log"),
    "still waiting": ([change("cancel", "cancelled"), fate("a", "waiting")], "a of k is waiting by the log at the end"),
    "early": ([change("cancel", "too-late"), fate("a", "delivered"), receipt("a", at=99)], "received 1 ms early"),
    "another body": (
        [change("cancel", "too-late"), fate("a", "delivered"), receipt("a", body="x")],
        "with the body x instead of a",
    ),
    "another body the second time": (
        [change("cancel", "too-late"), fate("a", "delivered"), receipt("a"), receipt("a", body="x")],
        "came with the bodies a and x",
    ),
    "unknown": ([change("cancel", "cancelled"), fate("a", "cancelled"), receipt("c")], "c was received, and is not in"),
    "a cancel in doubt cancelled and delivered": (
        [change("cancel", "error"), fate("a", "cancelled"), receipt("a")],
        "cancelled by the log, and was received",
    ),
    "a cancel in doubt did neither": (
        [change("cancel", "error"), fate("a", "delivered")],
        "delivered by the log, and was not received",
    ),
    "a cancel in doubt lost the schedule": ([change("cancel", "error")], "a is not in the log"),
    "a cancel in doubt made a schedule": (
        [change("cancel", "error"), fate("a", "superseded"), fate("b", "delivered"), receipt("b")],
        "the log has the ends superseded, delivered",
    ),
    "a conditional replace in doubt did both": (
        [
            change("replace-if", "error"),
            *(fate("a", "delivered"), fate("b", "delivered"), receipt("a"), receipt("b")),
        ],
        "the log has the ends delivered, delivered",
    ),
    "a replace in doubt did neither": ([change("replace", "error"), fate("a", "superseded")], "the ends superseded"),
    "a replace in doubt was made twice": (
        [
            change("replace", "error"),
            *(fate("a", "superseded"), fate("b", "delivered"), fate("c", "delivered"), receipt("b"), receipt("c")),
        ],
        "the log has the ends superseded, delivered, delivered",
    ),
    "a replace in doubt came early": (
        [change("replace", "error"), fate("a", "superseded"), fate("b", "delivered"), receipt("b", at=98)],
        "b was received 2 ms early",
    ),
    "a schedule in doubt was made twice": (
        [UNKNOWN, fate("a", "delivered"), fate("b", "delivered"), receipt("a"), receipt("b")],
        "the log has the ends delivered, delivered",
    ),
    "a change that was never requested": (
        [change("schedule", "scheduled"), fate("a", "cancelled")],
        "the log has the ends cancelled",
    ),
    "a schedule of a killed client was lost": ([change("schedule", "scheduled")], "a was not received"),
    "no result": ([fate("a", "delivered"), receipt("a")], "0 changes have a result, and 1 were wanted"),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_kept_promise_is_no_violation(case: str) -> None:
    assert violations(*RIGHT[case]) == []


@pytest.mark.parametrize("case", WRONG)
def test_a_broken_promise_is_a_violation(case: str) -> None:
    events, expected = WRONG[case]
    assert any(expected in one for one in violations(*events))


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    events: list[Event] = [
        Start(seed=7, operations=2),
        change("replace-if", "scheduled", second="b"),
        receipt("b"),
        receipt("b"),
        receipt("b", is_redelivered=True),
        Kill(process="gate1"),
        Kill(process="gate2", code=1),
        Kill(process="client2"),
        Kill(process="broker"),
        fate("b", "delivered"),
        LogSummary(records=9, claims=3, void_claims=1),
    ]
    with HistoryWriter(tmp_path / "history") as writer:
        for event in events:
            writer.add(event)
    assert list(read_history(tmp_path / "history")) == events
    lines = list(check(read_history(tmp_path / "history")).lines())
    assert "seed 7: 1 of 2 changes at the moment of delivery" in lines
    assert "received: 1 messages, 1 of them delivered twice, 1 redelivered by the queue" in lines
    assert "kill -9: 1 of a gate, 1 of a client, 1 of the broker" in lines
    assert "processes that ended by themselves: 1 of a gate with exit code 1" in lines


@pytest.mark.long
@pytest.mark.parametrize("path", sorted(HISTORIES.iterdir()), ids=lambda path: path.stem)
def test_a_history_in_the_project_breaks_no_promise(path: Path) -> None:
    found = check(read_history(path))
    assert found.violations == []
    assert "\n".join(found.lines()) in read("docs/schedules-design.md")


@pytest.mark.long
@pytest.mark.parametrize("path", sorted(HISTORIES.iterdir()), ids=lambda path: path.stem)
def test_a_message_less_or_more_in_a_history_of_the_project_is_a_violation(path: Path) -> None:
    late, gone = (
        next(one.first for one in read_history(path) if isinstance(one, Change) and one.outcome == outcome)
        for outcome in ("too-late", "cancelled")
    )
    assert late is not None
    assert gone is not None

    def changed() -> Iterator[Event]:
        for one in read_history(path):
            if isinstance(one, Fate) and one.id == gone:
                yield receipt(gone, at=one.due, body=one.body)
            if not (isinstance(one, Receipt) and one.id == late):
                yield one

    # By the answer, and by the log.
    wrong = check(changed()).violations
    assert [sum(name in one for one in wrong) for name in (late, gone)] == [2, 2]
    assert len(wrong) == 4
