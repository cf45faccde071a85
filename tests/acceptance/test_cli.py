"""The command line as a subprocess, on a real broker."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import click
import pytest

import bide
from bide.admin.report import Finding, VerifyReport
from bide.cli.app import cli, run
from bide.topology import Argument
from tests.acceptance.command_line import WARNINGS, CommandLine
from tests.readme import without_slow_api
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from tests.support import Vhost

SMALL = ("--max-delay", "20s", "--resolution", "50ms")
PATIENT = ("--timeout", f"{TIMEOUT:.0f}s")
"""Options of a ``bide receive`` that ends with the last message that it waits for."""

COMMAND_LINE = CommandLine()


class Program:
    """Runs ``bide`` on one virtual host."""

    def __init__(self, vhost: Vhost) -> None:
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("BIDE_")},
            "BIDE_URL": vhost.url,
            "BIDE_MANAGEMENT_URL": vhost.broker.management_url,
            "PYTHONWARNINGS": WARNINGS,
        }

    def run(self, *arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
        everything = {**self.environment, **environment}
        if not any(name.startswith("PYTHON") for name in environment):
            return COMMAND_LINE.run(arguments, stdin=stdin, environment=everything)
        return subprocess.run(
            [sys.executable, "-m", "bide", *arguments],
            input=stdin,
            capture_output=True,
            env=everything,
            timeout=TIMEOUT,
            check=False,
        )

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "bide", *arguments],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ok(self, *arguments: str, stdin: bytes = b"") -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def fails(self, code: int, *arguments: str, **environment: str) -> str:
        """One line on standard error, and no traceback."""
        done = self.run(*arguments, stdin=b"", **environment)
        stderr = without_slow_api(done.stderr.decode())
        assert done.returncode == code, stderr
        assert stderr.count("\n") == 1, stderr
        assert "Traceback" not in stderr
        return stderr


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_sent_messages_are_received_with_their_properties(program: Program) -> None:
    with bide.connect_sync(program.environment["BIDE_URL"]) as client:
        client.declare(
            bide.Topology(
                [bide.Exchange("shop", "topic")],
                [bide.Queue.quorum("orders")],
                [bide.Binding("shop", "orders", "order.*")],
            )
        )
    described = ("--type", "Shop.PlaceOrder", "--content-type", "text/plain")
    program.ok("send", "hello", "--to", "orders", "--in", "1s", "--header", "mine=1", *described, *SMALL)
    sent = program.ok(
        "send", "--exchange", "shop", "--routing-key", "order.created", "--in", "3.2s", "--json", *SMALL, stdin=b"stdin"
    )
    (receipt,) = lines(sent)
    assert receipt["hops"] == 3
    first, second = lines(program.ok("receive", "orders", "--count", "2", *PATIENT, "--json"))
    assert first["body"] == "hello"
    assert (first["exchange"], first["routing_key"], first["headers"]) == ("", "orders", {"mine": "1"})
    assert (second["exchange"], second["routing_key"], second["body"]) == ("shop", "order.created", "stdin")
    assert second["message_id"] == receipt["message_id"]
    assert (first["type"], first["content_type"]) == ("Shop.PlaceOrder", "text/plain")
    assert (first["correlation_id"], first["reply_to"]) == (None, None)
    # On the wire, a due time is rounded up to a millisecond, which may be that of the next second.
    shown, sent_for = (datetime.fromisoformat(one["due"]) for one in (second, receipt))
    assert timedelta(0) <= shown - sent_for <= timedelta(milliseconds=1)
    assert 0 <= first["lateness_ms"] < 30_000
    assert program.fails(1, "receive", "orders", "--count", "1", "--timeout", "1s").startswith("bide: 0 of 1 messages")


def test_repeated_messages_and_past_due_times_arrive_at_once(program: Program) -> None:
    program.run("receive", "q", "--declare", "--timeout", "1s", "--count", "1")
    assert len(lines(program.ok("send", "x", "--to", "q", "--count", "250", "--json"))) == 250
    program.ok("send", "late", "--to", "q", "--at", "2020-01-01T00:00:00+01:00")
    received = lines(program.ok("receive", "q", "--count", "251", *PATIENT, "--json"))
    assert received[-1]["body"] == "late"
    assert received[-1]["lateness_ms"] > 1e9
    assert len({one["message_id"] for one in received}) == 251


@pytest.mark.parametrize("management", [True, False], ids=["management", "amqp"])
def test_receiving_from_a_delay_queue_hastens_nothing(program: Program, vhost: Vhost, management: bool) -> None:
    """By its name, by its arguments or else by the keys of its messages; a name alone does not make a delay queue."""
    program.environment["BIDE_MANAGEMENT_URL"] = vhost.broker.management_url if management else "http://127.0.0.1:1"
    clock = bide.Clock()
    level: dict[str, Argument] = {"x-message-ttl": 3_600_000, "x-dead-letter-exchange": "bide.v1.c"}
    queues = [bide.Queue.quorum("q"), bide.Queue.quorum("backup.v1.s3"), bide.Queue.quorum("mine", level)]
    binding = bide.Binding("bide.v1.m", "mine", "~m9")
    with bide.connect_sync(program.environment["BIDE_URL"]) as client:
        client.declare(clock.core_topology() | bide.Topology(queues=queues, bindings=[binding]))
        receipt = client.publish(b"x", to="q", delay="10s")
        client.publish(b"y", to="q", delay="9m")
        client.publish(b"z", to="backup.v1.s3")
    for queue in ("bide.v1.s10", "mine"):
        stderr = program.fails(2, "receive", queue, "--count", "1", *PATIENT)
        assert stderr.startswith(f"bide: the queue {queue!r} belongs to a delay infrastructure: messages wait there")
    if management:
        assert "z" in program.ok("receive", "backup.v1.s3", "--count", "1", *PATIENT)
    (message,) = lines(program.ok("receive", "q", "--count", "1", *PATIENT, "--json"))
    assert (message["body"], message["message_id"]) == ("x", receipt.message_id)
    assert message["lateness_ms"] >= 0


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_receive_loses_nothing(program: Program, end: signal.Signals) -> None:
    with bide.connect_sync(program.environment["BIDE_URL"]) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        for number in range(500):
            client.publish(str(number), to="q")
    process = subprocess.Popen(
        [sys.executable, "-m", "bide", "receive", "q", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # what a buffer had read ahead, communicate() would not see
        env=program.environment,
    )
    assert process.stdout is not None
    head = [process.stdout.readline() for _ in range(20)]
    process.send_signal(end)
    rest, stderr = process.communicate(timeout=TIMEOUT)
    assert process.returncode == (130 if end is signal.SIGINT else 128 + end)
    assert b"Traceback" not in stderr
    printed = [one["body"] for one in lines(b"".join((*head, rest)).decode())]
    left: list[str] = []
    sent = {str(number) for number in range(500)}
    patience = timedelta(seconds=TIMEOUT)
    url = program.environment["BIDE_URL"]
    with bide.connect_sync(url) as client, client.consume("q", timeout=patience) as messages:
        # What comes again comes before what was not received yet.
        while not sent <= {*printed, *left}:
            message = next(messages)
            left.append(message.body.decode())
            message.ack()
    assert sent == {*printed, *left}
    # What was printed was acknowledged. But a quorum queue whose client is slowed down holds acknowledgements back, and
    # forgets them when the channel closes: at most a prefetch of messages comes again.
    assert len(set(printed) & set(left)) <= 100


def test_verify_reports_what_apply_declared_and_destroy_removed(program: Program) -> None:
    assert "problem" in program.run("delay", "verify", *SMALL).stderr.decode()
    assert "39 queues" not in program.ok("delay", "apply", *SMALL)
    applied = json.loads(program.ok("delay", "apply", *SMALL, "--json"))
    assert applied["declared"]["exchanges"] == 15
    report = json.loads(program.ok("delay", "verify", *SMALL, "--json"))
    assert report["ok"] is True
    assert {one["check"] for one in report["findings"]} >= {"release", "queues", "bindings", "stuck messages"}
    with bide.connect_sync(program.environment["BIDE_URL"]) as client:
        client.destroy(bide.Topology(queues=[bide.Queue("bide.v1.s7")]), force=True)
    done = program.run("delay", "verify", *SMALL)
    assert done.returncode == 1
    assert "1 of " in done.stdout.decode()
    assert "'bide.v1.s7'" in done.stdout.decode()
    program.ok("delay", "destroy", *SMALL, "--yes")
    assert program.run("delay", "verify", *SMALL).returncode == 1


def test_no_finding_is_wider_than_the_terminal(
    vhost: Vhost, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIDE_URL", vhost.url)
    monkeypatch.setenv("BIDE_MANAGEMENT_URL", vhost.broker.management_url)
    verify = ("delay", "verify", *SMALL)
    assert run([*verify, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    report = VerifyReport(
        **{name: found[name] for name in ("layout", "broker", "vhost", "release")},
        findings=tuple(Finding(**one) for one in found["findings"]),
    )

    async def find_the_same(*_: object) -> VerifyReport:
        """The same findings for each width: those of a running broker can change."""
        return report

    monkeypatch.setattr("bide.cli.delay._verify", find_the_same)
    assert run(verify) == 1
    whole = set(re.findall(r"[^\W_]+", capsys.readouterr().out))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for columns in (60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert run(verify) == 1
        shown = click.unstyle(capsys.readouterr().out)
        assert max(map(len, shown.splitlines())) <= columns
        # Every piece of a name appears unbroken.
        assert whole <= set(re.findall(r"[^\W_]+", shown))


def test_apply_warns_of_a_policy_that_deletes_messages(program: Program, vhost: Vhost) -> None:
    definition = {"pattern": ".*", "definition": {"expires": 86_400_000}, "priority": 3, "apply-to": "all"}
    vhost.broker.management.call("PUT", "policies", vhost.name, "housekeeping", body=definition)
    applied = program.run("delay", "apply", *SMALL, "--json")
    assert applied.returncode == 0
    warning = applied.stderr.decode()
    assert warning.startswith("bide: warning: the policy 'housekeeping' sets expires to 86400000 on 40 of 40 queues")
    assert warning.count("\n") == 1
    assert json.loads(applied.stdout)["warnings"] == [warning.removeprefix("bide: warning: ").rstrip()]
    assert program.run("delay", "verify", *SMALL).returncode == 1
    applied = program.run("delay", "apply", "--protect", *SMALL)
    assert applied.returncode == 0
    assert applied.stderr == b""
    assert (
        "policy bide.protect.bide.v1: applies to the queues with priority 4 in place of housekeeping, without expires"
        in applied.stdout.decode()
    )
    again = json.loads(program.ok("delay", "apply", "--protect", *SMALL, "--json"))
    assert again["protection"]["displaced"] == ["housekeeping"]
    report = json.loads(program.ok("delay", "verify", *SMALL, "--json"))
    assert {one["check"]: one["status"] for one in report["findings"]}["protection"] == "ok"
    program.ok("delay", "destroy", *SMALL, "--yes")
    assert [one["name"] for one in vhost.broker.management.call("GET", "policies", vhost.name)] == ["housekeeping"]


def test_apply_does_not_fail_without_the_management_api(program: Program) -> None:
    unreachable = "http://127.0.0.1:1"
    applied = program.run("delay", "apply", *SMALL, BIDE_MANAGEMENT_URL=unreachable)
    assert (applied.returncode, applied.stderr) == (0, b"")
    stderr = program.fails(1, "delay", "apply", "--protect", *SMALL, BIDE_MANAGEMENT_URL=unreachable)
    assert "127.0.0.1:1" in stderr


def test_explain_prints_the_table_of_the_manual(program: Program) -> None:
    table = program.ok("delay", "explain", "10s", "--to", "destination", "--layout", "nservicebus", "--levels", "4")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert [row for row in cells if not row[0].startswith("-")] == [
        ["Exchange", "Routing Key Segment", "Routing Value", "Routed To", "Delay in Queue", "Dead-letter To"],
        ["Level 03", "1.0.1.0.destination", "1", "Level 03 Queue", "8 seconds", "Level 02 Exchange"],
        ["Level 02", "1.0.1.0.destination", "0", "Level 01 Exchange", "-", "-"],
        ["Level 01", "1.0.1.0.destination", "1", "Level 01 Queue", "2 seconds", "Level 00 Exchange"],
        ["Level 00", "1.0.1.0.destination", "0", "Delivery Exchange", "-", "-"],
        ["Delivery Exchange", "1.0.1.0.destination", "destination", "destination", "-", "-"],
    ]
    assert "graph LR" in program.ok("delay", "explain", "90s", "--to", "q", "--mermaid")
    rows = json.loads(program.ok("delay", "explain", "90s", "--to", "q", "--json"))
    assert len(rows) == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["send", "x", "--to", "q", "--in", "-5s"], "negative"),
        (["send", "x", "--to", "q", "--in", "soon"], "cannot be read"),
        (["send", "x", "--to", "q", "--at", "2026-12-24T18:00:00"], "no time zone"),
        (["send", "x"], "needs one target"),
        (["send", "x", "--to", "q", "--in", "9999d"], "longer than"),
        (["send", "x", "--to", "q", "--header", "bide-due=1"], "bide-due"),
        (["delay", "explain", "1s"], "--to or --exchange"),
        (["delay", "apply", "--layout", "waiting-hall", "--levels", "29"], "29 levels: give 1 to 28"),
        (["delay", "apply", "--layout", "nservicebus", "--levels", "4"], "leave out --levels"),
        (["tap", "on", "--max-age", "soon"], "--max-age: the delay 'soon' cannot be read"),
        (["pipeline", "audit", "--into", "audit", "--every", "soon"], "--every: the delay 'soon' cannot be read"),
        (["pipeline", "audit", "--into", "/dev/null"], "the folder /dev/null cannot be used"),
        (["pipeline", "report", "audit", "--lost-after", "soon"], "--lost-after: the delay 'soon' cannot be read"),
        (["pipeline", "replay", "--queue", "error", "--over", "soon"], "--over: the delay 'soon' cannot be read"),
        (["nonsense"], "No such command"),
        (["receive"], "Missing argument"),
        (["--url", "http://x", "receive", "q"], "amqp://"),
    ],
)
def test_bad_usage_exits_with_2_and_the_reason(program: Program, arguments: Sequence[str], words: str) -> None:
    assert words in program.fails(2, *arguments)


def test_broker_errors_exit_with_1_and_without_the_password(program: Program) -> None:
    url = program.environment["BIDE_URL"]
    parts = urlsplit(url)
    assert "does not exist" in program.fails(1, "send", "x", "--to", "missing", "--in", "1s", *SMALL)
    assert "no broker answers" in program.fails(1, "receive", "q", BIDE_URL="amqp://guest:secret@127.0.0.1:1/")
    wrong = urlunsplit(parts._replace(netloc=f"bide:top-secret@{parts.netloc.rpartition('@')[2]}"))
    stderr = program.fails(1, "send", "x", "--to", "q", BIDE_URL=wrong)
    assert "does not accept the user 'bide'" in stderr
    assert "top-secret" not in stderr
    elsewhere = urlunsplit(parts._replace(path="/nowhere"))
    assert "no virtual host 'nowhere'" in program.fails(1, "send", "x", "--to", "q", BIDE_URL=elsewhere)


def commands(command: click.Command, name: str = "bide") -> list[tuple[str, click.Command]]:
    found = [(name, command)]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for child in command.list_commands(context):
            inner = command.get_command(context, child)
            assert inner is not None
            found += commands(inner, f"{name} {child}")
    return found


def test_every_command_and_option_has_a_help_text() -> None:
    found = commands(cli)
    assert len(found) > 100
    assert not [name for name, command in found if len(command.help or "") <= 20]
    options = [(name, one) for name, command in found for one in command.params if isinstance(one, click.Option)]
    assert not [f"{name} {one.name}" for name, one in options if not one.help]


def test_send_imports_only_what_it_uses(program: Program) -> None:
    done = program.run("send", "x", "--to", "missing", PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rpartition(b"|")[2].strip().decode() for line in done.stderr.splitlines()}
    assert b"no queue takes the message" in done.stderr, "it asked the broker"
    assert "bide.client.publisher" in imported
    unused = {"bide.cli.errors", "bide.client.consumer", "bide.delay.cascade", "httpx2", "importlib.metadata", "rich"}
    assert not imported & unused
