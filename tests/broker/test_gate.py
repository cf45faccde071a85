"""A gate delivers scheduled messages on a real broker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import bide
from bide.topology import Queue, Topology
from tests.broker.receiving import receive
from tests.broker.schedule_log import NAMES, LogClient, gating, log_client, now_ms
from tests.leaks import no_leaks
from tests.support import Vhost


@pytest.fixture(autouse=True)
async def quiet() -> AsyncIterator[None]:
    """A gate may leave neither a task nor an unhandled error behind."""
    async with no_leaks():
        yield


@pytest.fixture
async def client(vhost: Vhost, quiet: None) -> AsyncIterator[bide.Client]:
    """A client, with a target and the schedule log."""
    async with bide.connect(vhost.url) as client:
        await client.declare(NAMES.topology() | Topology(queues=[Queue.quorum("mails")]))
        yield client


@pytest.fixture
async def log(vhost: Vhost, client: bide.Client) -> AsyncIterator[LogClient]:
    """A client of the log."""
    async with log_client(vhost.url) as log:
        yield log


async def test_a_message_is_delivered_when_it_is_due_as_it_was_sent(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    async with gating(vhost.url, tmp_path) as gate:
        properties = {"message_id": "m", "correlation_id": "c", "headers": {"list": [1, {"a": None}]}}
        record = await log.add("invoice:42", "q:mails", 1000, body=b"\x00body", properties=properties)
        (message,) = await receive(client, "mails", 1)
        assert now_ms() >= record.due
    assert message.body == b"\x00body"
    values = message.raw.values
    assert (values["message_id"], values["correlation_id"]) == ("m", "c")
    assert values["headers"] == {
        "list": [1, {"a": None}],
        "bide-key": "invoice:42",
        "bide-schedule-id": str(record.request),
        "bide-due": record.due,
        "bide-to": "q:mails",
    }
    assert gate.done.delivered == 1
