"""Programs in other languages by docs/wire-contract.md, beside bide on a real broker."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import bide
from bide import ScheduleOutcome
from bide.durations import to_milliseconds
from bide.local_broker import LocalBroker
from bide.schedules.names import partition_of
from tests.broker.receiving import eventually, fresh, ready_at, receive
from tests.broker.schedule_log import NAMES, gating
from tests.readme import blocks, code, commands_of, table
from tests.support import Vhost
from tests.timeouts import MAX_LATENESS
from tests.wire_programs import PAGE, Program, built
from tests.wire_vectors import FILE


@pytest.fixture(
    scope="module", params=["node", "java", pytest.param("go", marks=[pytest.mark.long, pytest.mark.timeout(1200)])]
)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The program in each language."""
    return built(request.param, tmp_path_factory.mktemp("wire"))


async def test_the_program_passes_the_vectors(program: Program) -> None:
    vectors = json.loads(FILE.read_text(encoding="utf-8"))
    count = sum(len(one) for one in vectors.values() if not isinstance(one, str))
    assert await program.run("", "vectors", str(FILE)) == f"{count} vectors are right\n"


async def test_bide_receives_what_the_program_delays(program: Program, client: bide.Client, clock_url: str) -> None:
    queue, exchange = fresh("wire"), fresh("wire.topic")
    await client.declare(
        bide.Topology(
            [bide.Exchange(exchange, "topic")],
            [bide.Queue.quorum(queue)],
            [bide.Binding(exchange, queue, "a.*.c.d.#"), bide.Binding(exchange, queue, "#.e")],
        )
    )
    targets: list[dict[str, Any]] = [
        {"queue": queue},
        {"queue": queue, "isolated": True},
        {"exchange": exchange, "routing_key": "a.b.c.d.e"},
    ]
    for target in targets:
        printed = await program.run(clock_url, "delay", json.dumps(target), "1050", "größe")
        (message,) = await receive(client, queue, 1)
        assert message.due is not None
        assert message.lateness is not None
        assert printed == f"due {to_milliseconds(message.due)}\n"
        assert timedelta(0) <= message.lateness < MAX_LATENESS
        assert message.sent_at is not None
        assert message.due - message.sent_at == timedelta(milliseconds=1050)
        assert (message.body.decode(), message.headers) == ("größe", {})
        assert (message.exchange, message.routing_key) == (
            target.get("exchange", ""),
            target.get("routing_key", queue),
        )
    assert await ready_at(clock_url, queue) == 0


async def test_the_program_settles_what_bide_delays(program: Program, client: bide.Client, clock_url: str) -> None:
    queue = fresh("wire")
    await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
    delays = (1050, 300)
    sent = [
        await client.publish(f"{delay}", to=queue, delay=timedelta(milliseconds=delay), headers={"number": delay})
        for delay in delays
    ]
    received = await program.received(clock_url, queue, 2)
    # On a slow machine, the second publish may come so late that its message is due last.
    expected = sorted((to_milliseconds(one.due), delay) for one, delay in zip(sent, delays, strict=True) if one.due)
    assert [(one["due"], int(one["body"])) for one in received] == expected
    assert [one["headers"] for one in received] == [{"number": delay} for _, delay in expected]
    assert all(one["received"] >= one["due"] and one.get("key") is None for one in received)
    # Without an acknowledgement they would be back.
    assert await ready_at(clock_url, queue) == 0


@pytest.mark.parametrize("delay", ["50ms", None])
async def test_the_program_delays_a_copy_of_what_it_received(
    program: Program, client: bide.Client, clock_url: str, delay: str | None
) -> None:
    queue = fresh("wire")
    await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
    sent: dict[str, Any] = {
        "message_id": "m-1",
        "correlation_id": "c-1",
        "reply_to": "answers",
        "content_type": "text/plain",
        "content_encoding": "utf-8",
        "type": "Order",
        "app_id": "shop",
        "timestamp": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "priority": 3,
        "expiration": timedelta(hours=1),
    }
    first = await client.publish(b"again", to=queue, delay=delay, headers={"tenant": "a"}, **sent)
    await program.run(clock_url, "retry", queue, "550")
    (message,) = await receive(client, queue, 1)
    assert message.due is not None
    if first.due is not None:
        assert message.due - first.due >= timedelta(milliseconds=550)
    assert (message.body, message.headers) == (b"again", {"tenant": "a"})
    assert {name: getattr(message, name) for name in sent} == sent
    assert await ready_at(clock_url, queue) == 0


async def test_the_program_reports_what_it_cannot_do(program: Program, clock_url: str, vhost: Vhost) -> None:
    delay = ("delay", json.dumps({"queue": "missing"}), "1000", "x")
    for url, reason in ((clock_url, "no queue 'missing'"), (vhost.url, "no exchange 'bide.v1.complete'")):
        exit_code, printed, errors = await program.result(url, *delay)
        assert (exit_code, printed) == (1, "")
        assert reason in errors


async def test_bide_and_the_program_schedule_and_cancel_by_key(program: Program, vhost: Vhost, tmp_path: Path) -> None:
    target = json.dumps({"queue": "reminders"})
    async with bide.connect(vhost.url) as client, gating(vhost.url, tmp_path):
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders")]))
        version = (await program.run(vhost.url, "schedule", "größe:1", target, "3600000", "one")).split()[-1]
        found = await client.scheduled("größe:1")
        assert found is not None
        assert (found.version, found.to, found.body) == (version, "reminders", b"one")
        seen = json.loads(await program.run(vhost.url, "scheduled", "größe:1"))
        assert found.due_time is not None
        assert seen == {"state": "waiting", "due": to_milliseconds(found.due_time), "version": version}
        assert (await client.cancel("größe:1", if_version=version)).outcome is ScheduleOutcome.CANCELLED

        # A large record also replaces what waits.
        for body in ("two", "x" * 70_000):
            await program.run(vhost.url, "schedule", "invoice:2", target, "3600000", body)
        moved = await client.reschedule("invoice:2", delay="0s")
        assert moved.outcome is ScheduleOutcome.MOVED
        (message,) = await receive(client, "reminders", 1)
        assert (message.key, message.body) == ("invoice:2", b"x" * 70_000)

        printed = await program.run(vhost.url, "schedule", "invoice:3", target, "500", "three")
        (message,) = await receive(client, "reminders", 1)
        assert (message.key, message.schedule_id, message.body.decode()) == ("invoice:3", printed.split()[-1], "three")
        assert message.lateness is not None
        assert timedelta(0) <= message.lateness < MAX_LATENESS

        await client.schedule(b"four", key="invoice:4", to="reminders", delay="1h")
        outcomes = [await program.run(vhost.url, "cancel", key) for key in ("invoice:4", "invoice:3", "none")]
        assert outcomes == ["cancelled\n", "too-late\n", "not-found\n"]
        assert await client.count_scheduled(prefix="") == 0
        assert json.loads(await program.run(vhost.url, "scheduled", "none")) == {"state": "none"}

        made = await client.schedule(b"five", key="invoice:5", to="reminders", delay="1s")
        (received,) = await program.received(vhost.url, "reminders", 1)
        assert made.due_time is not None
        assert (received["key"], received["due"], received["body"]) == (
            "invoice:5",
            to_milliseconds(made.due_time),
            "five",
        )
        assert received["received"] >= received["due"]
        assert await ready_at(vhost.url, "reminders") == 0


@pytest.mark.long
async def test_the_program_in_go_does_not_miss_a_confirm_that_comes_at_once(vhost: Vhost, tmp_path: Path) -> None:
    program = built("go", tmp_path)
    # Each write returns late, so that the confirm is there before the client library goes on.
    tracing = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=write", "-e", "inject=write:delay_exit=50000"]
    slow = replace(program, command=[*tracing, *program.command])
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders")]))
        await client.schedule(b"declares the log", key="k", to="reminders", delay="1h")
    printed = await slow.run(vhost.url, "schedule", "k", json.dumps({"queue": "reminders"}), "3600000", "x")
    assert printed.startswith("scheduled, version ")


async def test_the_program_repeats_a_cancel_until_a_gate_answers(vhost: Vhost, tmp_path: Path) -> None:
    program = built("node", tmp_path)
    log = NAMES.log(partition_of("k"))
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders")]))
        await client.schedule(b"x", key="k", to="reminders", delay="1h")
        cancelling = asyncio.create_task(program.run(vhost.url, "cancel", "k"))

        async def is_repeated() -> bool:
            return await ready_at(vhost.url, log) >= 3

        await eventually(is_repeated)
        async with gating(vhost.url, tmp_path / "gate"):
            assert await cancelling == "cancelled\n"
            assert await client.scheduled("k") is None


async def test_the_commands_print_what_the_page_shows(clock_url: str, client: bide.Client, tmp_path: Path) -> None:
    program = built("node", tmp_path)
    commands = [one for _, text in blocks(PAGE) if text.startswith("$ node") for one in commands_of(text)]
    assert [shlex.split(command)[2] for command, _ in commands] == [
        *("delay", "receive", "schedule", "scheduled", "cancel", "vectors")
    ]
    await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
    async with gating(clock_url, tmp_path / "gate"):
        for command, printed in commands:
            found = await program.run(clock_url, *shlex.split(command)[2:])
            assert (command, _shape(found)) == (command, _shape(printed))


def _shape(text: str) -> list[str]:
    """The lines of an output, without session and times."""
    return re.sub(r"\b[0-9a-f]{20}-", "SESSION-", re.sub(r"\b\d{13}\b", "TIME", text)).splitlines()


async def test_the_permissions_of_the_page_are_enough(
    broker: LocalBroker, clock_url: str, client: bide.Client, tmp_path: Path
) -> None:
    program, name = built("node", tmp_path), clock_url.rpartition("/")[2]
    patterns = {row[0]: code(row[1])[0] for row in table(PAGE, "Permissions")}
    broker.add_user("program", "secret")
    broker.set_permissions(name, "program", **patterns)
    url = broker.vhost_url(name, user="program", password="secret")
    await client.declare(
        bide.Topology(
            [bide.Exchange("shop", "topic")], [bide.Queue.quorum("orders")], [bide.Binding("shop", "orders", "a.b")]
        )
    )
    targets = [
        {"queue": "orders"},
        {"queue": "orders", "isolated": True},
        {"exchange": "shop", "routing_key": "a.b"},
    ]
    try:
        async with gating(clock_url, tmp_path / "gate"):
            for target in targets:
                for delay in ("100", "0"):
                    await program.run(url, "delay", json.dumps(target), delay, "x")
            assert len(await program.received(url, "orders", 6)) == 6
            await program.run(url, "schedule", "k", json.dumps({"queue": "orders"}), "3600000", "x")
            assert json.loads(await program.run(url, "scheduled", "k"))["state"] == "waiting"
            assert await program.run(url, "cancel", "k") == "cancelled\n"
    finally:
        broker.delete_user("program")


@pytest.mark.parametrize("left_out", ["configure", "write", "read"])
async def test_a_program_without_a_permission_is_refused(
    broker: LocalBroker, clock_url: str, client: bide.Client, tmp_path: Path, left_out: str
) -> None:
    program, name = built("node", tmp_path), clock_url.rpartition("/")[2]
    patterns = {row[0]: code(row[1])[0] for row in table(PAGE, "Permissions")}
    await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
    broker.add_user("program", "secret")
    broker.set_permissions(name, "program", **{**patterns, left_out: "^$"})
    url = broker.vhost_url(name, user="program", password="secret")
    isolated = json.dumps({"queue": "orders", "isolated": True})
    try:
        exit_code, printed, errors = await program.result(url, "delay", isolated, "100", "x")
        assert (exit_code, printed) == (1, "")
        assert "ACCESS_REFUSED" in errors or "ACCESS-REFUSED" in errors
    finally:
        broker.delete_user("program")
