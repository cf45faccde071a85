"""The examples and tables of docs/spark-sink.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bide
from bide.delay.by_name import LAYOUTS
from bide.durations import parse_delay
from bide.spark.options import Options
from bide.spark.sink_columns import COLUMNS
from bide.spark.sink_settings import SINK_OPTIONS, SinkSettings
from bide.streams.amqp10 import decode
from bide.streams.log import Address
from tests import stream_contents
from tests.polling import wait_until
from tests.spark.receiving import drain, rest
from tests.spark.streams import Streams
from tests.spark.test_keyed_sink import with_gate
from tests.support import stream_port

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = (Path(__file__).parents[2] / "docs" / "spark-sink.md").read_text()
OF_COLUMNS = SINK_OPTIONS & set(COLUMNS)
"""Options that replace columns."""


def table(heading: str) -> Iterator[list[str]]:
    """The lines of the table below a heading, each as its cells."""
    found = re.search(rf"\n## {heading}\n(.*?)\n## ", PAGE, re.DOTALL)
    assert found
    lines = [line for line in found[1].splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def names(text: str) -> list[str]:
    return re.findall(r"`([\w-]+)`", text)


def test_every_column_is_documented() -> None:
    assert sorted(name for cells in table("Columns") for name in names(cells[0])) == sorted(COLUMNS)


def test_every_option_is_documented() -> None:
    replacing = re.search(r"An option with the name of a column replaces that column[^:]*:(.*?)\.", PAGE, re.DOTALL)
    assert replacing
    assert sorted(names(replacing[1])) == sorted(OF_COLUMNS)
    assert sorted(name for cells in table("Options") for name in names(cells[0])) == sorted(SINK_OPTIONS - OF_COLUMNS)


def test_the_documented_defaults_are_used() -> None:
    options = {name: cells for cells in table("Options") for name in names(cells[0])}
    found = SinkSettings.read(Options({"queue": "orders"}), {})
    default = {name: cells[1].strip("`") for name, cells in options.items()}
    assert found.infrastructure == bide.Clock()
    assert found.infrastructure.name == default["layout"]
    assert [default["layout"], *names(options["layout"][2])] == list(LAYOUTS)
    assert (found.window, found.timeout) == (int(default["window"]), parse_delay(default["timeout"]))
    assert (default["declare"], default["isolated"]) == ("true", "false")
    assert found.declare
    assert found.constants == {"to": "orders"}
    assert (default["idPrefix"], default["rejects"], found.id_prefix, found.rejects) == ("", "", None, None)


async def all_scheduled(client: bide.Client) -> list[Any]:
    return [one async for one in client.list_scheduled()]


def test_the_examples_send_their_rows(spark: SparkSession, vhost_url: str, tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 6

    def run(number: int, **known: Any) -> dict[str, Any]:
        here = (
            examples[number]
            # Two of them leave the broker to the environment.
            .replace('.option("url", "amqp://localhost")', "")
            .replace(
                '.format("rabbitmq")',
                f'.format("rabbitmq").options(url="{vhost_url}", maxDelay="20s", resolution="50ms")',
            )
            .replace("/data/", f"{tmp_path}/")
            .replace('parquet("', f'parquet("{tmp_path}/')
            .replace("'5m'", "'1s'")
            .replace("interval 1 hour", "interval 1 second")
        )
        found = {"spark": spark, **known}
        exec(compile(here, "spark-sink.md", "exec"), found)
        return found

    with bide.connect_sync(vhost_url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
    due = "current_timestamp() + interval '1' second"
    spark.sql(f"select 7 as order_id, 'ana@shop' as email, {due} as due").write.parquet(f"{tmp_path}/reminders")
    run(0)
    (message,) = drain(vhost_url, "orders", 1)
    assert (message.body, message.due is None) == (b'{"order_id":7,"email":"ana@shop"}', False)

    events = f"{tmp_path}/events"
    spark.sql("select cast('paid' as binary) as value").write.parquet(events)
    query = run(1, events=spark.readStream.schema("value binary").parquet(events))["query"]
    try:
        (message,) = drain(vhost_url, "orders", 1)
    finally:
        query.stop()
    assert message.due is not None
    assert message.sent_at is not None
    assert (message.body, round((message.due - message.sent_at) / timedelta(seconds=1), 1)) == (b"paid", 1.0)

    run(2, orders=spark.sql("select 7 as order_id"))
    (message,) = drain(vhost_url, "orders", 1)
    assert (message.body, message.due is None) == (b'{"order_id":7}', False)

    spark.sql("select 7 as id, timestamp'2040-01-02' as due").write.parquet(f"{tmp_path}/invoices")
    run(3)
    (one,) = with_gate(vhost_url, tmp_path / "gate", all_scheduled)
    assert (one.key, one.to, one.due_time) == ("invoice:7", "reminders", datetime(2040, 1, 2, tzinfo=UTC))

    rows = spark.sql("select 'late' as value, 'later' as queue union all select null, 'orders'")
    rows.write.format("rabbitmq").mode("append").options(url=vhost_url, rejects=f"{tmp_path}/rejects").save()
    with bide.connect_sync(vhost_url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("later")]))
    rejected = {row["value"]: row["message_id"] for row in run(5)["rejected"].collect()}
    assert [(one.body.decode(), one.message_id) for one in drain(vhost_url, "later", 1)] == list(rejected.items())
    assert rest(vhost_url, "orders") == []


def test_the_example_copies_a_stream(streams: Streams, tmp_path: Path) -> None:
    streams.declare("orders", "copy-of-orders")
    (example,) = re.findall(r"```python\n([^`]*producerName[^`]*)```", PAGE)
    vhost = streams.vhost
    port = stream_port(vhost.broker)
    place = f'.format("rabbitmq").options(url="{vhost.url}", streamPort={port})'
    found: dict[str, Any] = {"spark": streams.spark}
    here = example.replace('.format("rabbitmq")', place).replace("/data/", f"{tmp_path}/")
    exec(compile(here, "spark-sink.md", "exec"), found)
    address = Address.of(vhost.url, port)
    try:
        streams.fill("orders", ["paid"], message_id="m-1")
        wait_until(lambda: stream_contents.bodies(address, "copy-of-orders"), "the message is copied")
    finally:
        found["copying"].stop()
    (copy,) = stream_contents.messages(address, "copy-of-orders")
    assert (copy.body, decode(copy.properties)) == (b"paid", ["m-1"])
