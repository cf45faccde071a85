"""The check of a history: nothing was both cancelled and delivered, and nothing was neither."""

from __future__ import annotations

import string
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from tests.schedule_race.history import Change, Event, Fate, Kill, LogSummary, Receipt, Start


@dataclass(slots=True)
class Findings:
    """What a history contains.

    Attributes:
        outcomes: how many changes had each outcome.
        kills: how many processes of a kind were killed.
        ends: how many processes ended by themselves, by kind and exit code.
        violations: empty if every promise was kept.
    """

    seed: int = 0
    operations: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    delivered: int = 0
    delivered_again: int = 0
    redelivered: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    log: LogSummary = field(default_factory=lambda: LogSummary(records=0, claims=0, void_claims=0))
    violations: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """The findings as text."""
        outcomes, fates, kills, log = self.outcomes, self.fates, self.kills, self.log
        unchanged, in_doubt = outcomes["schedule scheduled"], outcomes["schedule error"]
        changes = outcomes.total() - unchanged - in_doubt
        yield f"seed {self.seed}: {changes} of {self.operations} changes at the moment of delivery"
        yield f"schedules whose client did not get to the change: {unchanged} confirmed, {in_doubt} in doubt"
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
        yield f"kill -9: {kills['gate']} of a gate, {kills['client']} of a client, {kills['broker']} of the broker"
        ends = ", ".join(f"{count} of a {end}" for end, count in sorted(self.ends.items()))
        yield f"processes that ended by themselves: {ends or 'none'}"
        yield f"violations: {len(self.violations)}"


def check(events: Iterable[Event]) -> Findings:
    """Check a history.

    The answers that the client got are compared with the messages that the consumer received, which needs no knowledge
    of the log. The log is then compared with both.
    """
    found = Findings()
    changes: list[Change] = []
    fates: dict[str, Fate] = {}
    lives: defaultdict[str, list[Fate]] = defaultdict(list)
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
                kind = event.process.rstrip(string.digits)
                if event.code is None:
                    found.kills[kind] += 1
                else:
                    found.ends[f"{kind} with exit code {event.code}"] += 1
            case Fate():
                fates[event.id] = event
                lives[event.key].append(event)
                found.fates[event.fate] += 1
            case LogSummary():
                found.log = event
    found.delivered = len(received)
    for change in changes:
        found.violations += _wrong_answer(change, received, lives[change.key])
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


_CANCELLED, _DELIVERED = ("cancelled",), ("delivered",)
_REPLACED, _BOTH = ("superseded", "delivered"), ("delivered", "delivered")
_POSSIBLE: Final[dict[tuple[str, str], set[tuple[str, ...]]]] = {
    ("schedule", "scheduled"): {_DELIVERED},
    ("schedule", "error"): {(), _DELIVERED},
    ("cancel", "cancelled"): {_CANCELLED},
    ("cancel", "too-late"): {_DELIVERED},
    ("cancel", "error"): {_CANCELLED, _DELIVERED},
    ("replace-if", "scheduled"): {_REPLACED},
    ("replace-if", "changed"): {_DELIVERED},
    ("replace-if", "error"): {_REPLACED, _DELIVERED},
    ("replace", "scheduled"): {_REPLACED, _BOTH},
    ("replace", "error"): {_REPLACED, _BOTH, _DELIVERED},
}
"""How the schedules of a key may end, in the order of the log, by the last request and its outcome."""


def _wrong_answer(change: Change, received: dict[str, Receipt], lives: list[Fate]) -> Iterator[str]:
    about = f"{change.what} of {change.key}: {change.outcome}"
    possible = _POSSIBLE.get((change.what, change.outcome))
    if possible is None:
        yield f"{about} is impossible"
        return
    for number, schedule in enumerate((change.first, change.second)):
        if schedule is None:
            continue
        if (schedule in received) not in {ends[number] == "delivered" for ends in possible}:
            yield f"{about}, and {schedule} was {'received' if schedule in received else 'not received'}"
        if all(one.id != schedule for one in lives):
            yield f"{about}, and {schedule} is not in the log"
    if (ends := tuple(one.fate for one in lives)) not in possible:
        yield f"{about}, and the log has the ends {', '.join(ends) or 'none'}"


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
