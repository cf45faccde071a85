"""How bide gets to the Python processes of a Spark that do not have it installed."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bide.spark.bundle import own_bundle
from bide.spark.options import VARIABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PATH: Final = "PYTHONPATH"
_INSTALLED: Final = Path(__file__).parents[2]  # a folder, or a zip file


def send_bundle(spark: SparkSession) -> None:
    """Have Spark hand bide to all executors of a session, for what is registered or run from now on."""
    if is_connect(spark):
        spark.addArtifacts(str(own_bundle()), pyfile=True)
    else:
        spark.sparkContext.addPyFile(str(own_bundle()))
        _lend(spark, own_bundle())


def lend_archive(spark: SparkSession) -> None:
    """Let the processes beside the driver find the bide that came by ``--py-files``, if it did."""
    if not is_connect(spark) and zipfile.is_zipfile(_INSTALLED):
        _lend(spark, _INSTALLED)


def lend_address(spark: SparkSession) -> None:
    """Tell the processes beside the driver which broker its environment names, or that it names none any more."""
    if is_connect(spark):
        return
    environment = spark.sparkContext.environment
    # Where nothing was ever said, those processes may know by themselves: from spark-env.sh.
    if any(name in os.environ or name in environment for name in VARIABLES):
        # All of them: an older port, which the session was started with, would be taken for one of this broker.
        environment.update({name: os.environ.get(name, "") for name in VARIABLES})


def is_connect(spark: SparkSession) -> bool:
    """Whether a session is one of Spark Connect, where the driver is elsewhere."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def _lend(spark: SparkSession, archive: Path) -> None:
    """Put a file on the search path of Python processes.

    The process that plans a streaming read, on the driver's machine, looks for ``--py-files`` in a folder in which they
    are not (PySpark 4.0 to 4.3). Where the path does not exist, on other machines, it does nothing.
    """
    environment = spark.sparkContext.environment
    known = environment.get(_PATH, "").split(os.pathsep)
    if str(archive) not in known:
        environment[_PATH] = os.pathsep.join([str(archive), *filter(None, known)])
