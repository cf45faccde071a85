"""The sizes and frequencies of a history, drawn from its seed."""

from __future__ import annotations

import random
from itertools import count, islice

from bide.schedules.names import partition_of
from tests.schedule_simulation.world import Scale

RESERVATION = 8_000

SMALL = Scale(retention=512_000, segment=16_000, reservations=512_000 // 4 // RESERVATION)
"""An eighth, 64 KB, has room for the largest state and a chunk: ten schedules that wait, those under way, and a hundred
answers that are remembered."""

LARGE = Scale(retention=64_000_000, segment=8_000_000, reservations=64_000_000 // 4 // RESERVATION)

PARTITION = 3
"""In small logs all keys are in one partition."""

TARGETS = (*("open",) * 6, "slow", "stuck", "gone", "foreign")
"""``slow`` refuses for a while, ``stuck`` always, ``gone`` does not exist, ``foreign`` is not allowed."""


class Scenario:
    """What a seed draws for its history.

    Args:
        rng: draws. It has drawn nothing yet.
        operations: how many operations clients start, about. In a small log the number is fixed.
        small_logs: the part of the histories with a small log.
    """

    def __init__(self, seed: int, rng: random.Random, operations: int, small_logs: float) -> None:
        self.is_small = rng.random() < small_logs
        self.scale = SMALL if self.is_small else LARGE
        # In a small log, enough that retention takes its beginning, and slowly enough that answers are forgotten.
        # More would outgrow an eighth of its retention: no answer is forgotten while no gate runs.
        self.operations = 1500 if self.is_small else operations
        self.pause = 0.2 if self.is_small else rng.choice((0.002, 0.02, 0.2))
        self.span = rng.choice((0.1, 0.5, 5.0) if self.is_small else (0.5, 5.0, 60.0))
        names = (f"k{number}" for number in count())
        if self.is_small:
            names = (one for one in names if partition_of(one) == PARTITION)
        self.keys = list(islice(names, rng.choice((3, 10) if self.is_small else (3, 30, 300))))
        self.rare_keys = list(islice(names, 3))
        self.targets = tuple(one for one in TARGETS if not (self.is_small and one in ("slow", "stuck")))
        self.body_size = 600 if self.is_small else 10
        # In every fifth history, changes are aimed at the moments when schedules are claimed.
        self.is_aimed = seed % 5 == 4 and not self.is_small
        if self.is_aimed:
            self.span, self.pause = 0.3, 0.02
        # Every tenth history schedules in bulk and moves by filter, too. The others draw as they did without that.
        self.has_bulk = seed % 10 == 3
        self.trouble = rng.choice((0.0, 0.0002, 0.001, 0.005))
        self.is_recurring = rng.random() < 0.15 and not self.is_small
        # How often a connection breaks just when it carries something that matters.
        self.cut_claims = rng.choice((0.0, 0.0, 0.05, 0.3))
        self.cut_requests = rng.choice((0.0, 0.0, 0.02, 0.1))
        self.weights: tuple[float, ...]
        if self.is_small:
            self.weights = (80, 1, 8, 4, 1, 2, 1, 0, 1, 1)
        elif self.is_recurring:
            self.weights = (10, 50, 16, 8, 3, 4, 3, 0.3, 2, 1)
        else:
            self.weights = (50, 6, 16, 8, 3, 4, 3, 1, 2, 2)
        self.freeze_starts = rng.choice((0.0, 0.2)) if self.is_small else 0.0
        # A gate that crashes again and again while it carries stops before the log is lost, as it should.
        self.carry_kills = rng.choice((0, 1, 2)) if self.is_small else 0
        self.outages = 2 if self.is_small else 0
        self.prefetch = rng.choice((3, 30, 1000)) if self.is_small else 1000
