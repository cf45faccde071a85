"""Engine of a pipeline: this process, or Spark.

This process starts at once and needs no Java; Spark reads more formats, and tables of any size.
"""

from __future__ import annotations

from dataclasses import dataclass


class NeedsSparkError(NotImplementedError):
    """This process cannot do the work, and Spark can.

    The text is the reason, such as ``the column 'price' is decimal(10,2)``. Commands catch this error, and either start
    Spark or report the reason.
    """


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine that runs a command, and why.

    Attributes:
        is_spark: whether the engine is Spark; otherwise it is this process.
        reason: why this engine was chosen, worded to follow "because".
    """

    is_spark: bool
    reason: str

    def __str__(self) -> str:
        return f"{'Spark' if self.is_spark else 'this process'}, because {self.reason}"
