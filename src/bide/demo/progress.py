"""Progress of the demonstration, shared by its run and its display."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from bide.demo.figures import Histogram
from bide.demo.plan import DemoPlan

PhaseName = Literal["start", "apply", "publish", "wait", "shop", "audit", "report", "clean"]


@dataclass(slots=True)
class Phase:
    """A phase of the demonstration.

    Attributes:
        started: when the phase started, in seconds of the monotonic clock.
        seconds: the duration of the phase; None while it runs.
        note: a summary of the result, for the display.
    """

    name: PhaseName
    started: float
    seconds: float | None = None
    note: str = ""

    @property
    def elapsed(self) -> float:
        """Seconds since the start of the phase, up to its end."""
        return time.monotonic() - self.started if self.seconds is None else self.seconds


@dataclass(slots=True, kw_only=True)
class Progress:
    """The state of a run.

    Attributes:
        plan: the plan that is run.
        release: the release of the broker; empty until it is known.
        published: messages confirmed so far.
        delivered: copies that arrived so far.
        lateness: the lateness of these copies.
        phases: the phases that have started, in order.
        on_end: called with each phase that ended without an error.
    """

    plan: DemoPlan
    release: str = ""
    published: int = 0
    delivered: int = 0
    lateness: Histogram = field(default_factory=Histogram)
    phases: list[Phase] = field(default_factory=list)
    on_end: Callable[[Phase], None] = lambda phase: None

    @contextmanager
    def phase(self, name: PhaseName) -> Iterator[Phase]:
        """Measure the duration of a phase; the block may set its note."""
        phase = Phase(name, time.monotonic())
        self.phases.append(phase)
        yield phase
        phase.seconds = time.monotonic() - phase.started
        self.on_end(phase)

    def seconds(self) -> dict[str, float]:
        """The duration of each phase."""
        return {phase.name: phase.elapsed for phase in self.phases}
