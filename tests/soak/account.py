"""The totals of all runs of the soak, in an append-only file."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

KINDS: Final = ("jvm", "worker", "daemon", "stop", "cancel")


@dataclass(slots=True, kw_only=True)
class Totals:
    """The sum of all lines.

    Attributes:
        kills: by release and kind, in rounds that were checked afterwards.
        amid: of these, how many came in the middle of a micro-batch.
        unchecked: kills in a round that is not at its end.
        ended: numbers of rounds that are: they were checked, or broken off by a failure, and their kills with them.
        rounds: that were checked.
        runs: how often the soak was started.
        found: sums of what the checks counted.
        failures: what must not happen, as it was written down.
    """

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    amid: int = 0
    unchecked: Counter[str] = field(default_factory=Counter)
    ended: set[int] = field(default_factory=set)
    rounds: int = 0
    runs: int = 0
    found: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def of_kind(self, kind: str) -> int:
        """Kills of a kind, checked or not."""
        return sum(number for (_, one), number in self.kills.items() if one == kind) + self.unchecked[kind]

    @property
    def all(self) -> int:
        """All kills, checked or not."""
        return self.kills.total() + self.unchecked.total()


class Account:
    """The file. A line is written after the event that it records, so that nothing is counted too early."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size:
            # The run before was killed in the middle of a line.
            self._append("\n")

    def add(self, event: str, **values: Any) -> None:
        """Append a line, and have it on disk."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._append(json.dumps({"at": at, "event": event, **values}) + "\n")

    def _append(self, text: str) -> None:
        with self._path.open("a") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def totals(self) -> Totals:
        """Add everything up."""
        totals = Totals()
        kills: dict[int, list[dict[str, Any]]] = {}
        for line in self._lines():
            match str(line["event"]):
                case "run":
                    totals.runs += 1
                case "kill":
                    kills.setdefault(line["round"], []).append(line)
                case "failure":
                    totals.failures.append(f"round {line['round']}: {line['what']}")
                    totals.ended.add(line["round"])
                    kills.pop(line["round"], None)
                case "checked":
                    totals.rounds += 1
                    totals.ended.add(line["round"])
                    totals.found.update(line["found"])
                    for kill in kills.pop(line["round"], []):
                        totals.kills[line["release"], kill["kind"]] += 1
                        totals.amid += kill["amid"]
                case _:
                    raise ValueError(f"no event of an account: {line}")
        for kill in (one for some in kills.values() for one in some):
            totals.unchecked[kill["kind"]] += 1
        return totals

    def kills_of(self, number: int) -> int:
        """Kills in a round so far."""
        return sum(line["event"] == "kill" and line["round"] == number for line in self._lines())

    def _lines(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        found = []
        for line in self._path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # a line that was cut off
        return found


def summary(totals: Totals) -> str:
    """The account in a few lines."""
    kills = f"kills: {totals.kills.total()} in {totals.rounds} rounds that were checked"
    lines = [f"{kills}, {totals.amid} of them in the middle of a micro-batch"]
    for release in sorted({release for release, _ in totals.kills}):
        kinds = ", ".join(f"{kind} {totals.kills[release, kind]}" for kind in KINDS)
        lines.append(f"  RabbitMQ {release}: {kinds}")
    if totals.unchecked:
        lines.append(f"  in a round that is not at its end: {totals.unchecked.total()}")
    found = totals.found
    lines += [
        f"stream to files: {found['read']:,} messages",
        f"  missing {found['missing']}, twice {found['twice']}, wrong {found['wrong']}",
        f"  files of broken micro-batches, which do not count: {found['orphans']:,}",
        f"files to queue: {found['written']:,} messages",
        f"  lost {found['lost']}, wrong {found['foreign']}, ids of several messages {found['shared_ids']}",
        f"  came again with the same id {found['copies']:,}, with another id {found['other_ids']}",
        f"files to stream, each row once: {found['stored']:,} messages",
        f"  missing {found['absent']}, twice {found['repeated']}, wrong {found['alien']}",
        f"files to schedules: {found['keyed_written']:,} rows",
        f"  lost {found['keyed_lost']}, wrong {found['keyed_foreign']}, ids of several {found['keyed_shared_ids']}",
        f"  scheduled twice {found['keyed_other_ids']}, delivered again by a gate {found['keyed_copies']:,}",
        f"runs: {totals.runs}; failures: {len(totals.failures)}",
        *(f"  {one}" for one in totals.failures),
    ]
    return "\n".join(lines)
