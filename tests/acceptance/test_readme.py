"""The commands and programs of README.md and docs/getting-started.md, with their output."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import bide
from bide.delay.protocol import QueueTarget
from bide.local_broker.cluster import attach
from tests.acceptance.test_cli import Program
from tests.acceptance.test_tutorial import wait_for_gates
from tests.polling import wait_until
from tests.readme import (
    GETTING_STARTED,
    INSTALL,
    PIPELINE,
    README,
    ROOT,
    Shell,
    blocks,
    code,
    commands_of,
    read,
    section,
    shape,
    table,
)
from tests.spark.spark_processes import Counter
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from tests.support import Rabbitmq, Vhost

PAGES: Final = [README, "CONTRIBUTING.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]


@pytest.fixture
def shell(tmp_path: Path, rabbitmq: Rabbitmq) -> Iterator[Shell]:
    found = Shell(tmp_path, rabbitmq)
    yield found
    attach(found.state / "bide" / "broker").stop()


def program_of(page: str, title: str, language: str = "python") -> str:
    """The only block in a language in a section."""
    (program,) = (text for found, text in blocks(page, title) if found == language)
    return program


def check_commands(shell: Shell, block: str) -> None:
    for command, shown in commands_of(block):
        printed = shell.paste(command)
        assert shape(printed) == shape(shown), printed


def test_the_readme_has_at_most_120_lines() -> None:
    assert len(read(README).splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES)
def test_each_link_to_a_file_leads_to_that_file(page: str) -> None:
    for link in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", read(page)):
        assert (ROOT / page).parent.joinpath(link).exists(), link


def test_the_index_lists_every_page() -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)", read("docs/README.md"))
    assert {f"docs/{page}" for page in listed} == {
        page for page in PAGES if page.startswith("docs/") and page != "docs/README.md"
    }


def test_the_picture_of_a_delay_has_the_queues_of_its_route() -> None:
    picture = program_of(README, "How a delay works", "")
    steps = bide.Clock().steps(timedelta(seconds=90), QueueTarget("orders"))
    assert re.findall(r"([\w.]+) \(TTL (\d+) s\)", picture) == [
        (step.routed_to, str(step.delay // timedelta(seconds=1))) for step in steps if step.delay
    ]


@pytest.mark.slow
def test_pip_installs_the_checkout(tmp_path: Path) -> None:
    """Without the index and the dependencies, which tests have installed already."""
    assert "&& pip install .\n" in program_of(README, "Install", "sh")
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--no-compile", "--quiet", "--target", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "install", ".", *offline], cwd=ROOT, check=True, timeout=TIMEOUT)
    assert (tmp_path / "bide" / "__init__.py").is_file()


def test_the_pipeline_page_names_extras_and_scripts_that_exist() -> None:
    assert f"```sh\n{INSTALL}" in read(PIPELINE)
    (script,) = re.findall(r"`(scripts/.*?)`", read(PIPELINE))
    assert os.access(ROOT / script, os.X_OK)
    extras = re.findall(r"pip install 'bide\[(.*?)\]'", read(PIPELINE))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert len(extras) == 2
    assert set(",".join(extras).split(",")) <= set(known)


@pytest.mark.slow
def test_the_readme_prints_what_it_shows(shell: Shell) -> None:
    *_, start = program_of(README, "Install", "sh").splitlines()
    assert shell.paste(start).startswith("RabbitMQ ")

    (_, reminder), (_, shown) = blocks(README, "Send a message later")
    (shell.folder / "tea.py").write_text(reminder, encoding="utf-8")
    assert shape(shell.paste("python tea.py")) == shape(shown)

    (_, endpoint), (_, console) = blocks(README, "Retry what fails")
    (shell.folder / "orders.py").write_text(endpoint, encoding="utf-8")
    steps = commands_of(console)
    (sent, errors) = steps[:1], steps[1:]
    assert [command.split()[1] for command, _ in steps] == ["send", "errors", "errors"]
    with subprocess.Popen(
        [sys.executable, "-u", "orders.py"], cwd=shell.folder, env=shell.environment, stdout=subprocess.PIPE
    ) as serving:
        try:
            with bide.connect_sync(shell.environment["BIDE_URL"]) as client:
                wait_until(lambda: client.exists("orders"), "the endpoint has declared its queue")
            shell.paste("""bide send '{"id": 7, "amount": 20}' --to orders""")
            assert serving.stdout is not None
            assert serving.stdout.readline() == b"charged order 7\n"
            for command, shown in sent:
                assert shape(shell.paste(command)) == shape(shown)
            parked = Counter(shell.environment["BIDE_URL"], "error")
            wait_until(lambda: parked() == 1, "the order is parked")
            parked.close()
            for command, shown in errors:
                printed = shell.paste(command)
                assert shape(printed) == shape(shown), printed
            serving.terminate()
            assert serving.wait(TIMEOUT) == 0
        finally:
            serving.kill()

    schedules = program_of(README, "Cancel, move and repeat")
    (shell.folder / "schedules.py").write_text(
        f"{reminder.partition('with ')[0]}{schedules}    client.cancel('stock')\n", encoding="utf-8"
    )
    (gate,) = re.findall(r"`(bide gate .*?)`", section(README, "Cancel, move and repeat"))
    with subprocess.Popen(
        shlex.split(gate), cwd=shell.folder, env=shell.environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    ) as deciding:
        try:
            wait_for_gates(shell)
            assert shell.paste("python schedules.py").splitlines()[-1] == "ScheduleOutcome.CANCELLED"
            deciding.terminate()
            deciding.wait(TIMEOUT)
        finally:
            deciding.kill()


def test_the_installed_completion_completes_commands_and_options(tmp_path: Path, rabbitmq: Rabbitmq) -> None:
    rows = table(GETTING_STARTED, "Completion with the tab key")
    shell = Shell(tmp_path, rabbitmq)
    shell.environment["HOME"] = str(tmp_path)
    files = []
    for _, command in rows:
        shell.paste(*code(command))
        files.append(tmp_path / code(command)[0].rpartition("> ~/")[2])
    bash, zsh, fish = (one.read_text(encoding="utf-8") for one in files)
    assert zsh.startswith("#compdef bide")
    assert "complete --no-files --command bide" in fish
    ask = "COMP_WORDS=({}); COMP_CWORD={}; _bide_completion bide; echo ${{COMPREPLY[@]}}"
    (shell.folder / "script").write_text(bash, encoding="utf-8")
    asked = [ask.format("bide sch", 1), f"unset COMPREPLY; {ask.format('bide send --del', 2)}"]
    assert shell.paste("\n".join(["source ./script", *asked])) == "schedule\n--delay\n"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_commands_on_a_cluster_print_what_the_page_shows(shell: Shell) -> None:
    check_commands(shell, program_of(GETTING_STARTED, "A cluster on one machine", ""))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_program_that_partitions_a_cluster_runs(shell: Shell) -> None:
    (shell.folder / "partition.py").write_text(
        program_of(GETTING_STARTED, "A cluster on one machine"), encoding="utf-8"
    )
    assert shell.paste("python partition.py") == ""


@pytest.mark.slow
def test_the_programs_of_getting_started_print_what_it_shows(vhost: Vhost) -> None:
    (_, reminder), (_, shown) = blocks(GETTING_STARTED, "With asyncio")
    to_an_exchange = program_of(GETTING_STARTED, "To an exchange")
    endpoint = program_of(GETTING_STARTED, "Handlers and retries")
    environment = {**Program(vhost).environment, "PYTHONUNBUFFERED": "1"}

    def printed(program: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert shape(printed(reminder)) == shape(shown)

    assert printed(to_an_exchange) == ""
    waiting = Counter(vhost.url, "bide.v1.m1")
    # A minute in this queue comes first. A broker counts what it has confirmed a moment later.
    wait_until(lambda: waiting() == 1, "the order waits")
    waiting.close()

    with (
        bide.connect_sync(vhost.url) as client,
        subprocess.Popen([sys.executable, "-c", endpoint], env=environment, stdout=subprocess.PIPE) as serving,
    ):
        try:
            client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
            client.publish(json={"order": 7}, to="orders")
            assert serving.stdout is not None
            assert serving.stdout.readline() == b"charging {'order': 7}\n"
            serving.terminate()
            assert serving.wait(TIMEOUT) == 0
        finally:
            serving.kill()


@pytest.mark.slow
def test_the_commands_of_getting_started_print_what_it_shows(shell: Shell) -> None:
    (_, broker), (_, route) = blocks(GETTING_STARTED, "On the command line")
    check_commands(shell, broker)
    check_commands(shell, route)
    (command, shown) = commands_of(route)[0]
    assert shell.paste(command) == shown
