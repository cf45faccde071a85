"""RabbitMQ as the Spark data source ``rabbitmq``, for reading, streaming and writing.

The package needs ``bide[spark]``. Where bide is installed, Spark finds the data source itself, through the package
``pyspark_bide``. Call :func:`register` in a session that looked for data sources before bide was installed, and
:func:`ship` on a cluster without bide.
"""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bide.spark.draining import Drained, drain

__all__ = ["Drained", "drain", "register", "ship"]


def register(spark: SparkSession) -> None:
    """Register the format ``rabbitmq`` with a session; calling this twice is harmless.

    In a classic session, this call passes the current values of ``BIDE_URL`` and ``BIDE_STREAM_PORT`` to the Python
    processes in which Spark plans reads and writes. If both variables are unset, and no earlier call has passed them,
    these processes keep the values from the start of the session.
    """
    from pyspark.errors import AnalysisException

    from bide.spark.datasource import RabbitMQDataSource
    from bide.spark.shipping import pass_address, pass_archive

    pass_archive(spark)
    pass_address(spark)
    try:
        spark.dataSource.register(RabbitMQDataSource)
    except AnalysisException as error:
        # PySpark 4.0 refuses to register a data source that it has found itself.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


def ship(spark: SparkSession) -> None:
    """Send the bide of this process to the executors of a running session, and register the data source.

    To start a session with bide, use ``--py-files`` with the file that ``bide pipeline bundle`` writes; see
    docs/spark-cluster.md.
    """
    from bide.spark.shipping import send_bundle

    send_bundle(spark)
    register(spark)


def __getattr__(name: str) -> typing.Any:
    if name not in ("Drained", "drain"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import bide.spark.draining

    return getattr(bide.spark.draining, name)
