"""One run of one case: its job, and the answer of the process that ran it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

_ROOT: Final = Path(__file__).parents[2]

Values = Mapping[str, float]
"""Name of a quantity, see :mod:`benchmarks.suite.quantities` -> what was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run.

    Attributes:
        work: the function that does it, as ``module:function``.
        options: its arguments, as JSON can carry them.
        url: of a virtual host of its own, with the password; empty for work that starts a broker itself.
        pid: of the broker's node; 0 without one.
        root: folder of another system whose RabbitMQ is used, for work that starts a broker itself.
    """

    work: str
    options: Mapping[str, Any]
    url: str = field(default="", repr=False)
    pid: int = 0
    root: str | None = None

    def to_json(self) -> str:
        """For the process that runs it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """In that process."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of it.

    Attributes:
        note: what to say about these numbers, if anything.
    """

    values: Values
    note: str = ""

    def to_json(self) -> str:
        """For the process that asked."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """In the process that asked."""
        return cls(**json.loads(text))


def environment(**variables: str) -> dict[str, str]:
    """The environment of a process that imports this package, wherever it is started."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, **variables, "PYTHONPATH": path}
