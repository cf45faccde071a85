"""Choice of the engine of a command, by its options and the environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from bide.errors import InvalidInputError
from bide.pipelines.engine import Engine, NeedsSparkError
from bide.pipelines.formats import is_submitted

Wanted = Literal["auto", "local", "spark"]
WANTED: Final[tuple[Wanted, ...]] = get_args(Wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """What the options and the environment of a command say about its engine.

    Attributes:
        wanted: the engine that was asked for.
        master: the master of Spark; None for the default.
        configuration: the configuration of Spark.
    """

    wanted: Wanted = "auto"
    master: str | None = None
    configuration: Mapping[str, str]

    def forced(self) -> Engine | None:
        """The engine, if the options or the environment decide without a look at the input.

        Raises:
            InvalidInputError: the options contradict each other.
        """
        why = self._why_spark()
        if self.wanted == "local":
            if self.master is not None or self.configuration:
                raise InvalidInputError(
                    "--engine local does not start Spark, which --master and --spark-conf are for: leave them out, or "
                    "give --engine spark"
                )
            return Engine(False, "--engine local was given")
        return None if why is None else Engine(True, why)

    def _why_spark(self) -> str | None:
        if self.wanted == "spark":
            return "--engine spark was given"
        if self.master is not None:
            return "--master was given"
        if self.configuration:
            return "--spark-conf was given"
        if is_submitted():
            return "spark-submit started this program"
        if _has_session():
            return "this program has a Spark session"
        return None

    def refuse(self, error: NeedsSparkError) -> Engine:
        """Spark for an input that this process cannot read.

        Raises:
            InvalidInputError: ``--engine local`` was given.
        """
        if self.wanted == "local":
            raise InvalidInputError(f"{error}, which only Spark supports: leave out --engine local") from error
        return Engine(True, str(error))


def _has_session() -> bool:
    """Whether this process has a Spark session. PySpark is not imported for this."""
    sql = sys.modules.get("pyspark.sql")
    return sql is not None and sql.SparkSession.getActiveSession() is not None
