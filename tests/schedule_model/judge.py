"""An independent reading of a schedule log: right answers, and how occurrences end.

It shares no code with ``bide.schedules``. It parses the JSON of the records itself, sees the whole history from the
first record on, and forgets nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32


@dataclass(slots=True)
class Life:
    """One occurrence, as the log decides it."""

    key: str
    body: bytes
    target: str
    due: int
    fate: str = "waiting"


@dataclass(slots=True)
class Verdict:
    """What the history means."""

    answers: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    lives: dict[str, Life] = field(default_factory=dict)
    under_way: Counter[str] = field(default_factory=Counter)
    """How many occurrences of a key are under way."""
    void_claims: int = 0
    waiting: dict[str, dict[str, Any]] = field(default_factory=dict)
    last_ended: dict[str, str] = field(default_factory=dict)
    repeats: set[str] = field(default_factory=set)


def judge(history: Sequence[tuple[str, bytes]], partition: int, partitions: int) -> Verdict:
    """Read a history: the exchange and the body of each record, in the order of the log."""
    verdict = Verdict()
    for exchange, raw in history:
        read(verdict, exchange, raw, partition, partitions)
    return verdict


def read(verdict: Verdict, exchange: str, raw: bytes, partition: int, partitions: int) -> None:
    """Read the next record."""
    head, _, blob = raw.partition(b"\n")
    try:
        record = json.loads(head)
    except ValueError:
        return
    kind = record.get("kind")
    if exchange == "gates":
        if kind == "claim":
            for item in record["items"]:
                _claim(verdict, item)
        elif kind == "done":
            for occurrence, outcome in record["items"]:
                life = verdict.lives.get(occurrence)
                if life is not None and life.fate == "under way":
                    life.fate = outcome
                    verdict.under_way[life.key] -= 1
                    if not verdict.under_way[life.key]:
                        del verdict.under_way[life.key]
                    if life.key not in verdict.waiting:
                        verdict.last_ended[life.key] = occurrence
    elif exchange == "operations" and "request" in record:
        _operation(verdict, record, blob, partition, partitions)


def _operation(verdict: Verdict, record: dict[str, Any], blob: bytes, partition: int, partitions: int) -> None:
    request, key = record["request"], record.get("key")
    if key is not None and crc32(key.encode()) % partitions != partition:
        return
    if request in verdict.answers:
        verdict.repeats.add(request)
        return
    if record["kind"] == "schedule":
        verdict.answers[request] = _schedule(verdict, record, blob)
    elif key is None:
        chosen = record["filter"]
        found = sorted(
            one
            for one, entry in verdict.waiting.items()
            if one.startswith(chosen.get("prefix", ""))
            and chosen.get("to", entry["to"]) == entry["to"]
            and chosen.get("due_from", entry["due"]) <= entry["due"]
            and chosen.get("due_before", entry["due"] + 1) > entry["due"]
        )
        for one in found:
            _change(verdict, one, record)
        verdict.answers[request] = (_WORDS[record["kind"]], tuple(found))
    else:
        verdict.answers[request] = _change_key(verdict, key, record)


def _schedule(verdict: Verdict, record: dict[str, Any], blob: bytes) -> tuple[Any, ...]:
    key, request = record["key"], record["request"]
    before = verdict.waiting.get(key)
    if record.get("if_absent") and before is not None:
        return ("exists", before["version"])
    wanted = record.get("if_version")
    if wanted is not None and (before is None or before["version"] != wanted):
        return ("changed", before and before["version"])
    if before is not None:
        verdict.lives[before["occurrence"]].fate = "superseded"
    verdict.waiting[key] = entry = {
        "id": request,
        "version": request,
        "to": record["to"],
        "nominal": record["nominal"],
        "due": record["due"],
        "every": record.get("every"),
        "paused": False,
        "body": blob[record["message"][0] : sum(record["message"])],
    }
    _begin(verdict, key, entry)
    return ("scheduled", request)


def _begin(verdict: Verdict, key: str, entry: dict[str, Any]) -> None:
    entry["occurrence"] = entry["id"] if entry["every"] is None else f"{entry['id']}@{entry['nominal']}"
    verdict.lives[entry["occurrence"]] = Life(key, entry["body"], entry["to"], entry["due"])


def _change_key(verdict: Verdict, key: str, record: dict[str, Any]) -> tuple[Any, ...]:
    entry = verdict.waiting.get(key)
    if entry is None:
        return ("too-late",) if key in verdict.under_way or key in verdict.last_ended else ("not-found",)
    wanted = record.get("if_version")
    if wanted is not None and entry["version"] != wanted:
        return ("changed", entry["version"])
    before = entry["version"]
    _change(verdict, key, record)
    return (_WORDS[record["kind"]], before if record["kind"] in ("cancel", "run-now") else record["request"])


_WORDS = {"cancel": "cancelled", "move": "moved", "pause": "paused", "resume": "resumed", "run-now": "running"}


def _change(verdict: Verdict, key: str, record: dict[str, Any]) -> None:
    entry, request = verdict.waiting[key], record["request"]
    life = verdict.lives[entry["occurrence"]]
    match record["kind"]:
        case "cancel":
            life.fate = "cancelled"
            del verdict.waiting[key]
            verdict.last_ended.pop(key, None)
            return
        case "move":
            entry["due"] = life.due = record["due"]
        case "pause":
            entry["paused"] = True
        case "resume":
            entry["paused"] = False
        case "run-now" if entry["every"] is None:
            life.fate, life.due = "under way", 0
            verdict.under_way[key] += 1
            del verdict.waiting[key]
            return
        case "run-now":
            verdict.lives[f"{entry['id']}!{request}"] = Life(key, entry["body"], entry["to"], 0, "under way")
            verdict.under_way[key] += 1
            return
        case _:
            pass
    entry["version"] = request


def _claim(verdict: Verdict, item: dict[str, Any]) -> None:
    entry = verdict.waiting.get(item["key"])
    claimed = (item["version"], item["nominal"], item["due"])
    if entry is None or entry["paused"] or (entry["version"], entry["nominal"], entry["due"]) != claimed:
        verdict.void_claims += 1
        return
    verdict.lives[entry["occurrence"]].fate = "skipped" if item.get("skip") else "under way"
    if not item.get("skip"):
        verdict.under_way[item["key"]] += 1
    if "next_nominal" in item:
        entry["nominal"], entry["due"] = item["next_nominal"], item["next_due"]
        _begin(verdict, item["key"], entry)
    else:
        del verdict.waiting[item["key"]]
