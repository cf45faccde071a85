"""The examples and option tables of docs/spark-source.md."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pika
import pytest

from bide.spark.columns import QUEUE_COLUMNS, STREAM_COLUMNS
from bide.spark.read_options import KNOWN
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
        for name in ("orders", "orders", "error"):
            channel.basic_publish("", name, b"hello")
    monkeypatch.setenv("BIDE_URL", vhost.url)
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        here = (
            example.replace("amqp://user:password@broker/vhost", vhost.url)
            .replace('.option("stream"', f'.option("streamPort", {stream_port(vhost.broker)}).option("stream"')
            .replace("/data/", f"{tmp_path}/")
        )
        exec(compile(here, "spark-source.md", "exec"), {"spark": spark})
    assert [bytes(row.value) for row in spark.read.parquet(f"{tmp_path}/orders").collect()] == [b"hello"] * 2
    assert [bytes(row.value) for row in spark.read.parquet(f"{tmp_path}/errors").collect()] == [b"hello"]


def test_every_option_and_column_is_documented() -> None:
    options, _, queues = PAGE.partition("## Queues")
    assert KNOWN - set(re.findall(r"`(\w+)`", PAGE)) == {"mode"}  # which is only a reference
    assert set(STREAM_COLUMNS) <= set(re.findall(r"`(\w+)`", options))
    assert set(QUEUE_COLUMNS) <= set(re.findall(r"`(\w+)`", queues))
