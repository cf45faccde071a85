"""RabbitMQ as the Spark data source ``rabbitmq``, for reading, streaming and writing.

It needs ``bide[spark]``. Spark finds the data source by itself where bide is installed, through the package
``pyspark_bide``; :func:`register` does it explicitly, for a session that looked for data sources before that, and
:func:`ship` for a cluster where bide is not installed.
"""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bide.spark.draining import Drained, drain

__all__ = ["Drained", "drain", "register", "ship"]


def register(spark: SparkSession) -> None:
    """Make the format ``rabbitmq`` known to a session; once more does no harm.

    On a classic session, reads and writes take ``BIDE_URL`` and ``BIDE_STREAM_PORT`` as they are now. Spark starts the
    processes that plan them, with the environment that the driver had when the session was started. They keep it where
    both variables are unset, and were never passed here.
    """
    from pyspark.errors import AnalysisException

    from bide.spark.datasource import RabbitMQDataSource
    from bide.spark.shipping import lend_address, lend_archive

    lend_archive(spark)
    lend_address(spark)
    try:
        spark.dataSource.register(RabbitMQDataSource)
    except AnalysisException as error:
        # PySpark 4.0 does not let one that it found by itself be registered.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


def ship(spark: SparkSession) -> None:
    """Give this very bide to the executors of a session, which need not have any, and register it.

    For a session that is there already it is what ``--py-files`` with the file of ``bide pipeline bundle`` is for one
    to be started; see docs/spark-cluster.md.
    """
    from bide.spark.shipping import send_bundle

    send_bundle(spark)
    register(spark)


def __getattr__(name: str) -> typing.Any:
    if name not in ("Drained", "drain"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import bide.spark.draining

    return getattr(bide.spark.draining, name)
