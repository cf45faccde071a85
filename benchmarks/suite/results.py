"""Results of a run with its machine and releases, as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.suite import schema
from benchmarks.suite.task import Answer
from bide.errors import InvalidInputError
from bide.local_broker.installation import numbers

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of the same, in one number and its limits."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Where the values of one round come from.

    Attributes:
        begun: when, ISO 8601.
        source: the commit of bide, with a plus where its files were changed; empty where it is not known.
        busy: cores that the machine was using just before, for whatever.
        stolen: cores that the host of a virtual machine gave to others meanwhile, on average. None of rounds that were
            kept before this was written down.
    """

    begun: str
    source: str
    busy: float
    stolen: float | None = None


@dataclass(slots=True, kw_only=True)
class Row:
    """Everything about one case.

    Attributes:
        values: name of a quantity -> one value per round.
        runs: as many as rounds. Results that were kept before this was written down have none.
        notes: what to say about them.
    """

    measurement: str
    case: str
    setting: str = ""
    values: dict[str, list[float]] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its measurement, case and setting, as failures begin."""
        return f"{self.measurement}, {self.case} {self.setting}".rstrip()

    @property
    def rounds(self) -> int:
        """How often it was measured."""
        return max((len(values) for values in self.values.values()), default=0)

    def add(self, answer: Answer, run: Run) -> None:
        """Add the numbers of one round."""
        self.runs.append(run)
        for name, value in answer.values.items():
            self.values.setdefault(name, []).append(value)
        self.note(answer.note)

    def note(self, text: str) -> None:
        """Add a note, unless it is there already."""
        if text and text not in self.notes:
            self.notes.append(text)

    def spread(self, quantity: str) -> Spread | None:
        """The median and the limits of a quantity; None where it was not measured."""
        values = self.values.get(quantity)
        return Spread.of(values) if values else None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """From JSON."""
        return cls(**{**data, "runs": [Run(**one) for one in data.get("runs", ())]})


@dataclass(slots=True, kw_only=True)
class Results:
    """A run of the benchmark.

    Attributes:
        date: when it began, ISO 8601.
        scale: part or multiple of the full size.
        machine: what it ran on, in words.
        releases: program or package -> release.
        failures: what could not be measured, and why.
    """

    date: str
    scale: float
    rounds: int
    machine: Mapping[str, str]
    releases: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def row(self, measurement: str, case: str, setting: str = "") -> Row:
        """The row of a case, made if there is none."""
        found = self.find(measurement, case, setting)
        if found is None:
            found = Row(measurement=measurement, case=case, setting=setting)
            self.rows.append(found)
        return found

    def find(self, measurement: str, case: str, setting: str = "") -> Row | None:
        """The row of a case, or None."""
        wanted = (measurement, case, setting)
        return next((row for row in self.rows if (row.measurement, row.case, row.setting) == wanted), None)

    def of(self, measurement: str) -> list[Row]:
        """The rows of a measurement, in the order in which they were measured first."""
        return [row for row in self.rows if row.measurement == measurement]

    def median(self, measurement: str, case: str, setting: str, quantity: str) -> float | None:
        """One number; None where it was not measured."""
        row = self.find(measurement, case, setting)
        spread = row.spread(quantity) if row is not None else None
        return None if spread is None else spread.median

    def measurements(self) -> Iterator[str]:
        """The names of what was measured."""
        yield from dict.fromkeys(row.measurement for row in self.rows)

    def without(self, measurements: Container[str]) -> Self:
        """The same, but for some measurements."""
        rows = [row for row in self.rows if row.measurement not in measurements]
        failures = [one for one in self.failures if _subject(one).partition(", ")[0] not in measurements]
        return replace(self, rows=rows, failures=failures)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"format": FORMAT, **asdict(self)}

    def keep(self, folder: Path, *, partial: bool = False) -> Path:
        """Write it to a file in a folder, which is made if it is missing; return the file.

        What was measured on the same day with the same release is kept beside it, but for the same measurements.

        Args:
            partial: not all cases were to be measured: the others of the same measurements are kept too.

        Raises:
            InvalidInputError: that was of another size, or of another machine or other releases.
        """
        folder.mkdir(parents=True, exist_ok=True)
        size = f"-x{self.scale:g}" if self.scale > 1 else ""
        file = folder / f"{self.date[:10]}-{self.releases['RabbitMQ']}{size}.json"
        kept = self._beside(Results.load(file), file, partial=partial) if file.exists() else self
        file.write_text(json.dumps(kept.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return file

    def _beside(self, before: Results, file: Path, *, partial: bool) -> Results:
        if not self._is_comparable(before):
            raise InvalidInputError(
                f"{file} holds results of another size ({before.scale:g}), or of another machine or other releases: "
                "move it away, or keep these in another folder"
            )
        own = set(self.measurements())
        kept = {row.name: row for row in before.rows if partial or row.measurement not in own}
        # A case that failed this time keeps what it had.
        new = {row.name: row for row in self.rows if row.values or not (partial and row.name in kept)}
        anew = new.keys() | {row.name for row in before.rows} - kept.keys()
        failures = [one for one in before.failures if _subject(one) not in anew]
        return replace(
            self,
            rounds=max(self.rounds, before.rounds),
            releases={**before.releases, **self.releases},
            rows=list({**kept, **new}.values()),
            failures=failures + [one for one in self.failures if _subject(one) not in kept.keys() - new.keys()],
        )

    def _is_comparable(self, other: Results) -> bool:
        common = self.releases.keys() & other.releases.keys()
        return (
            self.scale == other.scale
            and self.machine == other.machine
            and all(self.releases[name] == other.releases[name] for name in common)
        )

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read what :meth:`keep` wrote.

        Raises:
            InvalidInputError: it is something else.
        """
        try:
            return cls.from_dict(json.loads(file.read_text(encoding="utf-8")))
        except (AttributeError, RecursionError, TypeError, ValueError) as error:
            raise InvalidInputError(f"{file} holds no results of the benchmark: {error}") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """From JSON.

        Raises:
            InvalidInputError: it is something else, or of another release.
        """
        if data.get("format") != FORMAT:
            raise InvalidInputError(
                f"these are no results of the benchmark in format {FORMAT}, but {data.get('format')!r}: run it anew"
            )
        schema.check(data)
        kept = {name: value for name, value in data.items() if name not in ("format", "rows")}
        return cls(**kept, rows=[Row.from_dict(row) for row in data["rows"]])


def newest(kept: Iterable[Results]) -> list[Results]:
    """Of each release of RabbitMQ the newest run of each measurement; the newest release first, then the newest run.

    A run that has some of a measurement's cases only, or could measure none, does not take the place of a whole one. A
    run of more than the full size is shown beside the others.
    """
    found: list[Results] = []
    seen: dict[tuple[str, float], set[str]] = {}
    # ISO 8601 in UTC: the order of the texts is that of the times.
    for one in sorted(kept, key=lambda one: (numbers(one.releases["RabbitMQ"]), one.date), reverse=True):
        measured = seen.setdefault((one.releases["RabbitMQ"], max(one.scale, 1.0)), set())
        own = {name: {row.name for row in one.of(name) if row.values} for name in one.measurements()}
        if (left := one.without([name for name, rows in own.items() if rows and rows <= measured])).rows:
            found.append(left)
        measured.update(*own.values())
    return found


def _subject(failure: str) -> str:
    """The name of the row that a failure is of."""
    return failure.partition(": ")[0]
