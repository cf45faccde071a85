"""The check of a history: nothing was both cancelled and delivered, and nothing was neither."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.schedule_race.history import Change, Event, Fate, Kill, LogSummary, Receipt, Start


@dataclass(slots=True)
class Findings:
    """What a history contains.

    Attributes:
        outcomes: how many changes had each outcome.
        gate_ends: exit codes of gates that ended by themselves.
        violations: empty if every promise was kept.
    """

    seed: int = 0
    operations: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    delivered: int = 0
    delivered_again: int = 0
    redelivered: int = 0
    gate_kills: int = 0
    broker_kills: int = 0
    gate_ends: Counter[int] = field(default_factory=Counter)
    log: LogSummary = field(default_factory=lambda: LogSummary(records=0, claims=0, void_claims=0))
    violations: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """The findings as text."""
        outcomes, fates, log = self.outcomes, self.fates, self.log
        yield f"seed {self.seed}: {sum(outcomes.values())} of {self.operations} changes at the moment of delivery"
        yield (
            f"cancels: {outcomes['cancel cancelled']} cancelled, {outcomes['cancel too-late']} too late, "
            f"{outcomes['cancel error']} in doubt"
        )
        yield (
            f"replaces of a version: {outcomes['replace-if scheduled']} replaced, {outcomes['replace-if changed']} too "
            f"late, {outcomes['replace-if error']} in doubt"
        )
        yield f"unconditional replaces: {outcomes['replace scheduled']} confirmed, {outcomes['replace error']} in doubt"
        yield (
            f"by the log: {fates['delivered']} delivered, {fates['cancelled']} cancelled, {fates['superseded']} "
            f"superseded; {log.void_claims} of {log.claims} claims came behind a change; {log.records} records"
        )
        yield (
            f"received: {self.delivered} messages, {self.delivered_again} of them delivered twice, {self.redelivered} "
            "redelivered by the queue"
        )
        ends = ", ".join(f"{count} with exit code {code}" for code, count in sorted(self.gate_ends.items()))
        yield f"kill -9: {self.gate_kills} of a gate, {self.broker_kills} of the broker"
        yield f"gates that ended by themselves: {ends or 'none'}"
        yield f"violations: {len(self.violations)}"


def check(events: Iterable[Event]) -> Findings:
    """Check a history.

    The answers that the client got are compared with the messages that the consumer received, which needs no knowledge
    of the log. The log is then compared with both.
    """
    found = Findings()
    changes: list[Change] = []
    fates: dict[str, Fate] = {}
    received: dict[str, Receipt] = {}
    for event in events:
        match event:
            case Start():
                found.seed, found.operations = event.seed, event.operations
            case Change():
                changes.append(event)
                found.outcomes[f"{event.what} {event.outcome}"] += 1
            case Receipt():
                _receive(found, received, event)
            case Kill():
                if event.process == "broker":
                    found.broker_kills += 1
                elif event.code is None:
                    found.gate_kills += 1
                else:
                    found.gate_ends[event.code] += 1
            case Fate():
                fates[event.id] = event
                found.fates[event.fate] += 1
            case LogSummary():
                found.log = event
    found.delivered = len(received)
    for change in changes:
        found.violations += _wrong_answer(change, received, fates)
    found.violations += _wrong_log(fates, received)
    if len(changes) != found.operations:
        found.violations.append(f"{len(changes)} changes have a result, and {found.operations} were wanted")
    return found


def _receive(found: Findings, received: dict[str, Receipt], event: Receipt) -> None:
    before = received.setdefault(event.id, event)
    if before is event:
        return
    if event.is_redelivered:
        found.redelivered += 1
    else:
        found.delivered_again += 1
    if before.body != event.body:
        found.violations.append(f"{event.id} came with the bodies {before.body} and {event.body}")


_EXPECTED = {
    ("cancel", "cancelled"): (False, None),
    ("cancel", "too-late"): (True, None),
    ("replace-if", "scheduled"): (False, True),
    ("replace-if", "changed"): (True, None),
    ("replace", "scheduled"): (None, True),
}
"""Whether the first schedule and its replacement are received. None if the answer does not say."""


def _wrong_answer(change: Change, received: dict[str, Receipt], fates: dict[str, Fate]) -> Iterator[str]:
    if change.outcome == "error":
        return
    expected = _EXPECTED.get((change.what, change.outcome))
    if expected is None:
        yield f"{change.what} of {change.key}: {change.outcome} is impossible"
        return
    for schedule, is_expected in zip((change.first, change.second), expected, strict=True):
        if is_expected is None:
            continue
        assert schedule is not None
        if (schedule in received) != is_expected:
            seen = "not received" if is_expected else "received"
            yield f"{change.what} of {change.key}: {change.outcome}, and {schedule} was {seen}"
        if schedule not in fates:
            yield f"{change.what} of {change.key}: {change.outcome}, and {schedule} is not in the log"


def _wrong_log(fates: dict[str, Fate], received: dict[str, Receipt]) -> Iterator[str]:
    for one in fates.values():
        if one.fate not in ("delivered", "cancelled", "superseded"):
            yield f"{one.id} of {one.key} is {one.fate} by the log at the end"
        elif (one.fate == "delivered") != (one.id in received):
            seen = "received" if one.id in received else "not received"
            yield f"{one.id} of {one.key} is {one.fate} by the log, and was {seen}"
    for receipt in received.values():
        fate = fates.get(receipt.id)
        if fate is None:
            yield f"{receipt.id} was received, and is not in the log"
        elif receipt.body != fate.body:
            yield f"{receipt.id} was received with the body {receipt.body} instead of {fate.body}"
        elif receipt.at < fate.due:
            yield f"{receipt.id} was received {fate.due - receipt.at} ms early"
