"""The examples and option tables of docs/spark-source.md."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pika
import pytest
from pyspark.errors import PySparkException

from bide.spark.columns import QUEUE_COLUMNS, STREAM_COLUMNS
from bide.spark.read_options import SOURCE_OPTIONS
from tests.spark.receiving import drain
from tests.support import Vhost, stream_port

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = (Path(__file__).parents[2] / "docs" / "spark-source.md").read_text()


def test_the_examples_read_messages(
    spark: SparkSession, vhost: Vhost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(pika.BlockingConnection(pika.URLParameters(vhost.idle_url))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("orders", durable=True, arguments={"x-queue-type": "stream"})
        channel.queue_declare("error", durable=True, arguments={"x-queue-type": "quorum"})
        channel.queue_declare("restored", durable=True, arguments={"x-queue-type": "quorum"})
        for name in ("orders", "orders", "error"):
            channel.basic_publish("", name, b"hello")
    monkeypatch.setenv("BIDE_URL", vhost.url)
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        here = (
            example.replace("amqp://user:password@broker/vhost", vhost.url)
            .replace('.format("rabbitmq")', f'.format("rabbitmq").option("url", "{vhost.url}")')
            .replace('.option("stream"', f'.option("streamPort", {stream_port(vhost.broker)}).option("stream"')
            .replace("/data/", f"{tmp_path}/")
        )
        exec(compile(here, "spark-source.md", "exec"), {"spark": spark})
    assert [bytes(row.value) for row in spark.read.parquet(f"{tmp_path}/orders").collect()] == [b"hello"] * 2
    assert [bytes(row.value) for row in spark.read.parquet(f"{tmp_path}/errors").collect()] == [b"hello"]
    assert [one.body for one in drain(vhost.url, "restored", 2)] == [b"hello"] * 2
    assert [bytes(row.value) for row in spark.read.parquet(f"{tmp_path}/orders.parquet").collect()] == [b"hello"] * 2


def test_a_view_reads_a_stream_and_a_table_names_it(spark: SparkSession, vhost: Vhost) -> None:
    with closing(pika.BlockingConnection(pika.URLParameters(vhost.idle_url))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("orders", durable=True, arguments={"x-queue-type": "stream"})
        channel.basic_publish("", "orders", b"hello")
    (example,) = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    place = f"OPTIONS (url '{vhost.url}', streamPort '{stream_port(vhost.broker)}', "
    spark.sql(example.replace("OPTIONS (", place))
    assert [(bytes(row.value), row.offset) for row in spark.table("orders").collect()] == [(b"hello", 0)]
    spark.catalog.dropTempView("orders")
    spark.sql("CREATE TABLE stored_orders (value binary) USING rabbitmq OPTIONS (stream 'orders')")
    try:
        with pytest.raises(PySparkException, match=r"use CREATE TEMPORARY VIEW .* or a DataFrame and its"):
            spark.table("stored_orders").collect()
    finally:
        spark.sql("DROP TABLE stored_orders")


def test_every_option_and_column_is_documented() -> None:
    options, _, queues = PAGE.partition("## Queues")
    assert SOURCE_OPTIONS - set(re.findall(r"`(\w+)`", PAGE)) == {"mode"}  # which is only a reference
    assert set(STREAM_COLUMNS) <= set(re.findall(r"`(\w+)`", options))
    assert set(QUEUE_COLUMNS) <= set(re.findall(r"`(\w+)`", queues))
