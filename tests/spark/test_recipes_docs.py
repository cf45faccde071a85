"""The programs of docs/spark-recipes.md."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from bide.streams.log import Address
from tests import stream_contents
from tests.spark.streams import Streams
from tests.support import stream_port

PAGE = (Path(__file__).parents[2] / "docs" / "spark-recipes.md").read_text()
TODAY = datetime.now(UTC).date()


def program(heading: str) -> str:
    found = re.search(rf"\n## {heading}\n.*?```python\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return found[1]


def run(streams: Streams, heading: str, folder: Path, **replaced: str) -> dict[str, Any]:
    """Run a program of the page against the broker of the test; returns its variables."""
    port = stream_port(streams.vhost.broker)
    here = program(heading).replace("/data/", f"{folder}/")
    for old, new in {"here": streams.vhost.url, "there": streams.vhost.url, **replaced}.items():
        here = here.replace(f"amqp://{old}", new)
    read = f'.format("rabbitmq").options(url="{streams.vhost.url}", streamPort={port})'
    here = re.sub(r'(?<=read)\.format\("rabbitmq"\)|(?<=readStream)\.format\("rabbitmq"\)', read, here)
    here = here.replace('.option("producerName"', f'.option("streamPort", {port}).option("producerName"')
    # Retention of a stream goes by its own time, which is that of the test.
    here = here.replace("2026-11-29", str(TODAY + timedelta(days=1))).replace("2026-11-28", str(TODAY))
    found: dict[str, Any] = {"spark": streams.spark}
    exec(compile(here, "spark-recipes.md", "exec"), found)
    return found


def order(number: int, total: str, time: str) -> str:
    return f'{{"id": {number}, "total": {total}, "at": "{TODAY}T{time}:00Z"}}'


def test_json_gets_types_and_corrupt_bodies_are_kept(streams: Streams, tmp_path: Path) -> None:
    streams.declare("orders")
    streams.fill("orders", [order(7, "12.50", "10:05"), '{"id": "seven"}', "not JSON"])
    found = run(streams, "JSON with a schema", tmp_path)
    (row,) = found["orders"].collect()
    assert (row.offset, row.id, row.total) == (0, 7, Decimal("12.50"))
    assert [tuple(one) for one in found["corrupt"].orderBy("offset").collect()] == [
        (1, '{"id": "seven"}'),
        (2, "not JSON"),
    ]


def test_late_messages_count_until_the_watermark_and_in_a_backfill(streams: Streams, tmp_path: Path) -> None:
    streams.declare("orders")
    streams.fill("orders", [order(1, "1.00", "10:05"), order(2, "2.00", "12:30"), order(3, "4.00", "10:10")])
    run(streams, "Late data", tmp_path)
    streams.fill("orders", [order(4, "8.00", "14:00")])
    run(streams, "Late data", tmp_path)
    hours = {f"{row.hour:%H}": row.total for row in streams.spark.read.parquet(f"{tmp_path}/hourly").collect()}
    assert hours == {"10": Decimal("5.00")}, "both orders of ten o'clock, and no hour that may still get some"
    streams.fill("orders", [order(5, "16.00", "10:20")])
    progress = run(streams, "Late data", tmp_path)["hourly"].recentProgress
    assert sum(operator.numRowsDroppedByWatermark for one in progress for operator in one.stateOperators) == 1
    run(streams, "Backfill", tmp_path)
    rows = streams.spark.read.parquet(f"{tmp_path}/backfill/{TODAY}").collect()
    assert {row.hour[11:]: row["sum(total)"] for row in rows} == {
        "10": Decimal("21.00"),
        "12": Decimal("2.00"),
        "14": Decimal("8.00"),
    }


def test_a_mirror_copies_each_message_once(streams: Streams, tmp_path: Path) -> None:
    streams.declare("orders")
    streams.fill("orders", range(10), message_id="m", headers={"tenant": "acme"}, priority=3)
    broker = streams.vhost.broker
    there = broker.add_vhost(f"{streams.vhost.name}-mirror")
    try:
        import pika

        with pika.BlockingConnection(pika.URLParameters(there)) as connection:
            connection.channel().queue_declare("orders", durable=True, arguments={"x-queue-type": "stream"})
        run(streams, "A mirror on another broker", tmp_path, there=there)
        streams.fill("orders", range(10, 12))
        run(streams, "A mirror on another broker", tmp_path, there=there)
        address = Address.of(there, stream_port(broker))
        assert stream_contents.bodies(address, "orders") == [str(number) for number in range(12)]
        row = streams.batch(url=there, stream="orders", includeHeaders="true").orderBy("offset").first()
        assert row is not None
        assert (row.message_id, row.priority, row.headers["tenant"]) == ("m", 3, "acme")
    finally:
        broker.delete_vhost(f"{streams.vhost.name}-mirror")
