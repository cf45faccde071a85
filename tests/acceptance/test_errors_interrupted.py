"""``bide errors retry --over``, interrupted, and the command that it prints to continue."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from tests.acceptance.test_cli import Program, lines
from tests.acceptance.test_errors_cli import fill, ids_in, ready, settle
from tests.polling import wait_while_running
from tests.readme import without_slow_api
from tests.support import Vhost
from tests.timeouts import TIMEOUT

NUMBER = 200
QUIET = 2.0
"""Seconds in which some more would have arrived at the pace of these tests."""


def sending(program: Program, vhost: Vhost, *arguments: str, number: int = 2) -> subprocess.Popen[str]:
    """A command that has sent at least this number of messages."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bide", "errors", "retry", *arguments],
        env=program.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_while_running(process, lambda: ready(vhost, "orders") >= number, f"{number} messages were sent")
    return process


def interrupted(
    program: Program, vhost: Vhost, number: signal.Signals, *arguments: str, after: int = 2
) -> tuple[str, str]:
    """What a command printed that was interrupted after it had sent some messages."""
    process = sending(program, vhost, *arguments, number=after)
    process.send_signal(number)
    out, stderr = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + number
    return out, without_slow_api(stderr)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_no_message_leaves_the_queue_after_an_interruption(
    program: Program, vhost: Vhost, number: signal.Signals
) -> None:
    fill(vhost, NUMBER)
    _, stderr = interrupted(program, vhost, number, "--exception", "ValueError", "--over", "100s")
    arrived = ready(vhost, "orders")
    assert 0 < arrived < NUMBER
    settle(vhost, {"error": NUMBER - arrived})
    named, first, second = stderr.strip().splitlines()
    assert named == f"bide: {NUMBER} messages of error: {NUMBER} to orders"
    assert first == (
        f"bide: interrupted: {arrived} of {NUMBER} messages sent back, {NUMBER - arrived} not yet due, still in error"
    )
    assert "Traceback" not in stderr
    time.sleep(QUIET)  # time for messages that would be sent after the interruption
    assert ready(vhost, "orders") == arrived

    again = shlex.split(second.removeprefix("bide: go on with: "))
    assert again[:5] == ["bide", "errors", "retry", "--exception", "ValueError"]
    assert again[5] == "--over"
    assert int(again[6].removesuffix("s")) == round(100 * (NUMBER - arrived) / NUMBER)
    again[6] = "1s"
    done = json.loads(program.ok(*again[1:], "--json"))
    assert (done["done"], done["kept"]) == (NUMBER - arrived, {})
    assert ready(vhost, "error") == 0
    assert sorted(ids_in(vhost, "orders", NUMBER)) == sorted(f"m{place}" for place in range(NUMBER))
    ends = [one for one in lines(program.ok("errors", "history", "--json")) if one["step"] not in ("begun", "ids")]
    assert [(one["step"], one["done"], one.get("left")) for one in ends] == [
        ("interrupted", arrived, NUMBER - arrived),
        ("ended", NUMBER - arrived, None),
    ]


@pytest.mark.slow
@pytest.mark.long
def test_an_interruption_in_json_names_only_the_remaining_ids(program: Program, vhost: Vhost) -> None:
    fill(vhost, NUMBER)
    ids = [f"m{place}" for place in range(NUMBER)]
    out, stderr = interrupted(program, vhost, signal.SIGINT, *ids, "--over=100s", "--json")
    assert stderr.strip() in ("", "Aborted!")
    found = json.loads(out)
    assert found["interrupted"] is True
    assert found["done"] + found["left"] == NUMBER
    again = shlex.split(found["go_on"])
    again[again.index("--over") + 1] = "1s"
    done = json.loads(program.ok(*again[1:]))
    assert (done["done"], done["missing"]) == (found["left"], [])
    assert sorted(ids_in(vhost, "orders", NUMBER)) == sorted(ids)


@pytest.mark.slow
def test_a_retry_that_loses_its_connection_prints_its_result_and_the_command_for_the_rest(
    program: Program, vhost: Vhost
) -> None:
    fill(vhost, NUMBER)
    process = sending(program, vhost, "--all", "--yes", "--over", "100s")
    while process.poll() is None:
        # Between two looks at the queue a lost connection is opened again.
        vhost.broker.rabbitmqctl("close_all_connections", "--vhost", vhost.name, "maintenance")
    _, stderr = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1, stderr
    first, second, error = without_slow_api(stderr).strip().splitlines()
    done, left = map(int, re.findall(r"[0-9]+", first)[::2])
    assert first == f"bide: interrupted: {done} of {NUMBER} messages sent back, {left} not yet due, still in error"
    assert (done + left, done >= 2) == (NUMBER, True)
    assert error.startswith("bide: ")
    assert "maintenance" in error

    again = shlex.split(second.removeprefix("bide: go on with: "))
    assert again[:6] == ["bide", "errors", "retry", "--all", "--yes", "--over"]
    assert int(again[6].removesuffix("s")) == round(100 * left / NUMBER)
    again[6] = "1s"
    program.ok(*again[1:])
    assert ready(vhost, "error") == 0
    # A message whose acknowledgement was lost comes twice.
    assert set(ids_in(vhost, "orders", ready(vhost, "orders"))) == {f"m{place}" for place in range(NUMBER)}
    steps = [one["step"] for one in lines(program.ok("errors", "history", "--json"))]
    assert steps.count("interrupted") == 1
