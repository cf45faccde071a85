"""How far the demonstration is: written by what runs it, read by what shows it."""

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
    """A part of the demonstration.

    Attributes:
        started: in seconds of the monotonic clock.
        seconds: how long it took; None while it is under way.
        note: what came of it.
    """

    name: PhaseName
    started: float
    seconds: float | None = None
    note: str = ""

    @property
    def elapsed(self) -> float:
        """Seconds so far, or in all."""
        return time.monotonic() - self.started if self.seconds is None else self.seconds


@dataclass(slots=True, kw_only=True)
class Progress:
    """The state of a run.

    Attributes:
        plan: what is to be done.
        release: of the broker, once it is known.
        published: messages confirmed so far.
        delivered: copies that arrived so far.
        lateness: of these copies.
        phases: those that began, in order.
        on_end: called with every phase that ended well.
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
        """Time a phase; what is in the block may add a note."""
        phase = Phase(name, time.monotonic())
        self.phases.append(phase)
        yield phase
        phase.seconds = time.monotonic() - phase.started
        self.on_end(phase)

    def seconds(self) -> dict[str, float]:
        """How long each phase took."""
        return {phase.name: phase.elapsed for phase in self.phases}
