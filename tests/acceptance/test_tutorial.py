"""The five tutorials, in their order and in one folder, with what they print."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import bide
from bide.local_broker.cluster import attach
from tests.polling import wait_until
from tests.readme import Shell, blocks, commands_of, shape
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from tests.support import Rabbitmq

ON_A_BROKER: Final = tuple(f"docs/tutorial-{name}.md" for name in ("first-delay", "retries", "recovery", "reminders"))
TESTING: Final = "docs/tutorial-testing.md"


def write_program(folder: Path, text: str) -> None:
    found = re.match(r"# ([\w.]+)\n", text)
    assert found is not None, "a program begins with its name"
    (folder / found[1]).write_text(text, encoding="utf-8")


class SecondShell:
    """A program that runs beside the commands, and what it prints."""

    def __init__(self, shell: Shell, command: str) -> None:
        self.output = shell.folder / "output-of-the-second-shell"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                shlex.split(command), cwd=shell.folder, env=shell.environment, stdout=output, stderr=output
            )

    def wait_to_print(self, line: str) -> None:
        wait_until(lambda: outline(line)[0] in outline(self.output.read_text()), line)

    def stop(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(TIMEOUT)
        finally:
            self.process.kill()


@contextmanager
def second_shell(shell: Shell, command: str) -> Iterator[SecondShell]:
    running = SecondShell(shell, command)
    try:
        yield running
    finally:
        running.stop()


def is_parked(shell: Shell) -> bool:
    with bide.connect_sync(shell.environment["BIDE_URL"]) as client:
        return client.exists("error") and client.message_count("error") == 1


def exists(shell: Shell, queue: str) -> bool:
    with bide.connect_sync(shell.environment["BIDE_URL"]) as client:
        return client.exists(queue)


def wait_for_gates(shell: Shell) -> None:
    """Until gates lead all partitions, and answer."""
    with bide.connect_sync(shell.environment["BIDE_URL"], timeout=timedelta(seconds=TIMEOUT)) as client:
        assert client.count_scheduled() == 0


@pytest.fixture
def shell(tmp_path: Path, rabbitmq: Rabbitmq) -> Iterator[Shell]:
    found = Shell(tmp_path, rabbitmq)
    yield found
    attach(found.state / "bide" / "broker").stop()


@pytest.mark.long
@pytest.mark.slow
def test_the_tutorials_on_a_broker_print_what_they_show(shell: Shell) -> None:
    with ExitStack() as stack:
        running: SecondShell | None = None
        for page in ON_A_BROKER:
            for language, text in blocks(page):
                match language:
                    case "python":
                        write_program(shell.folder, text)
                    case "sh":
                        if running is not None:
                            running.stop()
                        running = stack.enter_context(second_shell(shell, text))
                    case "text":
                        assert running is not None
                        running.wait_to_print(text)
                    case _:
                        run_commands(shell, text)


def run_commands(shell: Shell, block: str) -> None:
    for command, shown in commands_of(block):
        if command == "bide errors groups":
            wait_until(lambda: is_parked(shell), "the order is parked")
        if command == "python shop.py":
            wait_for_gates(shell)
        if command.startswith("bide send '{"):
            wait_until(lambda: exists(shell, "orders"), "the endpoint has declared its queue")
        printed = shell.paste(command)
        assert outline(printed) == outline(shown), f"{command}\n{printed}"


def outline(text: str) -> list[str]:
    """The shape of a text, without the user, and with the short ids of operations."""
    text = re.sub(r"version \S+", "version V", text)
    text = re.sub(r"(virtual host /, as) \S+", r"\1 GATE", text)
    return shape(re.sub(r"\b[0-9a-f]{12}\b", "ID", re.sub(r"\S+@\S+ \(\S+\)", "USER", text)))


def test_the_tests_of_the_tutorial_pass(tmp_path: Path) -> None:
    for language, text in blocks(TESTING):
        if language == "python":
            write_program(tmp_path, text)
        else:
            ((command, shown),) = commands_of(text)
            done = subprocess.run(
                [sys.executable, *command.split()[1:], "-p", "no:cacheprovider", "--rootdir", str(tmp_path)],
                cwd=tmp_path,
                env=os.environ,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert shape(done.stdout) == shape(shown)
