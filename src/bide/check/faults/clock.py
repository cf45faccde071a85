"""Wrong clocks of nodes, by libfaketime."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bide.check.faults.fault import Fault, FaultSite
from bide.errors import InvalidInputError
from bide.local_broker import LocalBroker

_STEP: Final = 600.0
"""Seconds."""

_DRIFT: Final = 0.01
"""Seconds that the clock of a running Erlang node gains or loses per second, at most, to follow that of its machine."""

_LIBRARIES: Final = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib*/faketime/libfaketimeMT.so.1")
_RELOAD: Final = 1.0
"""Seconds after which libfaketime reads its file again."""


def faketime(folder: Path) -> dict[str, str]:
    """Copy libfaketime to a folder that the nodes can read; return the environment that makes them use it.

    Raises:
        InvalidInputError: libfaketime is not installed.
    """
    found = [path for pattern in _LIBRARIES for path in Path("/").glob(pattern.lstrip("/"))]
    if not found:
        raise InvalidInputError("clock faults need libfaketime: install the package libfaketime")
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(shutil.copy(found[0], folder))
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_CACHE_DURATION": f"{_RELOAD:g}",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }


def set_clock(node: LocalBroker, seconds: float) -> None:
    """Set the clock of a node that runs with :func:`faketime`: this many seconds ahead of the right time."""
    path = node.folder / "home" / ".faketimerc"
    part = path.with_suffix(".part")
    part.write_text(f"{seconds:+.3f}\n")
    part.replace(path)


@contextmanager
def _step(site: FaultSite, node: LocalBroker, *, seconds: float) -> Iterator[str]:
    """Kill the node, change its clock and restart it; the repair does the same with the right time.

    A running Erlang node corrects its clock by one percent at most, so a step takes effect when the node starts.
    """
    step = site.rng.choice((seconds, -seconds))
    node.kill()
    set_clock(node, step)
    node.restart()
    yield f"{node.name} by {step:+g} s"
    node.kill()
    set_clock(node, 0)
    node.restart()


@contextmanager
def _drift(site: FaultSite, node: LocalBroker) -> Iterator[str]:
    """Set the clock of the node's machine by ten minutes, which the node follows slowly, and set it right again.

    If that clock itself drifts by one percent, the node follows late, and in ten seconds hardly at all.
    """
    direction = site.rng.choice((1, -1))
    set_clock(node, direction * _STEP)
    yield f"{node.name} by {direction * _DRIFT:+.0%}"
    set_clock(node, 0)


def step_of(seconds: float) -> Fault:
    """A fault that moves the clock of a node forward or back by this many seconds."""
    return Fault(
        name="clock-step",
        what="the clock of a node is wrong by ten minutes",
        inject=partial(_step, seconds=seconds),
        clock_step=seconds,
        need="faketime",
    )


STEP = step_of(_STEP)
DRIFT = Fault(
    name="clock-drift",
    what="the clock of a node is too fast or too slow",
    inject=_drift,
    twice=False,
    clock_rate=_DRIFT,
    need="faketime",
)
