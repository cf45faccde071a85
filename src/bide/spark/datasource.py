"""The data source ``rabbitmq``, as Spark's Python Data Source API has it.

Spark makes it anew in several processes, pickles it, and asks it for readers and writers more than once: it holds
the options and nothing else. Options are checked where a reader or writer is made, on the driver.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from pyspark.sql.datasource import DataSource


class RabbitMQDataSource(DataSource):
    """Streams and queues of RabbitMQ as tables. Options and columns: docs/spark.md."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        # The driver's environment, taken along to the executors.
        self.environment = {name: value for name, value in os.environ.items() if name == "BIDE_URL"}

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "rabbitmq"
