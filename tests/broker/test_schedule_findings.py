"""The findings of ``verify`` about the schedule log and its gates, and its protection."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import bide
from bide.admin.infrastructure import install
from bide.admin.protection import protect, protect_schedule_log
from bide.admin.schedule_log import declare_schedule_log
from bide.admin.verify import verify
from bide.amqp.connection import Connection
from bide.management.api import ManagementApi
from bide.schedules.encoding import encode
from bide.schedules.names import PARTITIONS, ScheduleNames
from bide.schedules.records import Beat
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.schedule_log import gating, now_ms, wait_for_leaders
from tests.broker.test_policies import OPERATOR, POLICY, put
from tests.support import Vhost
from tests.timeouts import TIMEOUT

NAMES = ScheduleNames()
CHECKS = {"schedule log", "schedule policies", "schedule replication", "schedule leaders", "gates", "gate clocks"}


@pytest.fixture
async def connection(vhost_connection: Connection) -> Connection:
    """A connection to a virtual host with a delay infrastructure and a schedule log."""
    await install(vhost_connection, SMALL_CLOCK)
    await declare_schedule_log(vhost_connection, NAMES)
    return vhost_connection


async def found(connection: Connection, api: ManagementApi | None) -> dict[str, tuple[str, str]]:
    """Status and texts of the findings about schedules, by check."""
    texts: dict[str, tuple[str, str]] = {}
    for one in (await verify(connection, SMALL_CLOCK, api)).findings:
        if one.check in CHECKS:
            texts[one.check] = (one.status, f"{texts.get(one.check, ('', ''))[1]}{one.text}\n")
    return texts


async def found_with_clocks(
    connection: Connection, api: ManagementApi | None, status: str
) -> dict[str, tuple[str, str]]:
    """The same, once the clocks of gates have this status.

    On a busy machine, a gate may be silent for the time of a check, or all of its beats may be heard late, as if its
    clock were slow.
    """
    async with asyncio.timeout(TIMEOUT):
        while (texts := await found(connection, api))["gate clocks"][0] != status:
            pass
    return texts


async def test_nothing_is_reported_without_a_schedule_log(vhost_connection: Connection, api: ManagementApi) -> None:
    await install(vhost_connection, SMALL_CLOCK)
    assert await found(vhost_connection, api) == {}


async def test_a_log_with_a_gate_has_no_problems(
    connection: Connection, api: ManagementApi, vhost: Vhost, tmp_path: Path
) -> None:
    async with gating(vhost.url, tmp_path / "gate"):
        await wait_for_leaders(vhost.url)
        texts = await found_with_clocks(connection, api, "ok")
    assert {status for status, _ in texts.values()} == {"ok"}
    assert texts.keys() == CHECKS - {"schedule leaders"}
    assert "1 gate" in texts["gate clocks"][1]


async def test_a_log_without_a_gate_is_a_warning(connection: Connection) -> None:
    texts = await found(connection, None)
    assert texts["gates"][0] == "warning"
    assert f"no gate leads {PARTITIONS} of {PARTITIONS} partitions" in texts["gates"][1]
    assert "gate clocks" not in texts
    assert texts["schedule policies"][0] == "not checked"


async def test_a_missing_stream_queue_and_binding_are_named(connection: Connection, api: ManagementApi) -> None:
    async with await connection.channel() as channel:
        await channel.delete_queue(NAMES.log(2))
        await channel.delete_queue(NAMES.room(3))
        await channel.unbind(bide.Binding(NAMES.gates, NAMES.log(4), "4"))
    status, text = (await found(connection, api))["schedule log"]
    assert status == "problem"
    assert f"do not exist, {NAMES.log(2)!r} and {NAMES.room(3)!r}" in text
    assert f"{NAMES.gates} -> {NAMES.log(4)} (4)" in text


@pytest.mark.parametrize(
    ("definition", "queue", "kind"),
    [
        ({"max-age": "1h"}, NAMES.log(0), POLICY),
        ({"max-length-bytes": 1_000_000}, NAMES.log(0), POLICY),
        ({"max-length-bytes": 1_000_000}, NAMES.log(0), OPERATOR),
        ({"max-length": 10}, NAMES.room(0), POLICY),
        ({"max-length": 10}, NAMES.room(0), OPERATOR),
        ({"overflow": "drop-head"}, NAMES.room(0), POLICY),
        ({"message-ttl": 5}, NAMES.queries(0), POLICY),
        ({"message-ttl": 5}, NAMES.queries(0), OPERATOR),
        ({"expires": 86_400_000}, NAMES.undeliverable, POLICY),
        ({"expires": 86_400_000}, NAMES.undeliverable, OPERATOR),
    ],
)
async def test_a_harmful_policy_is_named(
    connection: Connection, api: ManagementApi, vhost: Vhost, definition: dict[str, Any], queue: str, kind: str
) -> None:
    await put(api, vhost.name, definition, kind=kind, pattern=f"^{queue}$".replace(".", r"\."))
    status, text = (await found(connection, api))["schedule policies"]
    assert status == "problem"
    (key,) = definition
    assert f"sets {key} to {definition[key]} on 1 of" in text
    assert repr(queue) in text


async def test_a_longer_retention_is_not_a_problem_and_stays(
    connection: Connection, api: ManagementApi, vhost: Vhost, release: tuple[int, ...]
) -> None:
    await put(api, vhost.name, {"max-length-bytes": 8_000_000_000}, pattern=r"^bide\.v1\.schedule\.[0-9]$", priority=3)
    await protect(api, vhost.name, SMALL_CLOCK, release)
    await protect_schedule_log(api, vhost.name, NAMES, release)
    assert (await found(connection, api))["schedule policies"][0] == "ok"
    stream = await api.queue(vhost.name, NAMES.log(0))
    assert stream is not None
    assert stream.policy in (None, "housekeeping")


async def test_protection_covers_the_queues_beside_the_streams(
    connection: Connection, api: ManagementApi, vhost: Vhost, release: tuple[int, ...]
) -> None:
    await put(api, vhost.name, {"expires": 86_400_000, "message-ttl": 5}, priority=7)
    assert (await found(connection, api))["schedule policies"][0] == "problem"
    protection = await protect_schedule_log(api, vhost.name, NAMES, release)
    assert protection is not None
    assert (protection.policy.priority, protection.displaced) == (8, ("housekeeping",))
    assert (await found(connection, api))["schedule policies"][0] == "ok"


async def test_protection_needs_a_log(vhost: Vhost, api: ManagementApi, release: tuple[int, ...]) -> None:
    assert await protect_schedule_log(api, vhost.name, NAMES, release) is None
    assert await api.policies(vhost.name) == {}


async def test_a_gate_with_a_wrong_clock_is_named(connection: Connection) -> None:
    """A gate on a machine whose clock is a minute fast, as far as others can see it."""
    async with await connection.channel(confirms=True) as channel:
        await channel.consume(NAMES.queries(0), on_message=lambda _: None, on_end=lambda _: None)

        async def beat() -> None:
            while True:
                record = Beat(gate="fast", leads=True, clock=now_ms() + 60_000, after=0, count=0)
                await channel.publish(exchange=NAMES.gates, routing_key="0", values={}, body=encode(record))
                await asyncio.sleep(1)  # the interval of beats

        beating = asyncio.create_task(beat())
        try:
            texts = await found_with_clocks(connection, None, "problem")
        finally:
            beating.cancel()
    assert "the clock of fast is" in texts["gate clocks"][1]
    assert "ahead of that of this machine" in texts["gate clocks"][1]


async def test_a_forged_beat_does_not_count(connection: Connection) -> None:
    async with await connection.channel(confirms=True) as channel:
        await channel.consume(NAMES.queries(0), on_message=lambda _: None, on_end=lambda _: None)

        async def forge() -> None:
            while True:
                record = Beat(gate="forged", clock=now_ms() + 60_000, after=0, count=0)
                await channel.publish(exchange=NAMES.operations, routing_key="0", values={}, body=encode(record))
                await asyncio.sleep(1)  # the interval of beats

        forging = asyncio.create_task(forge())
        try:
            texts = await found(connection, None)
        finally:
            forging.cancel()
    assert texts["gate clocks"][0] == "not checked"
