"""All measurements, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.suite.burst import BURST, MILLION
from benchmarks.suite.cancel import CANCELS
from benchmarks.suite.consume import CONSUME
from benchmarks.suite.keyed import KEYED_LATENESS
from benchmarks.suite.lateness import LATENESS
from benchmarks.suite.measurement import Measurement
from benchmarks.suite.memory import MEMORY
from benchmarks.suite.pending import PENDINGS
from benchmarks.suite.publish import PUBLISH
from benchmarks.suite.schedules import SCHEDULES
from benchmarks.suite.startup import STARTUP
from benchmarks.suite.store import STORE
from benchmarks.suite.sustained import SUSTAINED
from benchmarks.suite.takeover import TAKEOVERS

MEASUREMENTS: Final[Sequence[Measurement]] = (
    PUBLISH,
    CONSUME,
    LATENESS,
    SUSTAINED,
    BURST,
    MILLION,
    STORE,
    STARTUP,
    MEMORY,
    SCHEDULES,
    CANCELS,
    KEYED_LATENESS,
    TAKEOVERS,
    PENDINGS,
)
NAMES: Final = tuple(one.name for one in MEASUREMENTS)


def chosen(names: Sequence[str]) -> list[Measurement]:
    """The measurements of these names, or all of them, in the usual order."""
    return [one for one in MEASUREMENTS if not names or one.name in names]
