"""A limit on the messages that a task sends in a second, on a real broker."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bide.errors import BulkPublishError
from bide.spark.options import Options
from bide.spark.rows import RowConverter
from bide.spark.sending import WriteTask, send
from bide.spark.sink_settings import SinkSettings
from tests.spark.receiving import drain, new_queue

ROWS = 200


def attempt(url: str, *queues: str, **options: str) -> int:
    """One attempt at a task with rows for these queues in turn; returns the number of confirmed rows."""
    settings = SinkSettings.read(Options({"url": url, **options}), {})
    rows = RowConverter(("value", "queue"), settings.constants, settings.infrastructure)
    names = [queues[number % len(queues)] for number in range(ROWS)]
    batch = pa.record_batch([pa.array([str(number) for number in range(ROWS)]), pa.array(names)], ["value", "queue"])
    place = WriteTask(run="w", partition=0)
    return send(iter([batch]), rows, settings, place, file="part", begun=datetime.now(UTC)).confirmed


def test_a_task_takes_the_time_of_its_rate(vhost_url: str) -> None:
    queue = new_queue(vhost_url)
    begun = time.monotonic()
    assert attempt(vhost_url, queue, messagesPerSecond="500") == ROWS
    assert time.monotonic() - begun >= (ROWS - 50) / 500, "all but the first step waited"
    assert [int(one.body) for one in drain(vhost_url, queue, ROWS)] == list(range(ROWS))


def test_a_limited_task_names_the_rows_that_were_not_confirmed(vhost_url: str, tmp_path: Path) -> None:
    """In each of its steps."""
    queue = new_queue(vhost_url)
    with pytest.raises(BulkPublishError, match="row 1, message id w-0-1-"):
        attempt(vhost_url, queue, "missing", messagesPerSecond="1000")
    taken = attempt(vhost_url, queue, "missing", messagesPerSecond="1000", rejects=str(tmp_path))
    rejected = pq.read_table(tmp_path / "part.parquet").to_pylist()
    assert taken == ROWS // 2
    assert [int(one["value"]) for one in rejected] == list(range(1, ROWS, 2))
    assert {(one["queue"], one["reject_status"]) for one in rejected} == {("missing", "returned")}
