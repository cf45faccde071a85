"""Choice of the engine of a command, by its options and the environment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args

from bide.errors import InvalidInputError
from bide.pipelines.engine import Engine, NeedsSparkError
from bide.pipelines.formats import is_submitted, reads_local_paths, runs_locally

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from datetime import tzinfo

    from pyspark.sql import SparkSession

_Converted = TypeVar("_Converted")

EngineOption = Literal["auto", "local", "spark"]
ENGINE_OPTION_VALUES: Final[tuple[EngineOption, ...]] = get_args(EngineOption)
PATHS_ON_CLUSTER: Final = "the configuration of Hadoop or Spark may place paths on a cluster"
"""The reason for Spark if a path may be in another file system than that of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """The choice of an engine for a command, by the options and the environment.

    Attributes:
        option: the value of ``--engine``.
        master: the Spark master; None for the default.
        configuration: Spark configuration properties.
        time_zone: the name of the time zone of times without an offset.
    """

    option: EngineOption = "auto"
    master: str | None = None
    configuration: Mapping[str, str]
    time_zone: str = "UTC"

    @property
    def is_local(self) -> bool:
        """Whether a Spark session would run on this machine alone."""
        return runs_locally(self.master)

    @property
    def reads_local_paths(self) -> bool:
        """Whether a Spark session would look up a path without a scheme on this machine."""
        return reads_local_paths(self.master, self.configuration)

    def open_session(self, name: str, engine: Engine, *, quiet: bool) -> AbstractContextManager[SparkSession]:
        """Open a Spark session with these options, as :func:`bide.pipelines.session.session` does."""
        from bide.pipelines.session import session

        return session(
            self.master,
            name=name,
            configuration=self.configuration,
            time_zone=self.time_zone,
            quiet=quiet,
            reason=engine.reason,
        )

    def forced(self) -> Engine | None:
        """The engine if the options or the environment decide; None if the input decides.

        Raises:
            InvalidInputError: the options contradict each other.
        """
        why = self._why_spark()
        if self.option == "local":
            if self.master is not None or self.configuration:
                raise InvalidInputError(
                    "--engine local does not start Spark, so --master and --spark-conf have no effect: leave them "
                    "out, or give --engine spark"
                )
            return Engine(False, "--engine local was given")
        return None if why is None else Engine(True, why)

    def _why_spark(self) -> str | None:
        if self.option == "spark":
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

    def of_table(
        self,
        source: str,
        convert: Callable[[Any, tzinfo], _Converted],
        *,
        format: str | None,
        options: Mapping[str, str],
    ) -> tuple[Engine, _Converted | None]:
        """The engine for a table, and the converted table if the engine is this process.

        Args:
            source: the table; *source*, *format* and *options* are those of :func:`bide.pipelines.session.read`.
            convert: converts the Arrow table, given the time zone of times without an offset, or raises
                :class:`NeedsSparkError`.

        Raises:
            InvalidInputError: only Spark can read the table, and ``--engine local`` was given.
        """

        def work(largest: int | None) -> tuple[str, _Converted]:
            from bide.pipelines.small_table import read_small
            from bide.pipelines.small_times import zone_of

            table, size = read_small(source, format=format, options=options, largest=largest)
            return size, convert(table, zone_of(self.time_zone))

        return self.in_process(work)

    def in_process(self, work: Callable[[int | None], tuple[str, _Converted]]) -> tuple[Engine, _Converted | None]:
        """The engine for some work, and the result of the work if the engine is this process.

        Args:
            work: a function whose argument is the largest size of its input in bytes, or None for any size. It returns
                the reason for this process and the result, or raises :class:`NeedsSparkError`.

        Raises:
            InvalidInputError: only Spark can do the work, and ``--engine local`` was given.
        """
        forced = self.forced()
        if forced is not None and forced.is_spark:
            return forced, None
        try:
            if forced is None and not self.reads_local_paths:
                raise NeedsSparkError(PATHS_ON_CLUSTER)
            from bide.pipelines.small_table import MAX_SMALL_BYTES

            why, result = work(MAX_SMALL_BYTES if forced is None else None)
        except NeedsSparkError as error:
            return self.choose_spark(error), None
        return forced or Engine(False, why), result

    def choose_local(self, why: str) -> Engine:
        """Choose this process, for work that Spark cannot do.

        Raises:
            InvalidInputError: the options or the environment choose Spark.
        """
        forced = self.forced()
        if forced is not None and forced.is_spark:
            raise InvalidInputError(f"{why}, but {forced.reason}: give --engine local, or use another format")
        return forced or Engine(False, why)

    def choose_spark(self, error: NeedsSparkError) -> Engine:
        """Choose Spark, for an input that this process cannot read.

        Raises:
            InvalidInputError: ``--engine local`` was given.
        """
        if self.option == "local":
            raise InvalidInputError(f"{error}, which only Spark supports: leave out --engine local") from error
        return Engine(True, str(error))


def _has_session() -> bool:
    """Whether this process has a Spark session. PySpark is not imported for this."""
    sql = sys.modules.get("pyspark.sql")
    return sql is not None and sql.SparkSession.getActiveSession() is not None
