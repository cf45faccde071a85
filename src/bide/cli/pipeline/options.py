"""Options of Spark, and of the choice between Spark and this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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

    The command gets these arguments, and has to call :func:`refuse_without_spark` before it opens a session:

    - ``open_session``: a function that returns a context manager of a Spark session.
    - ``is_local``: whether the session runs on this machine alone.
    - ``reads_local_paths``: whether the session looks up a path without a scheme on this machine.
    - ``choice``: the :class:`EngineChoice`.
    - ``time_zone``: the value of ``--time-zone``.
    """

    @wraps(command)
    def wrapper(*args: Any, engine: EngineOption, choice: EngineChoice, **kwargs: Any) -> Any:
        return command(*args, choice=replace(choice, option=engine), **kwargs)

    option = click.option("--engine", type=click.Choice(ENGINE_OPTION_VALUES), default="auto", show_default=True,
                          help="Run in this process, or with Spark.")  # fmt: skip
    return option(_session_options(wrapper))  # type: ignore[no-any-return]  # the same parameters


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


def _session_options(command: Callable[..., Any]) -> Any:
    @wraps(command)
    def wrapper(*args: Any, master: str | None, spark_conf: tuple[str, ...], time_zone: str, **kwargs: Any) -> Any:
        configuration = pairs_of("--spark-conf", spark_conf, form="KEY=VALUE")

        def open_session(name: str, *, quiet: bool) -> Any:
            from bide.pipelines.session import session

            return session(master, name=name, configuration=configuration, time_zone=time_zone, quiet=quiet)

        from bide.pipelines.formats import reads_local_paths, runs_locally

        return command(
            *args,
            choice=EngineChoice(master=master, configuration=configuration),
            time_zone=time_zone,
            open_session=open_session,
            is_local=runs_locally(master),
            reads_local_paths=reads_local_paths(master, configuration),
            **kwargs,
        )

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
    ):
        wrapped = option(wrapped)
    return wrapped
