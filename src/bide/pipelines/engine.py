"""Engine of a pipeline: this process, or Spark.

This process starts at once and needs no Java; Spark reads more formats, and tables of any size.
"""

from __future__ import annotations

from dataclasses import dataclass


class NeedsSparkError(NotImplementedError):
    """Only Spark can run this. The text is the reason, such as ``the column 'price' is decimal(10,2)``.

    Commands start Spark then, or report the reason.
    """


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine that runs a command, and why.

    Attributes:
        is_spark: whether it is Spark.
        reason: the reason, to follow "because".
    """

    is_spark: bool
    reason: str

    def __str__(self) -> str:
        return f"{'Spark' if self.is_spark else 'this process'}, because {self.reason}"
