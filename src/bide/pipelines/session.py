"""Spark session of ``bide pipeline``: its start, input tables and errors."""

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
from bide.pipelines.formats import guess_format, is_submitted, runs_locally
from bide.pipelines.requirements import NO_SPARK, missing
from bide.runtime.logs import logger
from bide.spark.shipping import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logger(__name__)

_times_lock: Final = threading.Lock()
_CONNECT_SCHEME: Final = "sc://"
_TRACEBACK: Final = "Traceback (most recent call last):"
NO_WORKER: Final = "Python worker failed to connect back"
"""Spark's error for a Python process that did not connect within ten seconds, a limit that cannot be configured.

Either the process could not start because a module is missing, or it is still starting because all cores are busy.
"""
# Errors if Python lacks a package. One process, which plans a streaming read, does not get the files sent with the job.
_PACKAGE_MISSING: Final = ("No module named 'bide'", NO_WORKER)
_UNANSWERED: Final = re.compile(r"An error occurred while calling \S+")
_BIDE_ERROR: Final = re.compile(
    r"^(?:[\w.]*: )?(?:bide\.errors\.)(\w+): (.+?)(?=\n\s*\n|\n[ \t]*at |\n\s*SQLSTATE|\Z)", re.M | re.S
)


@contextmanager
def session(
    master: str | None,
    *,
    name: str,
    configuration: Mapping[str, str],
    time_zone: str,
    quiet: bool = True,
    reason: str | None = None,
) -> Iterator[SparkSession]:
    """Start a Spark session, and stop it at the end. If there is one already, use it and leave it running.

    Args:
        master: the master, or ``sc://...`` for Spark Connect; None for that of ``spark-submit``, or all cores of this
            machine. If the session may use other machines, bide is sent to the executors.
        name: the name of the application.
        configuration: Spark configuration properties, which override those that this function sets.
        time_zone: the time zone of timestamps without an offset.
        quiet: suppress the output of Spark and its JVM.
        reason: why Spark is needed, for the error if Java is missing; None to leave it out.

    Raises:
        InvalidInputError: PySpark is missing, Java is missing or too old, or the time zone is unknown.
        BideError: Spark did not start, or its JVM ended.
    """
    try:
        from pyspark.errors import PySparkRuntimeError
        from pyspark.logger import PySparkLogger
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise InvalidInputError(NO_SPARK) from error
    builder = SparkSession.builder
    if master is not None and master.startswith(_CONNECT_SCHEME):
        builder = builder.remote(master)
    else:
        # Without this, workers may run another Python, which lacks bide and PyArrow.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.appName(name).config("spark.ui.enabled", "false")
        builder = builder.config("spark.ui.showConsoleProgress", "false")
        if quiet:
            builder = builder.config("spark.log.level", "OFF")
        if master is not None or not is_submitted():
            builder = builder.master(master or "local[*]")
        if runs_locally(master):
            builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    for key, value in configuration.items():
        builder = builder.config(key, value)
    found = SparkSession.getActiveSession()
    capture = _stderr_captured() if quiet and found is None else nullcontext()
    with spark_errors(), _interrupts_held() as interrupts, capture:
        try:
            spark = builder.getOrCreate()
        except ImportError as error:
            raise InvalidInputError(f"the master {master} needs more packages: install pyspark[connect]") from error
        except PySparkRuntimeError as error:
            # Checked only after a failure, because asking Java for its release takes as long as starting it.
            if (why_not := missing()) is None:
                raise
            needed = "" if reason is None else f"; Spark is needed because {reason}"
            raise InvalidInputError(f"{why_not}{needed}") from error
    # py4j logs each error that it raises, and PySpark logs errors of queries once more, as JSON.
    for noisy in (logging.getLogger("py4j"), PySparkLogger.getLogger("SQLQueryContextLogger")):
        noisy.setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_is_not_from_py4j)
    try:
        with _java_errors():
            for number in interrupts:
                signal.raise_signal(number)
            _set_time_zone(spark, time_zone)
            if not runs_locally(master):
                bide.spark.ship(spark)
            yield spark
    finally:
        if found is None:
            _stop(spark)


def _is_not_from_py4j(record: logging.LogRecord) -> bool:
    """Filter out the records of py4j, which logs a Ctrl-C as an error to the root logger."""
    return record.module != "java_gateway"


def parallelism(spark: SparkSession) -> int:
    """How many tasks a session runs at the same time, according to Spark."""
    if not is_connect(spark):
        return spark.sparkContext.defaultParallelism
    # Spark Connect has no call for it, but divides a range without a number of partitions by it.
    numbers = spark.range(1_000_000).selectExpr("spark_partition_id() as number")
    return int(numbers.selectExpr("max(number) as last").collect()[0]["last"]) + 1


@contextmanager
def _interrupts_held() -> Iterator[list[int]]:
    """Hold back a Ctrl-C during the block. The list gets its signal number, which the caller raises after the block.

    A second Ctrl-C raises KeyboardInterrupt immediately. The reason for the delay: if PySpark is interrupted while its
    JVM starts, it deletes the folder to which the JVM writes its port, and the JVM never ends. At the end of the block,
    the previous handler is restored, which replaces PySpark's own. PySpark's handler would call the JVM over a
    connection that may still wait for a response.
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
    """Set the time zone after the start: a session that is started with an unknown zone fails without a clear error."""
    from pyspark.errors import IllegalArgumentException

    try:
        spark.conf.set("spark.sql.session.timeZone", zone)
    except IllegalArgumentException as error:
        raise InvalidInputError(
            f"Spark does not know the time zone {zone!r}: give one such as UTC, Europe/Berlin or +02:00"
        ) from error


def _stop(spark: SparkSession) -> None:
    """Stop a session whose caller may have been interrupted in the middle of a call to the JVM.

    The response to that call may still arrive on its connection, and the next call would take it for its own response.
    So another thread stops the session, because each thread has its own connection.
    """

    def stop() -> None:
        try:
            with warnings.catch_warnings():
                # PySpark warns if the JVM has ended, but the failed call has already reported that.
                warnings.simplefilter("ignore", RuntimeWarning)
                spark.stop()
        except Exception:
            log.debug("Spark was not stopped", exc_info=True)

    stopping = threading.Thread(target=stop, name="spark stop")
    stopping.start()
    stopping.join()


@contextmanager
def _stderr_captured() -> Iterator[None]:
    """Capture standard error, also that of processes that the block starts, and print it only if the block fails."""
    sys.stderr.flush()
    original = os.dup(2)
    try:
        with tempfile.TemporaryFile() as captured:
            os.dup2(captured.fileno(), 2)
            try:
                yield
            except InvalidInputError:
                # This error is complete without the output of Spark's shell scripts.
                raise
            except BaseException:
                captured.seek(0)
                os.write(original, captured.read())
                raise
            finally:
                os.dup2(original, 2)
    finally:
        os.close(original)


def read(spark: SparkSession, source: str, *, format: str | None, options: Mapping[str, str]) -> DataFrame:
    """Read a table from files, or from the catalog with the format ``table``.

    CSV files have a header line, and all their columns are text, unless the options say otherwise.

    Args:
        format: the format of the files; None to guess it from the suffix.

    Raises:
        InvalidInputError: the table does not exist, or its format is unknown.
    """
    kind = format or guess_format(source)
    with spark_errors():
        if kind == "table":
            return spark.read.options(**options).table(source)
        defaults = {"header": "true"} if kind == "csv" else {}
        return spark.read.format(kind).options(**{**defaults, **options}).load(source)


@contextmanager
def spark_errors(*, sending: bool = False) -> Iterator[None]:
    """Translate an error of a Spark task or of the driver into an error of bide, in one sentence.

    Args:
        sending: whether the tasks send messages. If one task fails, other tasks may have sent messages. Therefore
            InvalidInputError, which promises that nothing was sent, becomes a plain :class:`bide.errors.BideError`.

    Raises:
        BideError: of the original class, if the task raised an error of bide.
    """
    from pyspark.errors import PySparkException

    with _java_errors():
        try:
            yield
        except PySparkException as error:
            raise _translate(str(error), sending=sending) from error
        except Exception as error:
            # Errors of the JVM have a class of py4j. It is compared by name, because Spark Connect works without py4j.
            if type(error).__name__ != "Py4JJavaError":
                raise
            raise _translate(str(error).partition("\n: ")[2], sending=sending) from error


@contextmanager
def _java_errors() -> Iterator[None]:
    """Raise a one-sentence error if the JVM ends during the block."""
    try:
        yield
    except Exception as error:
        if not _means_java_ended(error):
            raise
        raise BideError(
            "Spark's Java process has ended: it was killed, or ran out of memory. Give it more memory, such as with "
            "spark.driver.memory=4g in spark_conf=..."
        ) from error


def _means_java_ended(error: Exception) -> bool:
    if isinstance(error, ConnectionError | EOFError):
        # Other connections can fail too. For one to the JVM, the traceback has a module of py4j or PySpark.
        modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
        return any(name.startswith(("py4j.", "pyspark.")) for name in modules)
    kind = type(error).__name__
    # If the JVM returned the error, its text has a Java stack trace. Otherwise the JVM did not respond.
    return kind == "Py4JNetworkError" or (kind == "Py4JError" and bool(_UNANSWERED.fullmatch(str(error))))


def _translate(text: str, *, sending: bool = False) -> BideError:
    found = _BIDE_ERROR.search(text)
    if found is None and any(sign in text for sign in _PACKAGE_MISSING):
        late = " (or did not start within ten seconds, because all cores are busy)" if NO_WORKER in text else ""
        return BideError(
            f"a Python process of Spark lacks a package{late}: install bide[spark] in the Python that Spark uses; for "
            "Spark Connect, install bide[spark] and pyspark[connect] in the Python of the server"
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
    """One line of an error: the last line of a Python traceback, or else the first line."""
    lines = text.strip().splitlines()
    # The last traceback is the innermost one, with the cause; earlier ones are of functions that Spark called.
    starts = [place for place, line in enumerate(lines) if line.rstrip().endswith(_TRACEBACK)]
    for line in lines[starts[-1] + 1 :] if starts else ():
        if line.strip() and not line[0].isspace():
            return f"{lines[0].removesuffix(_TRACEBACK).strip()} {line.strip()}"
    return lines[0].strip() if lines else "an error without a message"


@contextmanager
def times_with_statistics(spark: SparkSession) -> Iterator[None]:
    """Write times to Parquet as INT64, by one thread at a time, because the setting is that of the session.

    Spark's default, INT96, has no minimum and maximum for a file, by which readers pass over files.
    """
    name = "spark.sql.parquet.outputTimestampType"
    with _times_lock:
        before = spark.conf.get(name, None)
        spark.conf.set(name, "TIMESTAMP_MICROS")
        try:
            yield
        finally:
            if before is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, before)
