"""Options of Spark, and of the choice between Spark and this process."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any, TypeVar

import click

from bide.cli.pipeline.engine_choice import ENGINE_OPTION_VALUES, EngineChoice, EngineOption
from bide.cli.selecting import pairs_of
from bide.errors import InvalidInputError
from bide.pipelines.engine import Engine
from bide.runtime.logs import logger

log = logger(__name__)

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


def engine_options(command: _Decorated) -> _Decorated:
    """Add the options of Spark and ``--engine``, for a command that does not always need Spark.

    The command gets the argument ``choice``, an :class:`EngineChoice`, and has to call :func:`refuse_without_spark`
    before it opens a session.
    """

    @wraps(command)
    def wrapper(
        *args: Any, engine: EngineOption, master: str | None, spark_conf: tuple[str, ...], time_zone: str, **kwargs: Any
    ) -> Any:
        configuration = pairs_of("--spark-conf", spark_conf, form="KEY=VALUE")
        choice = EngineChoice(option=engine, master=master, configuration=configuration, time_zone=time_zone)
        return command(*args, choice=choice, **kwargs)

    wrapped: Any = wrapper
    for option in (
        click.option(
            "--time-zone",
            metavar="ZONE",
            default="UTC",
            show_default=True,
            help="Time zone of timestamps without an offset.",
        ),
        click.option(
            "--spark-conf", multiple=True, metavar="KEY=VALUE", help="Spark configuration property. Repeatable."
        ),
        click.option("--master", metavar="URL", help="Spark master. [default: that of spark-submit, or local[*]]"),
        click.option(
            "--engine",
            type=click.Choice(ENGINE_OPTION_VALUES),
            default="auto",
            show_default=True,
            help="Run in this process, or with Spark.",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]  # the same parameters


def refuse_missing_packages(**packages: str) -> None:
    """Raise an error if packages that a command needs in this process are not installed.

    Args:
        packages: the import name of each package, with the name for the error.

    Raises:
        InvalidInputError: one of the packages is missing.
    """
    if missing := [called for name, called in packages.items() if find_spec(name) is None]:
        names = " and ".join(missing)
        raise InvalidInputError(
            f"{names} {'is' if len(missing) == 1 else 'are'} missing: install bide[pipeline], or bide[spark] and Java "
            "for large tables"
        )


def refuse_missing_audit_packages(choice: EngineChoice) -> None:
    """Raise an error if packages for the tables of an audit are missing, as far as is known before the tables are read.

    Both engines need PyArrow; without DuckDB, Spark reads the tables.

    Raises:
        InvalidInputError: one of the packages is missing, or the options contradict each other.
    """
    forced = choice.forced()
    if forced is not None and forced.is_spark:
        refuse_without_spark(forced)
    else:
        refuse_missing_packages(pyarrow="PyArrow", **({} if forced is None else {"duckdb": "DuckDB"}))


def refuse_without_spark(engine: Engine) -> None:
    """Raise an error if PySpark is not installed. Log the engine.

    Args:
        engine: the engine, with the reason why the command needs Spark.

    Raises:
        InvalidInputError: PySpark or PyArrow is missing.
    """
    from bide.pipelines.requirements import missing_packages

    log.info("engine: %s", engine)
    if (why_not := missing_packages()) is not None:
        raise InvalidInputError(f"{why_not}; Spark is needed because {engine.reason}")
