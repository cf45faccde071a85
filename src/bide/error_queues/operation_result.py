"""Results of operations on failed messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bide.errors import BideError


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationResult:
    """The result of an operation.

    Attributes:
        done: number of messages that were processed.
        queues: number of messages sent, by queue.
        kept: number of selected messages that stayed in the queue, by reason.
        seen: number of messages that were browsed.
        missing: selected ids that no message had; after an interruption, those that were not found so far.
        left: after an interruption, the number of selected messages that were not processed, or None if they were not
            counted. None if the operation ended.
        error: why the first of the messages in ``kept`` stayed, or None.
    """

    done: int = 0
    queues: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)
    seen: int = 0
    missing: tuple[str, ...] = ()
    left: int | None = None
    error: BideError | None = field(default=None, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON."""
        found = {
            "done": self.done,
            "queues": dict(self.queues),
            "kept": dict(self.kept),
            "seen": self.seen,
            "missing": list(self.missing),
        }
        return found if self.left is None else {**found, "left": self.left}
