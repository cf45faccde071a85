"""``bide errors`` with hostile messages, closed pipes, invalid input and signals."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys

import click
import pika
import pytest

import bide
from bide.cli.app import cli
from tests.acceptance.test_cli import Program, lines
from tests.acceptance.test_errors_cli import fill, settle
from tests.broker.receiving import eventually, ready_at
from tests.faults.cutting import Proxy
from tests.support import Vhost
from tests.timeouts import TIMEOUT

CTRL_C = b"\x03"
AGAIN_AFTER = 60.0
"""Seconds in which a command ends after Ctrl-C, also on a busy machine."""

EVIL = "\x1b[31mred\nFORGED\u202e\x07"


def on_a_terminal(program: Program, *arguments: str, answer: bytes = b"") -> tuple[int, str]:
    """Run it as at a terminal, and answer its question."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-m", "bide", *arguments], program.environment)
    output, is_answered = b"", False
    while True:
        # Ctrl-C may come just before Python waits for input, which it then does not end: type it again. A second one
        # while the command ends would kill it, and the terminal would echo another answer.
        if answer == CTRL_C and b"[y/N]" in output and not select.select([terminal], [], [], AGAIN_AFTER)[0]:
            os.write(terminal, answer)
            continue
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the end of the terminal, on Linux
            break
        if not part:
            break
        output += part
        if answer and not is_answered and b"[y/N]" in output:
            os.write(terminal, answer)
            is_answered = True
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output.decode()


def fill_with_hostile_messages(vhost: Vhost) -> None:
    """A message whose every text takes a terminal for a fool."""
    headers = {
        f"bide-{name}": EVIL for name in ("failed-queue", "error-type", "error-message", "error-stack", "endpoint")
    }
    death = {"reason": EVIL, "queue": EVIL, "count": 1, "exchange": EVIL, "routing-keys": [EVIL]}
    properties = pika.BasicProperties(
        message_id=EVIL, type=EVIL, app_id=EVIL, headers={**headers, EVIL: EVIL, "x-death": [death]}
    )
    with pika.BlockingConnection(pika.URLParameters(vhost.idle_url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("error", durable=True)
        channel.basic_publish("", "error", EVIL.encode(), properties, mandatory=True)


def test_control_characters_of_messages_are_escaped(program: Program, vhost: Vhost) -> None:
    fill_with_hostile_messages(vhost)
    (listed,) = lines(program.ok("errors", "list", "--json"))
    assert listed["queue"] == EVIL
    for arguments in (["list"], ["groups"], ["stats"], ["show", listed["id"]], ["retry", listed["id"]], ["history"]):
        code, output = on_a_terminal(program, "errors", *arguments)
        # The progress bar's own, which the terminal gets whatever the messages are.
        own = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.replace("\x1b[31mred", "EVIL"))
        assert "EVIL" not in own, arguments
        assert not {"\x1b", "\u202e", "\x07"} & set(own), arguments
        # Only a body and a stack trace have lines of their own.
        assert arguments[0] == "show" or not re.search(r"^FORGED", own, re.MULTILINE), arguments
        assert code == (1 if arguments[0] == "retry" else 0)


def test_an_unknown_delivery_limit_is_one_warning_of_a_command(
    program: Program, vhost: Vhost, release: tuple[int, ...]
) -> None:
    """A retry reads the queue for its question and for its pace, and then sends the message back."""
    fill(vhost)
    assert len(program.ok("errors", "list").splitlines()) == 3
    nowhere = "http://127.0.0.1:1"
    for name, left, options, way_out in (
        ("m0", 3, (), "unset BIDE_MANAGEMENT_URL"),
        ("m1", 2, ("--management-url", nowhere), "its address with --management-url or BIDE_MANAGEMENT_URL"),
    ):
        settle(vhost, {"error": left})
        done = program.run("errors", "retry", name, "--over", "1s", *options, BIDE_MANAGEMENT_URL=nowhere)
        printed = done.stderr.decode()
        assert done.returncode == 0, printed
        # From 4.3 on, browsing does not count as a failed delivery.
        assert printed.count("the delivery limit of 'error' is unknown") == (release < (4, 3)), printed
        # On a busy machine, the five seconds for the API end before the connection is refused.
        assert (way_out in printed or "its management API is too slow" in printed) is (release < (4, 3)), printed


def test_json_output_has_one_object_per_line(program: Program, vhost: Vhost) -> None:
    fill_with_hostile_messages(vhost)
    for arguments in (["list"], ["groups"], ["groups", "--by", "type"], ["stats"]):
        (found,) = lines(program.ok("errors", *arguments, "--json"))
        assert EVIL in str(found) or repr(EVIL)[1:-1] in str(found)


def test_every_command_refuses_delay_queues(program: Program, vhost: Vhost) -> None:
    """Taken from the command tree, so that a new command is tested too."""
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
        client.publish(b"waits", to="orders", delay="1h", message_id="m")
    group = cli.get_command(click.Context(cli), "errors")
    assert isinstance(group, click.Group)
    for name, command in sorted(group.commands.items()):
        if not any(one.name == "queue" for one in command.params):
            assert name == "history", name
            continue
        given = [name, "--queue", "bide.v1.h1"]
        given += ["m"] if name in ("show", "edit") else []
        given += ["--body", "x"] if name == "edit" else []
        given += ["--all", "--yes"] if any(one.name == "everything" for one in command.params) else []
        output = program.fails(2, "errors", *given)
        assert "'bide.v1.h1' belongs to a delay infrastructure: messages wait there until they are due" in output, name
    settle(vhost, {"bide.v1.h1": 1, "orders": 0})


def test_a_closed_pipe_ends_the_listing_silently(program: Program, vhost: Vhost) -> None:
    fill(vhost, 300)
    command = f"{sys.executable} -m bide errors list | head -n 1"
    done = subprocess.run(
        command, shell=True, capture_output=True, env=program.environment, timeout=TIMEOUT, check=False
    )
    assert done.stdout.count(b"\n") == 1
    assert done.stderr == b""
    settle(vhost, {"error": 300})


def test_bytes_that_are_not_utf_8_are_sent_unchanged(program: Program, vhost: Vhost) -> None:
    fill(vhost, 2)
    sent = program.ok("errors", "edit", "m0", "--body", os.fsdecode(b"\xffx"), "--json")
    message_id = json.loads(sent)["message_id"]
    (found,) = lines(program.ok("errors", "show", message_id, "--queue", "orders", "--json"))
    assert (found["body"], found["body_encoding"]) == ("/3g=", "base64")
    assert "an empty search text" in program.fails(2, "errors", "retry", "--text", "")
    done = program.run("errors", "archive", "m1", "missing")
    assert (done.returncode, done.stdout) == (1, b"1 message archived for 30d: 1 to error.archive\n")
    assert b"no message 'missing'" in done.stderr


def test_a_terminal_gets_a_confirmation_prompt_and_a_progress_bar(program: Program, vhost: Vhost) -> None:
    fill(vhost, 20)
    code, output = on_a_terminal(program, "errors", "discard", "m1", answer=b"n\n")
    assert code == 1
    settle(vhost, {"error": 20})
    assert "1 message of error will be discarded: go on?" in output
    assert output.splitlines()[-1] == "bide: nothing was done: the answer was no"
    code, output = on_a_terminal(program, "errors", "discard", "m1", answer=CTRL_C)
    assert code == 130
    settle(vhost, {"error": 20})
    assert "nothing was done" not in output
    code, output = on_a_terminal(program, "errors", "retry", "--all", answer=b"y\n")
    assert code == 0
    settle(vhost, {"error": 0, "orders": 20})
    assert "20/20" in output
    assert "20 messages of error will be sent back: 20 to orders: go on?" in output
    assert "20 messages sent back: 20 to orders" in output


@pytest.mark.parametrize(
    "arguments",
    [
        ("delay", "destroy"),
        ("tap", "off", "--delete"),
        ("topology", "destroy", "fanout-broadcast", "--sample"),
    ],
    ids=" ".join,
)
def test_a_declined_prompt_is_not_reported_as_an_interruption(program: Program, arguments: tuple[str, ...]) -> None:
    code, output = on_a_terminal(program, *arguments, answer=b"n\n")
    assert code == 1, output
    assert output.splitlines()[-1] == "bide: nothing was done: the answer was no"
    code, output = on_a_terminal(program, *arguments, answer=CTRL_C)
    assert code == 130, output
    assert "bide:" not in output
    assert "Traceback" not in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_retry_neither_loses_nor_repeats_messages(
    program: Program, vhost: Vhost, number: signal.Signals
) -> None:
    count = 5000
    await asyncio.to_thread(fill, vhost, count)
    # Through a proxy in this process: while the test gets no processor time, the command makes no progress either.
    async with Proxy(vhost.url) as proxy:
        process = program.start("errors", "retry", "--all", "--yes", BIDE_URL=proxy.url)

        async def has_sent_some() -> bool:
            assert process.poll() is None
            return await ready_at(vhost.url, "orders") > 0

        await eventually(has_sent_some, step=0.01)
        process.send_signal(number)
        _, output = await asyncio.to_thread(process.communicate, timeout=TIMEOUT)
    assert process.returncode == (130 if number == signal.SIGINT else 128 + number)
    assert "Traceback" not in output
    sent = await ready_at(vhost.url, "orders")
    assert 0 < sent < count
    await asyncio.to_thread(settle, vhost, {"error": count - sent})
