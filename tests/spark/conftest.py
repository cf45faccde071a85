"""Fixtures: one local Spark session for all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pika
import pytest

import bide.spark
from tests.spark.spark_processes import QUICK_JAVA
from tests.spark.streams import Streams
from tests.support import Vhost

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What decides which Python the workers run, and where Spark listens; read when it starts.
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session with two cores, on loopback, with the format ``rabbitmq``."""
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("spark")
    session = (
        SparkSession.builder.master("local[2]")
        .appName("bide tests")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        # Tests end before thorough compilation, of Java or of queries, pays.
        .config("spark.driver.extraJavaOptions", QUICK_JAVA)
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        .config("spark.ui.enabled", "false")
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.task.maxFailures", "1")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    bide.spark.register(session)
    yield session
    session.stop()


@pytest.fixture
def streams(vhost: Vhost, spark: SparkSession) -> Iterator[Streams]:
    """A virtual host whose streams Spark reads."""
    with closing(pika.BlockingConnection(pika.URLParameters(vhost.idle_url))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        yield Streams(vhost, spark, channel)
