"""Figures of the pipeline's benchmark: times of each round, medians, and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

NOW: Final = "now"
BEFORE: Final = "before"
LIMIT: Final = "limit"
TIMES: Final = ("seconds", "processor_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The times of one execution.

    Attributes:
        seconds: of the clock.
        processor_seconds: of all processes of this side, the JVM and Spark's Python workers included.
        broker_seconds: processor time of the broker's node meanwhile.
        load: the load average of the last minute, at the beginning.
    """

    seconds: float
    processor_seconds: float
    broker_seconds: float = 0.0
    load: float = 0.0


@dataclass(slots=True, kw_only=True)
class Entry:
    """A case on one side, in all rounds.

    Attributes:
        part: ``source``, ``sink``, ``schedule``, ``audit`` or ``plan``.
        side: :data:`NOW`, :data:`BEFORE` or :data:`LIMIT`.
        rows: rows or messages of an execution; 0 if the case has none.
        limits: the names of the limits of this case.
        missing: why this side was not measured; empty if it was.
    """

    part: str
    name: str
    side: str
    rows: int
    limits: tuple[str, ...] = ()
    runs: list[Measured] = field(default_factory=list)
    missing: str = ""

    def median(self, time: str) -> float:
        """The median of one of :data:`TIMES` over all rounds."""
        values: list[float] = [getattr(one, time) for one in self.runs]
        return statistics.median(values)

    def to_json(self) -> dict[str, Any]:
        """For the file of results."""
        about = {"part": self.part, "name": self.name, "side": self.side, "rows": self.rows}
        if self.missing:
            return {**about, "missing": self.missing}
        return {
            **about,
            **({"limits": list(self.limits)} if self.limits else {}),
            **{f"median_{time}": round(self.median(time), 3) for time in TIMES},
            "seconds": [round(one.seconds, 3) for one in self.runs],
            "processor_seconds": [round(one.processor_seconds, 3) for one in self.runs],
            "broker_seconds": [round(one.broker_seconds, 3) for one in self.runs],
            "load": [round(one.load, 2) for one in self.runs],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """From the file of results."""
        lists = ("seconds", "processor_seconds", "broker_seconds", "load")
        rounds = zip(*(found.get(name, ()) for name in lists), strict=True)
        return cls(
            part=found["part"],
            name=found["name"],
            side=found["side"],
            rows=found["rows"],
            limits=tuple(found.get("limits", ())),
            runs=[Measured(**dict(zip(lists, one, strict=True))) for one in rounds],
            missing=found.get("missing", ""),
        )


class Figures:
    """All entries of a run, in the order in which they were measured first."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries = {(one.part, one.name, one.side): one for one in entries}

    def entry(self, part: str, name: str, side: str, *, rows: int, limits: Sequence[str] = ()) -> Entry:
        """Get an entry; add it if it is new."""
        new = Entry(part=part, name=name, side=side, rows=rows, limits=tuple(limits))
        return self._entries.setdefault((part, name, side), new)

    def find(self, part: str, name: str, side: str) -> Entry | None:
        """Find an entry that was measured, or is known to be missing."""
        return self._entries.get((part, name, side))

    def of(self, part: str, side: str) -> list[Entry]:
        """The entries of a part on one side."""
        return [one for one in self._entries.values() if (one.part, one.side) == (part, side)]

    def parts(self) -> list[str]:
        """All parts that were measured."""
        return list(dict.fromkeys(one.part for one in self._entries.values()))

    def speeds(self, entry: Entry) -> dict[str, dict[str, float]]:
        """How fast a case is, relative to the other checkout and to each limit.

        The speed relative to another entry is the median over the rounds of the other's time divided by this one's, by
        the clock and by processor time. Above 1, this entry is faster.
        """
        others = {BEFORE: self.find(entry.part, entry.name, BEFORE)}
        others |= {name: self.find(entry.part, name, LIMIT) for name in entry.limits}
        return {
            name: {
                time: round(
                    statistics.median(
                        getattr(theirs, time) / max(getattr(ours, time), 1e-3)
                        for ours, theirs in zip(entry.runs, other.runs, strict=True)
                    ),
                    3,
                )
                for time in TIMES
            }
            for name, other in others.items()
            if other is not None and other.runs
        }

    def to_json(self) -> list[dict[str, Any]]:
        """For the file of results."""
        return [
            {**one.to_json(), **({"speed": self.speeds(one)} if one.side == NOW else {})}
            for one in self._entries.values()
        ]

    @classmethod
    def from_json(cls, found: Iterable[Mapping[str, Any]]) -> Self:
        """From the file of results."""
        return cls(Entry.from_json(one) for one in found)
