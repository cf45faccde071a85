"""Generated command lines, none of which ends in an internal error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pika
import pytest

import bide
from bide.local_broker.installation import HOME_VARIABLE
from tests.generated_input import DEAD, Case, cases, fault, files, report, run_in_process
from tests.relay_process import gate
from tests.support import Vhost
from tests.timeouts import TIMEOUT

ENDLESS = frozenset({"console", "gate", "relay"})
"""Commands that a live broker keeps busy until a signal."""

COSTLY = frozenset({"bench", "broker", "check", "demo", "pipeline"})
"""Commands that start brokers, or Java."""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a command writes go to a folder of the test; neither RabbitMQ nor Java is installed."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(tmp_path)
    for name in (HOME_VARIABLE, "HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "no-java"))


def check(some: Iterable[Case]) -> int:
    """Run them all, and return how many there were."""
    found: dict[str, list[str]] = defaultdict(list)
    count = 0
    for case in some:
        count += 1
        outcome = run_in_process([*case.command, *case.arguments])
        if wrong := fault(outcome):
            found[wrong].append(f"{case} => {outcome.code}, {outcome.err[-300:]}")
    assert not found, report(found)
    return count


def ends_soon(case: Case) -> bool:
    """Whether a command on a live broker ends by itself. With --over, those of error queues run for that time."""
    is_paced = case.command[0] == "errors" and any(one.startswith("--over=") for one in case.arguments)
    return case.command[0] not in COSTLY | ENDLESS and not is_paced


def of_one_pattern(some: Iterable[Case]) -> Iterable[Case]:
    """The patterns have the same options under every verb: all of them under 'show', and one under the others."""
    for case in some:
        if case.command[:2] not in {("topology", verb) for verb in ("apply", "diff", "destroy")} or (
            case.command[2] == "rpc"
        ):
            yield case


ODD: tuple[dict[str, Any], ...] = (
    {
        "message_id": "\x1b[2J\n\u202e",
        "type": "\r\n",
        "headers": {"bide-failed-queue": "x", "bide-exception": "\x9b\n"},
    },
    {"timestamp": (1 << 63) - 1, "expiration": "99999999999", "headers": {"bide-to": "q:x", "bide-due": "²"}},
    {"headers": {"x-death": [5, None, {"queue": 5, "time": "²"}], "bide-attempts": "²", "bide-attempt-times": "²"}},
    {"headers": {"bide-failed-queue": "bide.v1.h1", "NServiceBus.FailedQ": "x@host", "NServiceBus.TimeOfFailure": "²"}},
    {"headers": {"bide-failed-queue": "q" * 300, "bide-failed-at": -(1 << 63)}},
)
"""Properties of failed messages that no client should send."""


def with_odd_messages(some: Iterable[Case], url: str) -> Iterator[Case]:
    """Put odd messages into the queues ``error`` and ``x`` before each command that reads them."""
    for case in some:
        if case.command[0] in {"errors", "receive"}:
            put_odd_messages(url)
        yield case


def put_odd_messages(url: str) -> None:
    # A connection for each time: some of the commands close those of others.
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for queue in ("error", "x"):
            channel.queue_delete(queue)  # one of the commands makes it a quorum queue
            channel.queue_declare(queue, durable=True)
            for one in ODD:
                channel.basic_publish("", queue, b"\xff\x00[", pika.BasicProperties(**one), mandatory=True)


@pytest.mark.slow
def test_no_command_line_ends_in_an_internal_error_without_a_broker(tmp_path: Path) -> None:
    some = (one for one in cases(tmp_path, every=30) if one.command[0] not in {"pipeline", "demo"})
    assert check(of_one_pattern(some)) > 600


@pytest.mark.slow
def test_no_command_line_ends_in_an_internal_error_on_a_live_broker(tmp_path: Path, vhost: Vhost) -> None:
    some: Iterable[Case] = cases(tmp_path, url=vhost.url, api=vhost.broker.management_url, every=400)
    # To put 370 queues there takes seconds.
    some = (one for one in some if ends_soon(one) and one.command != ("delay", "apply"))
    with gate(vhost, tmp_path / "gate"):
        assert check(with_odd_messages(of_one_pattern(some), vhost.idle_url)) > 40


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_value_of_any_option_ends_in_an_internal_error(tmp_path: Path) -> None:
    assert check(of_one_pattern(one for one in cases(tmp_path) if one.command[0] not in {"pipeline"})) > 20_000


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_option_of_a_pipeline_ends_in_an_internal_error(tmp_path: Path) -> None:
    assert check(one for one in cases(tmp_path, every=12) if one.command[0] == "pipeline") > 200


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_value_of_any_option_ends_in_an_internal_error_on_a_live_broker(tmp_path: Path, vhost: Vhost) -> None:
    some: Iterable[Case] = cases(tmp_path, url=vhost.url, api=vhost.broker.management_url, every=12)
    some = of_one_pattern(one for one in some if ends_soon(one))
    with gate(vhost, tmp_path / "gate"):
        assert check(with_odd_messages(some, vhost.idle_url)) > 1500


@pytest.mark.parametrize(
    "words",
    [
        "delay verify --management-url amqp://[::1",
        "relay --allow * --resolution 9999999d",
        "send --to x --delay ²s",
        "broker start --port ²",
        "topology explain --exchange x --definitions deep.json",
        "topology explain --exchange x --definitions deeper.json",
        "topology explain --exchange x --definitions five.json",
        "topology explain --exchange x --definitions null.json",
        "topology explain --exchange x --definitions empty",
    ],
)
def test_inputs_of_former_internal_errors_are_bad_usage(tmp_path: Path, words: str) -> None:
    """Listed here, because the other tests run a sample of the generated command lines."""
    files(tmp_path)
    outcome = run_in_process([*words.split(), "--url", DEAD] if words.startswith("relay") else words.split())
    assert fault(outcome) is None, outcome
    assert (outcome.code, outcome.out) == (2, ""), outcome


ODD_NAMES = ("\x7f", "a\nb\x1b[2J\u202ec\x9b")


def test_names_cannot_control_the_terminal(tmp_path: Path) -> None:
    some = (
        one
        for one in cases(tmp_path)
        if one.command[:2] in {("broker", "stop"), ("topology", "show"), ("delay", "explain")}
        and any(argument.removeprefix("--").partition("=")[2] in ODD_NAMES for argument in one.arguments)
    )
    assert check(some) > 100


@pytest.mark.parametrize(
    "words",
    [
        "broker stop --folder=",
        "topology show point-to-point --queue=",
        "topology show point-to-point --mermaid --queue=",
        "topology show point-to-point --dot --queue=",
        "delay explain 3s --to=",
        "delay explain 3s --mermaid --to=",
    ],
)
def test_a_name_cannot_forge_a_line(words: str) -> None:
    plain, *odd = (run_in_process((words + name).split(" ")) for name in ("ab", *ODD_NAMES))
    # A pattern refuses line breaks.
    accepted = [one for one in odd if one.code != 2]
    assert accepted
    for one in accepted:
        assert fault(one) is None, one
        assert (one.code, one.out.count("\n")) == (plain.code, plain.out.count("\n")), one


def shell(words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """``bide`` as a process, with redirections."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        ["/bin/sh", "-c", f'exec "{sys.executable}" -m bide {words}'],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=TIMEOUT,
        check=False,
        **options,  # type: ignore[call-overload]  # options by name
    )
    return done


@pytest.mark.slow
def test_a_process_does_not_end_in_an_internal_error(tmp_path: Path) -> None:
    some = [one for one in of_one_pattern(cases(tmp_path, every=997)) if one.command[0] not in COSTLY | ENDLESS]
    some = [one for one in some if one.parameter]
    for case in some[:: max(len(some) // 8, 1)]:
        done = subprocess.run(
            [sys.executable, "-m", "bide", *case.command, *case.arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert done.returncode in (0, 1, 2), case
        for words in (b"internal error", b"Traceback"):
            assert words not in done.stderr, case


@pytest.mark.parametrize("options", ["", "--json"])
def test_a_full_disk_is_not_an_internal_error(options: str) -> None:
    done = shell(f"delay explain 3s --to x {options} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "bide: input or output failed: No space left on device\n")


def test_a_closed_output_is_neither_a_success_nor_an_internal_error() -> None:
    for command in ("delay explain 3s --to x", "topology list --json", "--help"):
        done = shell(f"{command} >&-")
        assert (done.returncode, done.stderr) == (1, "bide: input or output failed: Bad file descriptor\n")


def test_a_closed_output_gets_no_bytes_of_a_connection(vhost: Vhost) -> None:
    """Otherwise the socket would have its number, and what is printed would go to the broker."""
    environment = {**os.environ, "BIDE_URL": vhost.url}
    done = shell("delay verify >&-", env=environment)
    assert (done.returncode, done.stderr) == (1, "bide: input or output failed: Bad file descriptor\n")


def test_a_closed_input_is_not_an_internal_error(vhost: Vhost) -> None:
    done = shell("send --to x <&-")
    assert (done.returncode, done.stderr) == (1, "bide: input or output failed: Bad file descriptor\n")
    done = shell("delay explain 3s --to x <&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_standard_error_is_not_an_internal_error() -> None:
    done = shell("relay --allow '' 2>&-")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_reader_that_ends_first_is_not_an_internal_error() -> None:
    done = shell("topology show rpc --help | true")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("no_input", ["</dev/null", "<&-"])
@pytest.mark.parametrize(
    "words", ["delay destroy", "tap off --delete", "topology destroy rpc --queue q", "errors discard --all"]
)
def test_a_prompt_without_a_terminal_names_the_option(vhost: Vhost, words: str, no_input: str) -> None:
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue("error")]))
        client.publish(b"failed", to="error")
    done = shell(f"{words} {no_input}", env={**os.environ, "BIDE_URL": vhost.url})
    assert done.returncode == 2, done.stderr
    assert "give --yes" in done.stderr
    assert not re.search("Aborted|Traceback|failed", done.stderr)


@pytest.mark.parametrize("module", ["bide.cli.streams", "bide.cli.app", "click", "asyncio", "ssl", "bide.client"])
def test_ctrl_c_during_imports_leaves_no_traceback(module: str) -> None:
    """Sent when a module is imported: before the arguments are read, or by the command."""
    program = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from bide.cli import main\n"
        "sys.argv = ['bide', 'errors', 'list']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


def test_ctrl_c_is_handled_before_other_modules_are_imported() -> None:
    program = "import sys; before = set(sys.modules); import bide.cli; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert set(done.stdout.split()) == {"__future__", "bide", "bide.cli"}
