"""The registration of the data source in Spark."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, cast

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql.types import StructType

import pyspark_bide
from bide.errors import InvalidUrlError
from bide.spark import register
from bide.spark.datasource import RabbitMQDataSource
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_package_has_the_name_and_class_that_spark_looks_for() -> None:
    assert pyspark_bide.DefaultSource is RabbitMQDataSource
    assert pyspark_bide.DefaultSource.name() == "rabbitmq"


def test_without_pyspark_the_import_succeeds() -> None:
    """An import that fails would take the data sources of all other packages with it."""
    script = (
        "import sys; sys.modules['pyspark'] = None; import pyspark_bide; print(hasattr(pyspark_bide, 'DefaultSource'))"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=TIMEOUT)
    assert answer.stdout.strip() == "False"


def test_with_a_broken_pyspark_the_import_succeeds() -> None:
    script = (
        "import sys\n"
        "class Broken:\n"
        "    def __getattr__(self, name): raise RuntimeError('half installed')\n"
        "sys.modules['pyspark'] = Broken()\n"
        "import pyspark_bide; print(hasattr(pyspark_bide, 'DefaultSource'))"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=TIMEOUT)
    assert answer.stdout.strip() == "False"


def test_the_stream_port_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIDE_STREAM_PORT", "any")
    with pytest.raises(InvalidUrlError, match="BIDE_STREAM_PORT is 'any': give a port"):
        RabbitMQDataSource({"stream": "s"}).reader(StructType())


def test_registering_twice_is_allowed(spark: SparkSession) -> None:
    import bide.spark

    bide.spark.register(spark)
    with pytest.raises(Exception, match="rabbitmqq"):
        spark.read.format("rabbitmqq").load()


class Refused(AnalysisException):
    """An error of the JVM, as PySpark raises it."""

    def __init__(self, condition: str) -> None:
        super().__init__("refused")
        self.condition = condition

    def getCondition(self) -> str:  # noqa: N802 (Spark's name)
        return self.condition


class FoundBefore:
    """A session of PySpark 4.0 that has found the data source by itself: the tests run on a later one."""

    def __init__(self, condition: str) -> None:
        self.dataSource = self
        self.sparkContext = self
        self.environment: dict[str, str] = {}
        self.condition = condition

    def register(self, source: type[object]) -> None:
        raise Refused(self.condition)


def test_registering_an_automatically_found_source_is_allowed() -> None:
    register(cast("SparkSession", FoundBefore("DATA_SOURCE_ALREADY_EXISTS")))
    with pytest.raises(Refused):
        register(cast("SparkSession", FoundBefore("DATA_SOURCE_NOT_FOUND")))
