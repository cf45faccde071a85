"""All measurements, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bide.bench.burst import BURST
from bide.bench.consume import CONSUME
from bide.bench.lateness import LATENESS
from bide.bench.measurement import Measurement
from bide.bench.memory import MEMORY
from bide.bench.publish import PUBLISH
from bide.bench.startup import STARTUP
from bide.bench.store import STORE
from bide.bench.sustained import SUSTAINED

MEASUREMENTS: Final[Sequence[Measurement]] = (PUBLISH, CONSUME, LATENESS, SUSTAINED, BURST, STORE, STARTUP, MEMORY)
NAMES: Final = tuple(one.name for one in MEASUREMENTS)


def chosen(names: Sequence[str]) -> list[Measurement]:
    """The measurements of these names, or all of them, in the usual order."""
    return [one for one in MEASUREMENTS if not names or one.name in names]
