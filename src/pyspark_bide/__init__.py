"""Where Spark finds bide's data source ``rabbitmq``.

Spark imports every package named ``pyspark_*`` and registers its ``DefaultSource``. One that fails to import would
take the data sources of all the others with it: where something is missing, this one has no ``DefaultSource``.
"""

from __future__ import annotations

import logging

try:
    from bide.spark.datasource import RabbitMQDataSource as DefaultSource
except Exception:
    # Packages of bide[spark] are missing, or of a release that breaks in its own way.
    logging.getLogger("bide").debug("there is no data source rabbitmq", exc_info=True)
    __all__ = []
else:
    __all__ = ["DefaultSource"]
