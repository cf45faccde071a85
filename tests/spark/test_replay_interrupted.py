"""``bide pipeline replay --over``, interrupted, and the command that it prints to continue."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

import bide
from bide.cli.app import run
from bide.error_queues import OperatorLogRecord, read_operator_log
from bide.pipelines.replay.choices import Choices
from tests.audited_shop import AuditedShop, fill
from tests.broker.conftest import clock_url
from tests.broker.receiving import fresh
from tests.polling import wait_until
from tests.spark.receiving import drain, rest, wait_until_released
from tests.spark.spark_processes import LOCAL, Counter
from tests.spark.test_replay import parked, put
from tests.spark.test_replay_audit import shop
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["clock_url", "shop"]

NUMBER = 200


def interrupted(arguments: list[str], number: signal.Signals, is_so: Callable[[], bool]) -> list[str]:
    """What a replay printed that was interrupted when something was so."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bide", *arguments, *LOCAL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: is_so() or process.poll() is not None, "some messages were sent")
        assert process.poll() is None, process.communicate()
        process.send_signal(number)
        _, stderr = process.communicate(timeout=TIMEOUT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 128 + number, stderr
    assert "Traceback" not in stderr, stderr
    return [line for line in stderr.splitlines() if line.startswith("bide: ")]


def go_on(line: str) -> list[str]:
    """The arguments of the command that it names, without those of a Spark of its own."""
    arguments = shlex.split(line.removeprefix("bide: go on with: "))[1:]
    return [one for one in arguments if one not in LOCAL]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_no_message_leaves_the_queue_after_an_interruption(
    clock_url: str, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    error, orders = fresh("error"), fresh("orders")
    put(clock_url, error, NUMBER, orders)
    arguments = ["pipeline", "replay", "--queue", error, "--over", "60s", "--where", "type = 'Order'"]
    with closing(Counter(clock_url, orders)) as counter:
        url = ("--url", clock_url)
        stderr = interrupted([*arguments, *url], number, lambda: counter() >= NUMBER // 20)
        arrived = counter()
        assert 0 < arrived < NUMBER
        left = NUMBER - arrived
        assert stderr[-2] == (
            f"bide: interrupted: {arrived} of {NUMBER} messages replayed, {left} not yet due, left of {error}"
        )
        time.sleep(2)  # time for messages that would be sent after the interruption
        assert counter() == arrived
    wait_until_released(clock_url, error)
    assert len(parked(clock_url, error)) == left
    again = go_on(stderr[-1])
    assert again[:5] == ["pipeline", "replay", "--queue", error, "--over"]
    assert 1 <= int(again[5].removesuffix("s")) < 60
    assert clock_url not in stderr[-1], "a password is not shown"
    again = [clock_url if one.startswith("amqp://") else one for one in again]
    again[5] = "2s"
    assert run([*again, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sent"] == left
    assert sorted(str(one.message_id) for one in drain(clock_url, orders, NUMBER)) == sorted(
        f"m{place}" for place in range(NUMBER)
    )
    assert parked(clock_url, error) == []

    async def records() -> list[OperatorLogRecord]:
        async with bide.connect(clock_url) as client:
            return [one async for one in read_operator_log(client) if one.queue == error]

    ends = [one for one in asyncio.run(records()) if one.step not in ("begun", "ids")]
    assert [(one.step, one.details["done"]) for one in ends] == [("interrupted", arrived), ("ended", left)]


@pytest.mark.long
@pytest.mark.slow
def test_no_message_leaves_the_streams_after_an_interruption(
    shop: AuditedShop, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(shop, NUMBER)
    ledger = Choices(folder=str(shop.ledger)).ledger(1)
    with closing(Counter(shop.url, "orders")) as counter:
        stderr = interrupted([*shop.command(), "--over", "20s"], signal.SIGINT, lambda: counter() >= NUMBER // 10)
        arrived = counter()
        assert 0 < arrived < NUMBER
        assert stderr[-2] == (
            f"bide: interrupted: {arrived} of {NUMBER} messages replayed, {NUMBER - arrived} not yet due, left of the "
            f"audit {shop.folder.place}"
        )
        time.sleep(2)  # time for messages that would be sent after the interruption
        assert counter() == arrived
    assert sum(one.sent for one in ledger.parts()) == arrived
    again = [shop.url if one.startswith("amqp://") else one for one in go_on(stderr[-1])]
    begin = time.monotonic()
    assert run([*again, "--json"]) == 0
    # What is left is spread as it was, though it is due already.
    assert time.monotonic() - begin >= 20 * (NUMBER - arrived) / NUMBER - 2
    done = json.loads(capsys.readouterr().out)
    assert (done["sent"], done["sent_before"]) == (NUMBER - arrived, arrived)
    found = sorted(str(one.message_id) for one in drain(shop.url, "orders", NUMBER))
    assert found == sorted(f"m{place}" for place in range(NUMBER))
    assert rest(shop.url, "orders") == []
