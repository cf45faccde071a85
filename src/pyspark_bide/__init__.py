"""Where Spark finds bide's data source ``rabbitmq``.

Spark imports every package named ``pyspark_*`` and registers its ``DefaultSource``. One that fails to import would
take the data sources of all the others with it: where something is missing, this one has no ``DefaultSource``.
"""

from __future__ import annotations

try:
    from bide.spark.datasource import RabbitMQDataSource as DefaultSource
except ImportError:  # an installation without the packages of bide[spark]
    __all__ = []
else:
    __all__ = ["DefaultSource"]
