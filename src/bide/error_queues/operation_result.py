"""What came of an operation on failed messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationResult:
    """The result of an operation.

    Attributes:
        done: messages that it was done to.
        queues: those that went to a queue, by its name.
        kept: chosen messages that stay where they were, by the reason.
        seen: messages that were looked at.
        missing: ids that were asked for, and that no message has; of an operation that was interrupted, those that it
            has not come to.
        left: of an operation that was interrupted: chosen messages that it did not get to, or None where they were not
            counted. None for one that ended.
    """

    done: int = 0
    queues: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)
    seen: int = 0
    missing: tuple[str, ...] = ()
    left: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        found = {
            "done": self.done,
            "queues": dict(self.queues),
            "kept": dict(self.kept),
            "seen": self.seen,
            "missing": list(self.missing),
        }
        return found if self.left is None else {**found, "left": self.left}
