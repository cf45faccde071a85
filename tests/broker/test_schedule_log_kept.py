"""The schedule log survives commands for delay infrastructures."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import bide
from bide.admin.apply import exists
from bide.admin.infrastructure import install, remove
from bide.amqp.connection import Connection
from bide.error_queues import ErrorQueue, Selection
from bide.errors import DelayQueueError
from bide.management.api import ManagementApi
from bide.schedules.names import ScheduleNames
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.receiving import receive
from tests.broker.schedule_log import gating
from tests.support import Vhost

NAMES = ScheduleNames()
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
async def client(vhost: Vhost) -> AsyncIterator[bide.Client]:
    """A client with a schedule that waits, beside a delay infrastructure with the same prefix."""
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders")]))
        await client.schedule(b"kept", key="invoice:42", to="reminders", delay="5s")
        yield client


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("management", [False, True], ids=["amqp", "management"])
async def test_removing_a_delay_infrastructure_leaves_the_schedule_log(
    client: bide.Client,
    vhost: Vhost,
    vhost_connection: Connection,
    api: ManagementApi,
    tmp_path: Path,
    management: bool,
    force: bool,
) -> None:
    await install(vhost_connection, SMALL_CLOCK)
    removed = await remove(vhost_connection, SMALL_CLOCK, api if management else None, force=force)
    assert removed.removed.queues == len(SMALL_CLOCK.topology().queues)
    assert await exists(vhost_connection, NAMES.topology())
    async with gating(vhost.url, tmp_path / "gate"):
        assert [one.body for one in await receive(client, "reminders", 1)] == [b"kept"]


@pytest.mark.parametrize("management", [False, True], ids=["amqp", "management"])
@pytest.mark.parametrize("queue", [NAMES.log(0), NAMES.queries(0), NAMES.room(0)])
async def test_the_queues_of_the_schedule_log_are_refused(
    client: bide.Client, vhost: Vhost, queue: str, management: bool
) -> None:
    error_queue = ErrorQueue(client, queue, management_url=vhost.broker.management_url if management else NOWHERE)
    for operation in (error_queue.count, error_queue.discard, error_queue.archive, error_queue.retry):
        with pytest.raises(DelayQueueError, match="schedule log"):
            await operation(Selection())
    with pytest.raises(DelayQueueError, match="schedule log"):
        await ErrorQueue(client, "reminders").retry(Selection(), to=queue)
