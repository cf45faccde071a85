"""``bide pipeline replay --queue`` without Spark."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest

import bide
from bide.cli.app import run
from bide.error_queues import ErrorQueue, read_operator_log
from bide.local_broker import LocalBroker
from tests.broker.receiving import eventually, fresh, ready_at
from tests.broker.test_error_queues import park
from tests.polling import wait_until
from tests.spark.receiving import drain
from tests.spark.spark_processes import Counter
from tests.timeouts import TIMEOUT

MANY = 40


@pytest.fixture
async def queues(client: bide.Client) -> tuple[str, str, str]:
    """An error queue with five messages of one queue, and three of another."""
    error, orders, billing = fresh("error"), fresh("orders"), fresh("billing")
    await park(client, error, 5, orders)
    await park(client, error, 3, billing, error=TimeoutError("gateway 7"), prefix="b", endpoint="cash")
    return error, orders, billing


@pytest.fixture
def replay(clock_url: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Replay an error queue, and return what is printed; the error of bad usage."""

    def replay(queue: str, *arguments: str, code: int = 0) -> Any:
        given = ("--url", clock_url, "--queue", queue, "--engine", "local", *arguments)
        assert run(["pipeline", "replay", *given]) == code
        found = capsys.readouterr()
        if code == 2:
            return found.err
        return json.loads(found.out) if "--json" in arguments else found.out

    return replay


async def left(client: bide.Client, queue: str) -> list[str | None]:
    return [one.message_id async for one in ErrorQueue(client, queue, audit=False).messages()]


async def test_chosen_messages_return_to_their_queues(
    replay: Callable[..., Any], client: bide.Client, queues: tuple[str, str, str], clock_url: str
) -> None:
    error, orders, billing = queues
    done = replay(error, "--where", "exception like 'Timeout%' and endpoint = 'cash'", "--limit", "2", "--json")
    assert (done["messages"], done["sent"], done["queues"], done["kept"]) == (2, 2, {billing: 2}, {})
    assert (done["engine"], done["engine_reason"]) == ("local", "--engine local was given")
    assert [one.message_id for one in drain(clock_url, billing, 2)] == ["b0", "b1"]
    assert sorted(map(str, await left(client, error))) == ["b2", *(f"m{place}" for place in range(5))]
    assert replay(error, "--where", f"queue = '{billing}'", "--to", orders).startswith("replayed 1 message in ")
    text = replay(error)
    assert text.startswith("replayed 5 messages in ")
    assert text.endswith(f" s: 5 to {orders}\nengine: this process, because --engine local was given\n")
    assert len(drain(clock_url, orders, 6)) == 6
    assert await left(client, error) == []
    records = [record.to_dict() async for record in read_operator_log(client) if record.queue == error]
    assert (records[0]["operation"], records[0]["limit"], records[-1]["done"]) == ("replay", 2, 5)


async def test_a_dry_run_shows_targets_and_due_times(
    replay: Callable[..., Any], client: bide.Client, queues: tuple[str, str, str]
) -> None:
    error, orders, billing = queues
    dry = replay(error, "--over", "4s", "--dry-run", "--json")
    assert (dry["messages"], dry["queues"], dry["missing_queues"]) == (8, {billing: 3, orders: 5}, [])
    assert sum(one["count"] for one in dry["due"]) == 8
    span = datetime.fromisoformat(dry["last_due"]) - datetime.fromisoformat(dry["first_due"])
    assert span == timedelta(seconds=3.5)
    text = replay(error, "--over", "4s", "--dry-run")
    assert text.startswith(f"8 messages of {error}; nothing was sent\n        3 to {billing}\n        5 to {orders}\n")
    assert "█" in text
    assert text.endswith("\nengine: this process, because --engine local was given\n")
    assert len(await left(client, error)) == 8
    assert replay(error, "--where", "type = 'Bill'", "--dry-run").startswith(f"0 messages of {error}; nothing was sent")


async def test_messages_that_cannot_be_sent_stay(
    replay: Callable[..., Any],
    client: bide.Client,
    queues: tuple[str, str, str],
    clock_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error, orders, billing = queues
    await client.destroy(bide.Topology(queues=[bide.Queue.quorum(billing)]))
    assert f"3 to {billing}  (does not exist)" in replay(error, "--dry-run", code=1)
    refused = replay(error, "--allow", "nothing.*", code=2)
    assert f"messages would go to queues that are not allowed ({billing}, {orders})" in refused
    assert run(["pipeline", "replay", "--url", clock_url, "--queue", error, "--engine", "local"]) == 1
    printed = capsys.readouterr()
    assert f"bide: 3 messages stay in {error}: the queue '{billing}' does not exist" in printed.err
    assert printed.out.startswith("replayed 5 messages in ")
    assert sorted(map(str, await left(client, error))) == ["b0", "b1", "b2"]


def test_a_condition_for_spark_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--queue", "error", "--where", "attempts > 2", "--engine", "local")
    assert run(["pipeline", "replay", *arguments]) == 2
    assert capsys.readouterr().err == (
        "bide: the condition is more than comparisons of columns with text, which only Spark supports: leave out "
        "--engine local\n"
    )


@contextmanager
def replaying(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A replay in a process of its own, without PySpark and PyArrow."""
    program = (
        "import sys\n"
        "sys.modules.update(pyspark=None, pyarrow=None)\n"
        "from bide.cli.app import run\n"
        "sys.exit(run(['pipeline', 'replay', *sys.argv[1:]]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_an_interruption_leaves_the_rest_in_the_queue(client: bide.Client, clock_url: str) -> None:
    """And names the command that goes on."""
    error, orders = fresh("error"), fresh("orders")
    await park(client, error, MANY, orders)
    given = ("--url", clock_url, "--queue", error, "--over", "10m", "--where", "type = 'Order'")
    with replaying(*given) as process, closing(Counter(clock_url, orders)) as counter:
        wait_until(lambda: counter() > 0 or process.poll() is not None, "a message was sent")
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=TIMEOUT)
        arrived = counter()
    assert process.returncode == 128 + signal.SIGINT, stderr
    # Without the management API, a warning about the delivery limit follows.
    stopped, again = [line for line in stderr.splitlines() if line.startswith(("bide: interrupted", "bide: go on"))]
    assert stopped == (
        f"bide: interrupted: {arrived} of {MANY} messages replayed, {MANY - arrived} not yet due, left of {error}"
    )
    assert f" --queue {error} --over " in again
    assert len(await left(client, error)) == MANY - arrived


async def test_a_replay_that_loses_its_connection_prints_its_result_and_the_command_for_the_rest(
    broker: LocalBroker, client: bide.Client, clock_url: str
) -> None:
    error, orders = fresh("error"), fresh("orders")
    await park(client, error, MANY, orders)
    with replaying("--url", clock_url, "--queue", error, "--over", "10m") as process:

        async def sent() -> bool:
            assert process.poll() is None, process.communicate()
            return await ready_at(clock_url, orders) > 0

        await eventually(sent, step=0.2)
        while process.poll() is None:
            # Between two looks at the queue a lost connection is opened again.
            broker.rabbitmqctl("close_all_connections", "--vhost", clock_url.rpartition("/")[2], "maintenance")
        _, stderr = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1, stderr
    *_, stopped, again, failed = stderr.splitlines()
    done = int(stopped.split()[2])
    assert stopped == (
        f"bide: interrupted: {done} of {MANY} messages replayed, {MANY - done} not yet due, left of {error}"
    )
    assert again.endswith(f" --queue {error} --over {round(600 * (MANY - done) / MANY)}s")
    assert failed.startswith("bide: ")
    assert "maintenance" in failed
