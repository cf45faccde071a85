"""Distribution of bide and its settings to the Python processes of a Spark session."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bide.spark.bundle import own_bundle
from bide.spark.options import BROKER_VARIABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PYTHON_PATH: Final = "PYTHONPATH"
_INSTALLED: Final = Path(__file__).parents[2]  # a folder, or a zip file


def send_bundle(spark: SparkSession) -> None:
    """Send bide to all executors of a session, for jobs that are started from now on."""
    if is_connect(spark):
        spark.addArtifacts(str(own_bundle()), pyfile=True)
    else:
        spark.sparkContext.addPyFile(str(own_bundle()))
        _add_to_python_path(spark, own_bundle())


def pass_archive(spark: SparkSession) -> None:
    """Put a bide from ``--py-files`` on the search path of the Python processes on the driver's machine."""
    if not is_connect(spark) and zipfile.is_zipfile(_INSTALLED):
        _add_to_python_path(spark, _INSTALLED)


def pass_address(spark: SparkSession) -> None:
    """Pass the variables that locate the broker to the Python processes on the driver's machine.

    A variable that is not set is passed as an empty text.
    """
    if is_connect(spark):
        return
    environment = spark.sparkContext.environment
    # If the variables were never set here, the processes may have values of their own, from spark-env.sh.
    if any(name in os.environ or name in environment for name in BROKER_VARIABLES):
        # All variables together, so that a port from the start of the session is not combined with a new URL.
        environment.update({name: os.environ.get(name, "") for name in BROKER_VARIABLES})


def is_connect(spark: SparkSession) -> bool:
    """Whether this is a session of Spark Connect, whose driver is another process."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def _add_to_python_path(spark: SparkSession, archive: Path) -> None:
    """Put a file on the search path of the Python processes of a session.

    The process that plans a streaming read, on the driver's machine, looks for ``--py-files`` in the wrong folder
    (PySpark 4.0 to 4.3). On other machines, where the path does not exist, the entry has no effect.
    """
    environment = spark.sparkContext.environment
    known = environment.get(_PYTHON_PATH, "").split(os.pathsep)
    if str(archive) not in known:
        environment[_PYTHON_PATH] = os.pathsep.join([str(archive), *filter(None, known)])
