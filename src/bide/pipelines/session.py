"""A Spark for the pipelines of the command line, what they read with it, and what its errors say."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from traceback import walk_tb
from types import FrameType
from typing import TYPE_CHECKING, Final

import bide.spark
from bide import errors
from bide.errors import BideError, InvalidInputError
from bide.pipelines.formats import guess_format
from bide.pipelines.requirements import missing
from bide.runtime.logs import logger
from bide.spark.shipping import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logger(__name__)

_CONNECT: Final = "sc://"
_DEFAULT_FILES: Final = ("spark.hadoop.fs.defaultFS", "spark.hadoop.fs.default.name")
_CONFIGURATIONS: Final = ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_CONF_DIR", "SPARK_HOME")
"""Where Spark looks for files that may say the same."""
_TRACEBACK: Final = "Traceback (most recent call last):"
NO_WORKER: Final = "Python worker failed to connect back"
"""What Spark says of a Python process that did not report within ten seconds, for which it has no setting.

It could not start, for want of a module, or has not started yet, for want of a free core.
"""
# What Spark says then. Files that are sent along are not found where it plans a streaming read.
_NO_PYTHON: Final = ("No module named 'bide'", NO_WORKER)
_UNANSWERED: Final = re.compile(r"An error occurred while calling \S+")
_OURS: Final = re.compile(
    r"^(?:[\w.]*: )?(?:bide\.errors\.)(\w+): (.+?)(?=\n\s*\n|\n[ \t]*at |\n\s*SQLSTATE|\Z)", re.M | re.S
)


@contextmanager
def session(
    master: str | None, *, name: str, configuration: Mapping[str, str], time_zone: str, quiet: bool = True
) -> Iterator[SparkSession]:
    """A Spark session, stopped at the end; one that is there already is taken, and left as it is.

    Args:
        master: where it runs, ``sc://...`` for Spark Connect; None for ``spark-submit``'s, or all cores of this
            machine. Where that is not this machine, the executors are given bide.
        name: of the application.
        configuration: of Spark; these win.
        time_zone: for times that name none.
        quiet: show nothing of what Spark and its JVM say beside errors that they raise.

    Raises:
        InvalidInputError: there is no PySpark, or no Java that it runs on, or no such time zone.
        BideError: it did not start, or its JVM ended.
    """
    try:
        from pyspark.errors import PySparkRuntimeError
        from pyspark.logger import PySparkLogger
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise InvalidInputError("this needs Spark: install bide[spark], and a Java 17 or later") from error
    builder = SparkSession.builder
    if master is not None and master.startswith(_CONNECT):
        builder = builder.remote(master)
    else:
        # Workers that ran another Python would have neither bide nor Arrow.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.appName(name).config("spark.ui.enabled", "false")
        builder = builder.config("spark.ui.showConsoleProgress", "false")
        if quiet:
            builder = builder.config("spark.log.level", "OFF")
        if master is not None or not _is_submitted():
            builder = builder.master(master or "local[*]")
        if runs_here(master):
            builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    for key, value in configuration.items():
        builder = builder.config(key, value)
    found = SparkSession.getActiveSession()
    aside = _stderr_aside() if quiet and found is None else nullcontext()
    with spark_errors(), _interrupts_held() as interrupts, aside:
        try:
            spark = builder.getOrCreate()
        except ImportError as error:
            raise InvalidInputError(f"the master {master} needs more packages: install pyspark[connect]") from error
        except PySparkRuntimeError as error:
            # Looked for only now: asking a Java for its release takes as long as starting it.
            if (why_not := missing()) is None:
                raise
            raise InvalidInputError(why_not) from error
    # Its connection to the JVM logs every error that it raises, and what is wrong with a query once more, as JSON.
    for noisy in (logging.getLogger("py4j"), PySparkLogger.getLogger("SQLQueryContextLogger")):
        noisy.setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_is_no_interrupt)
    try:
        with _java_may_end():
            for number in interrupts:
                signal.raise_signal(number)
            _set_time_zone(spark, time_zone)
            if not runs_here(master):
                bide.spark.ship(spark)
            yield spark
    finally:
        if found is None:
            _stop(spark)


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    """Whether a record is none of py4j's, which logs a Ctrl-C as an error, with the root logger."""
    return record.module != "java_gateway"


def runs_here(master: str | None) -> bool:
    """Whether :func:`session` with this master runs on this machine alone, for all that can be known before."""
    return master.startswith("local") if master is not None else not _is_submitted()


def reads_here(master: str | None, configuration: Mapping[str, str]) -> bool:
    """Whether a path without a scheme is surely one of this machine for :func:`session` with these."""
    elsewhere = any(name in configuration for name in _DEFAULT_FILES)
    return runs_here(master) and not elsewhere and not any(os.environ.get(name) for name in _CONFIGURATIONS)


def parallelism(spark: SparkSession) -> int:
    """How many tasks a session runs at the same time, as far as Spark tells."""
    if not is_connect(spark):
        return spark.sparkContext.defaultParallelism
    # Connect has no other way to ask: rows that nobody counted out are divided so.
    numbers = spark.range(1_000_000).selectExpr("spark_partition_id() as number")
    return int(numbers.selectExpr("max(number) as last").collect()[0]["last"]) + 1


def _is_submitted() -> bool:
    """Whether ``spark-submit`` started this process: then the JVM is there, and knows its master."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


@contextmanager
def _interrupts_held() -> Iterator[list[int]]:
    """Let a Ctrl-C wait for the end of the block, where it is in the list; a second one does not wait.

    PySpark that is interrupted while its JVM starts takes away the folder in which the JVM is about to write where it
    listens, and the JVM, which then has nobody to tell it, stays for good. Nor is PySpark's own handler of Ctrl-C left
    behind: it would call the JVM on the connection whose answer is being waited for.
    """
    held: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    before = signal.getsignal(signal.SIGINT)

    def hold(number: int, _: FrameType | None) -> None:
        if held:
            raise KeyboardInterrupt
        held.append(number)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, hold)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before)


def _set_time_zone(spark: SparkSession, zone: str) -> None:
    """Set it when the session is there: one that is started with a zone that is none does not say what is wrong."""
    from pyspark.errors import IllegalArgumentException

    try:
        spark.conf.set("spark.sql.session.timeZone", zone)
    except IllegalArgumentException as error:
        raise InvalidInputError(
            f"Spark does not know the time zone {zone!r}: give one such as UTC, Europe/Berlin or +02:00"
        ) from error


def _stop(spark: SparkSession) -> None:
    """Stop a session whose caller may have been interrupted in the middle of a call to the JVM.

    On that call's connection the answer to it would be taken for the one to the next. A thread has one of its own.
    """

    def stop() -> None:
        try:
            with warnings.catch_warnings():
                # Of a JVM that has ended: whoever called it has said so.
                warnings.simplefilter("ignore", RuntimeWarning)
                spark.stop()
        except Exception:
            log.debug("Spark was not stopped", exc_info=True)

    stopping = threading.Thread(target=stop, name="spark stop")
    stopping.start()
    stopping.join()


@contextmanager
def _stderr_aside() -> Iterator[None]:
    """Give the processes that are started meanwhile another standard error, and show it only if that fails."""
    sys.stderr.flush()
    usual = os.dup(2)
    try:
        with tempfile.TemporaryFile() as aside:
            os.dup2(aside.fileno(), 2)
            try:
                yield
            except InvalidInputError:
                # It says what is wrong; what a shell script said of it would only stand in the way.
                raise
            except BaseException:
                aside.seek(0)
                os.write(usual, aside.read())
                raise
            finally:
                os.dup2(usual, 2)
    finally:
        os.close(usual)


def read(spark: SparkSession, source: str, *, format: str | None, options: Mapping[str, str]) -> DataFrame:
    """A table: from files of a format, which their suffix tells if None; or one of the catalogue.

    CSV has a line of names first, and all its columns are text, unless the options say otherwise.

    Raises:
        InvalidInputError: it is not there, or its format is unknown.
    """
    kind = format or guess_format(source)
    with spark_errors():
        if kind == "table":
            return spark.read.options(**options).table(source)
        defaults = {"header": "true"} if kind == "csv" else {}
        return spark.read.format(kind).options(**{**defaults, **options}).load(source)


@contextmanager
def spark_errors(*, sending: bool = False) -> Iterator[None]:
    """Raise what a task or the driver of Spark reports as an error of bide, in one sentence.

    Args:
        sending: it is about tasks that send. When one of them fails, others may have sent something: an error of the
            caller's values, by which nothing was sent, becomes a plain :class:`bide.errors.BideError`.

    Raises:
        BideError: of the class that was raised there, where it was one of bide's.
    """
    from pyspark.errors import PySparkException

    with _java_may_end():
        try:
            yield
        except PySparkException as error:
            raise _translated(str(error), sending=sending) from error
        except Exception as error:
            # What happens to the JVM's side comes as an error of the bridge to it, py4j, which PySpark brings along.
            if type(error).__name__ != "Py4JJavaError":
                raise
            raise _translated(str(error).partition("\n: ")[2], sending=sending) from error


@contextmanager
def _java_may_end() -> Iterator[None]:
    """Say so in one sentence where the JVM has ended in the middle of the block."""
    try:
        yield
    except Exception as error:
        if not _is_of_an_ended_java(error):
            raise
        raise BideError(
            "Spark's Java process has ended: it was killed, or had not enough memory; give it more, such as by "
            "--spark-conf spark.driver.memory=4g"
        ) from error


def _is_of_an_ended_java(error: Exception) -> bool:
    if isinstance(error, ConnectionError | EOFError):
        # Of the connection to the JVM, for calls or for their results, and of no other.
        modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
        return any(name.startswith(("py4j.", "pyspark.")) for name in modules)
    kind = type(error).__name__
    # What the JVM answers has its trace; an error without is of a call to which there was no answer.
    return kind == "Py4JNetworkError" or (kind == "Py4JError" and bool(_UNANSWERED.fullmatch(str(error))))


def _translated(text: str, *, sending: bool = False) -> BideError:
    found = _OURS.search(text)
    if found is None and any(sign in text for sign in _NO_PYTHON):
        late = " (or did not start within ten seconds, where all cores are busy)" if NO_WORKER in text else ""
        return BideError(
            f"Spark plans and runs with a Python that does not have what it takes{late}: install bide[spark] there; on "
            "Spark Connect, in the Python of the server, bide[spark] and pyspark[connect]"
        )
    if found is None:
        return BideError(f"Spark: {_reason(text)}")
    kind, message = found[1], " ".join(found[2].split())
    ours: type[BideError] = getattr(errors, kind, BideError)
    if sending and issubclass(ours, InvalidInputError):
        return BideError(message)
    try:
        return ours(message)
    except TypeError:
        return BideError(message)


def _reason(text: str) -> str:
    """What went wrong, of several lines: what a stack trace of Python ends with, or the first line without one."""
    lines = text.strip().splitlines()
    # The innermost one comes last: those around it are of the functions that Spark called.
    starts = [place for place, line in enumerate(lines) if line.rstrip().endswith(_TRACEBACK)]
    for line in lines[starts[-1] + 1 :] if starts else ():
        if line.strip() and not line[0].isspace():
            return f"{lines[0].removesuffix(_TRACEBACK).strip()} {line.strip()}"
    return lines[0].strip() if lines else "it does not say what went wrong"
