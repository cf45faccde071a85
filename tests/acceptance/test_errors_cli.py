"""``bide errors`` as a subprocess, on a real broker."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import bide
from bide.topology import Queue
from tests.acceptance.test_cli import Program, lines
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.receiving import connected, eventually, ready_at, receive
from tests.broker.test_error_queues import park
from tests.faults.cutting import Proxy
from tests.polling import wait_until
from tests.readme import without_slow_api
from tests.support import Vhost
from tests.timeouts import TIMEOUT

log = logging.getLogger(__name__)

PARKED = 10_000


def fill(vhost: Vhost, number: int = 3, *, failed_on: str = "orders", **options: Any) -> None:
    """Park messages in the queue ``error``, as of the queue ``orders``."""

    async def work() -> None:
        async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
            await park(client, "error", number, failed_on, **options)

    asyncio.run(work())


def ready(vhost: Vhost, queue: str) -> int:
    """Messages in a queue."""

    return asyncio.run(ready_at(vhost.url, queue))


def settle(vhost: Vhost, numbers: Mapping[str, int]) -> None:
    """Wait until these queues have these numbers of messages.

    The broker returns what a command has read and left there a moment after the command has ended.
    """
    wait_until(lambda: {name: ready(vhost, name) for name in numbers} == numbers, f"the queues have {numbers}")


async def kill_half_way(program: Program, vhost: Vhost, command: Sequence[str]) -> int | None:
    """Kill a program while it moves messages from ``error`` to ``orders``, and return its exit code.

    It is connected through a proxy in this process: while the test gets no processor time, it moves nothing either.
    """
    async with Proxy(vhost.url) as proxy, connected(vhost.url) as connection, await connection.channel() as channel:
        process = program.start(*command, BIDE_URL=proxy.url)
        async with asyncio.timeout(TIMEOUT):
            while (await channel.declare_queue(Queue("orders"), passive=True)).message_count < PARKED // 2:
                assert process.poll() is None, f"it was done before it could be killed: {process.communicate()}"
        process.kill()
        await asyncio.to_thread(process.communicate)

    async def none_is_unacknowledged() -> bool:
        return await ready_at(vhost.url, "error") + await ready_at(vhost.url, "orders") >= PARKED

    # The broker still reads what the program had sent, and then returns what it had not acknowledged.
    await eventually(none_is_unacknowledged)
    return process.returncode


def ids_in(vhost: Vhost, queue: str, number: int) -> list[str]:
    """Consume messages of a queue, and return their message ids."""

    async def work() -> list[str]:
        async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
            return [str(one.message_id) for one in await receive(client, queue, number)]

    return asyncio.run(work())


def test_list_show_groups_and_stats_describe_failed_messages(program: Program, vhost: Vhost) -> None:
    fill(vhost, error=ValueError("no\nand\tno \x1b[31mred"))
    listed = program.ok("errors", "list")
    assert len(listed.splitlines()) == 3
    assert r"ValueError: no\nand\tno \x1b[31mred" in listed
    objects = lines(program.ok("errors", "list", "--json"))
    assert {one["message_id"] for one in objects} == {"m0", "m1", "m2"}
    assert {(one["queue"], one["reason"], one["exception"], one["attempts"]) for one in objects} == {
        ("orders", "failed", "ValueError", 3)
    }
    assert objects[0]["failed_at"].startswith("20")
    assert objects[0]["headers"] == {"place": int(objects[0]["message_id"][1:])}
    assert len(lines(program.ok("errors", "list", "--json", "--limit", "2"))) == 2
    assert len(lines(program.ok("errors", "list", "--json", "--header", "place=1"))) == 1
    assert lines(program.ok("errors", "list", "--json", "--older-than", "1h")) == []
    shown = program.ok("errors", "show", "m1")
    for text in ("failed on      orders", "exception      ValueError", "body 1", "sent to        exchange 'shop'"):
        assert text in shown
    (whole,) = lines(program.ok("errors", "show", objects[1]["id"], "--json"))
    assert whole["body"].startswith("body")
    assert "ValueError" in whole["stack"]
    (group,) = lines(program.ok("errors", "groups", "--json"))
    assert (group["group"], group["count"], group["queues"]) == ("ValueError", 3, ["orders"])
    assert "3  20" in program.ok("errors", "groups")
    assert json.loads(program.ok("errors", "stats", "--json"))["by_queue"] == {"orders": 3}
    assert "3 messages" in program.ok("errors", "stats")


def test_retry_archive_edit_and_discard_move_the_chosen_messages(program: Program, vhost: Vhost) -> None:
    fill(vhost, 5)
    assert program.ok("errors", "retry", "--all", "--dry-run") == "5 messages would be sent back: 5 to orders\n"
    assert json.loads(program.ok("errors", "retry", "m1", "--dry-run", "--json")) == {
        "would_be_done": 1,
        "queues": {"orders": 1},
    }
    assert json.loads(program.ok("errors", "archive", "m1", "--dry-run", "--json")) == {"would_be_done": 1}
    assert program.ok("errors", "retry", "m1") == "1 message sent back: 1 to orders\n"
    assert program.ok("errors", "archive", "m2", "--keep", "1h") == "1 message archived for 1h: 1 to error.archive\n"
    assert program.ok("errors", "unarchive", "--all", "--yes") == "1 message put back: 1 to error\n"
    edited = json.loads(program.ok("errors", "edit", "m3", "--body", "fixed", "--header", "a=b", "--json"))
    assert edited["edit_of"] == "m3"
    done = json.loads(program.ok("errors", "discard", "--text", "no", "--yes", "--json"))
    assert (done["done"], done["kept"], done["seen"]) == (3, {}, 3)
    assert sorted(ids_in(vhost, "orders", 2)) == sorted(["m1", edited["message_id"]])
    history = lines(program.ok("errors", "history", "--json"))
    ended = [one for one in history if one["step"] == "ended"]
    assert [(one["operation"], one["done"]) for one in ended] == [
        ("retry", 1),
        ("archive", 1),
        ("unarchive", 1),
        ("edit", 1),
        ("discard", 3),
    ]
    assert len(program.ok("errors", "history").splitlines()) == len(history)


def test_a_retry_can_be_spread_over_time(program: Program, vhost: Vhost) -> None:
    fill(vhost, 4)
    assert program.ok("errors", "retry", "--all", "--yes", "--over", "1s").startswith("4 messages sent back")
    assert len(ids_in(vhost, "orders", 4)) == 4


def test_invalid_errors_commands_are_refused(program: Program, vhost: Vhost) -> None:
    broker = vhost.url.partition("@")[2].partition("/")[0]
    assert f"no queue 'error' on the virtual host {vhost.name!r} of {broker}:" in program.fails(1, "errors", "list")
    fill(vhost)
    assert "give --yes" in program.fails(2, "errors", "retry", "--all")
    assert "give --yes" in program.fails(2, "errors", "discard", "m1")
    assert "--all" in program.fails(2, "errors", "retry")
    assert "leave out" in program.fails(2, "errors", "retry", "m1", "--all", "--yes")
    assert "NAME=VALUE" in program.fails(2, "errors", "list", "--header", "a")
    assert "cannot be read" in program.fails(2, "errors", "list", "--older-than", "soon")
    assert "'missing'" in program.fails(1, "errors", "show", "missing")
    assert "no queue 'error.archive'" in program.fails(1, "errors", "unarchive", "--all", "--yes")
    assert "bide-due" in program.fails(2, "errors", "edit", "m1", "--header", "bide-due=1")
    done = program.run("errors", "retry", "m1", "--to", "missing")
    assert done.returncode == 1
    assert b"1 message stays: the queue 'missing' does not exist" in done.stderr
    done = program.run("errors", "retry", "missing")
    assert done.returncode == 1
    assert b"no message 'missing'" in done.stderr
    settle(vhost, {"error": 3})


def test_a_retry_names_each_target_before_a_message_moves(program: Program, vhost: Vhost) -> None:
    fill(vhost, 3)
    fill(vhost, 1, failed_on="salaries", prefix="forged")
    everything = ("errors", "retry", "--all")
    assert program.ok(*everything, "--dry-run") == "4 messages would be sent back: 3 to orders, 1 to salaries\n"
    elsewhere = program.ok(*everything, "--dry-run", "--to", "orders")
    assert elsewhere == "4 messages would be sent back: 4 to orders\n"
    some = program.ok(*everything, "--dry-run", "--allow", "orders*")
    assert some == "4 messages would be sent back: 3 to orders, 1 stays (not allowed: salaries)\n"
    done = program.run("errors", "retry", "--exception", "ValueError", "--allow", "orders*")
    assert (done.returncode, done.stdout) == (1, b"3 messages sent back: 3 to orders\n")
    named, refused = without_slow_api(done.stderr.decode()).splitlines()
    assert named == "bide: 4 messages of error: 3 to orders, 1 stays (not allowed: salaries)"
    assert refused.startswith("bide: 1 message stays: the target 'q:salaries' matches no allowed pattern (orders*)")
    settle(vhost, {"orders": 3, "salaries": 0, "error": 1})
    assert "'q:salaries'" in program.fails(1, "errors", "edit", "forged0", "--body", "x", "--allow", "orders*")
    settle(vhost, {"salaries": 0, "error": 1})
    assert "is not a pattern" in program.fails(2, "errors", "retry", "forged0", "--allow", "")
    assert program.ok("errors", "edit", "forged0", "--body", "x", "--allow", "q:salaries").startswith("sent back as ")
    settle(vhost, {"salaries": 1, "error": 0})


@pytest.mark.long
def test_a_killed_retry_of_10_000_messages_is_finished_by_the_next(program: Program, vhost: Vhost) -> None:
    fill(vhost, PARKED)
    (group,) = lines(program.ok("errors", "groups", "--json"))
    assert group["count"] == PARKED
    command = ["errors", "retry", "--group", group["group"], "--yes", "--json"]
    assert asyncio.run(kill_half_way(program, vhost, command)) == -signal.SIGKILL
    half = ready(vhost, "orders")
    assert half < PARKED
    begin = time.monotonic()
    again = json.loads(program.ok(*command))
    seconds = time.monotonic() - begin
    assert again["kept"] == {}
    settle(vhost, {"orders": half + again["done"], "error": 0})
    found = Counter(ids_in(vhost, "orders", half + again["done"]))
    assert set(found) == {f"m{number}" for number in range(PARKED)}
    repeated = found.total() - PARKED
    # Those that were confirmed, and whose acknowledgement was on its way.
    assert repeated <= 400
    log.info(
        "killed after %d of %d; the second run moved %d in %.1f s (start of the program included): %.0f/s; %d repeated",
        *(half, PARKED, again["done"], seconds, again["done"] / seconds, repeated),
    )
