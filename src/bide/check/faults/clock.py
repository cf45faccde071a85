"""Wrong clocks of nodes, by libfaketime."""

from __future__ import annotations

import shutil
import threading
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
"""Seconds that the clock gains per second."""

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
    ended = threading.Event()

    def drift() -> None:
        offset = 0.0
        while not ended.wait(_RELOAD):
            offset += _RELOAD * _DRIFT
            set_clock(node, offset)

    thread = threading.Thread(target=drift, name="clock drift", daemon=True)
    thread.start()
    yield f"{node.name} by {_DRIFT:+.0%}"
    ended.set()
    thread.join()
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
    name="clock-drift", what="the clock of a node is too fast", inject=_drift, clock_rate=_DRIFT, need="faketime"
)
