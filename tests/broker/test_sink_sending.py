"""Sending of the rows of a Spark task, without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pika
import pyarrow as pa
import pytest

import bide
from bide.errors import BulkPublishError
from bide.spark.options import Options
from bide.spark.rows import RowConverter
from bide.spark.sending import WriteTask, send
from bide.spark.sink_settings import SinkSettings

ROWS = 30_000


class DeletingRows(RowConverter):
    """Rows that delete their queue when a thousand of them are sent."""

    url = ""
    taken = 0

    def messages(self, *given: Any, **more: Any) -> Iterator[Any]:
        """The messages of a batch."""
        for message in super().messages(*given, **more):
            self.taken += 1
            if self.taken == 1_000:
                with pika.BlockingConnection(pika.URLParameters(self.url)) as connection:
                    connection.channel().queue_delete("orders")
            yield message


def test_a_queue_deleted_in_mid_write_is_named_at_once(vhost_url: str) -> None:
    with bide.connect_sync(vhost_url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
    settings = SinkSettings.read(Options({"url": vhost_url, "queue": "orders", "window": "500"}), {})
    rows = DeletingRows(("value",), settings.constants, settings.infrastructure)
    rows.url = vhost_url
    batch = pa.record_batch([pa.array(["x"] * 10_000)], ["value"])
    with pytest.raises(BulkPublishError, match=r"were not confirmed .* returned: .*'orders'"):
        send(
            iter([batch] * (ROWS // 10_000)),
            rows,
            settings,
            WriteTask(run="r", partition=0),
            file="f",
            begun=datetime.now(UTC),
        )
    # At most a thousand until the deletion, and what the window, the batches in memory, and one check hold.
    assert rows.taken < 15_000
