"""Fixtures: one local Spark session for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pika
import pytest

import bide.spark
from tests.spark.spark_processes import session_builder, set_environment
from tests.spark.streams import Streams
from tests.support import Vhost

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

set_environment()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session with two cores, on loopback, with the format ``rabbitmq``."""
    session = (
        session_builder(tmp_path_factory.mktemp("spark"))
        .appName("bide tests")
        # Tests end before thorough compilation of queries pays.
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        # Queries on few rows are one job each, and not one for each stage.
        .config("spark.sql.adaptive.enabled", "false")
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
