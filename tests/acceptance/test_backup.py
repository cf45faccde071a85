"""A copy of the data folder of a stopped node, as docs/clusters.md describes it."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

import bide
from tests.broker.receiving import receive
from tests.check_histories import broken_promises
from tests.polling import wait_until
from tests.support import Rabbitmq

CLOCK: Final = bide.Clock(max_delay="1m", resolution="100ms")
SECONDS: Final = range(1, 31)
"""Delays. Some messages are due while the broker is stopped, and others after the start of the copy."""


async def publish(url: str) -> dict[bytes, datetime]:
    """Publish delayed messages; return their due times."""
    async with bide.connect(url, infrastructure=CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        await client.bind("q")
        due: dict[bytes, datetime] = {}
        for seconds in SECONDS:
            body = str(seconds).encode()
            receipt = await client.publish(body, to="q", delay=timedelta(seconds=seconds))
            assert receipt.due is not None
            due[body] = receipt.due
        return due


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_waiting_messages_come_from_a_copy_of_the_folder_and_none_is_early(
    rabbitmq: Rabbitmq, tmp_path: Path
) -> None:
    folder, copy = tmp_path / "broker", tmp_path / "copy"
    with rabbitmq.start(folder) as broker:
        due = await publish(broker.url)
    stopped = datetime.now(UTC)
    shutil.copytree(folder, copy)
    shutil.rmtree(folder)
    wait_until(lambda: datetime.now(UTC) > min(due.values()), "a message is due while nothing runs")
    shutil.copytree(copy, folder)  # the files of quorum queues have its path
    with rabbitmq.start(folder) as broker:
        async with bide.connect(broker.url) as client:
            arrived = await receive(client, "q", len(due))
    assert broken_promises(tmp_path / "history", due, arrived, [stopped]) == {}
