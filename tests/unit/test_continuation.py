"""The command that continues an interrupted one."""

from __future__ import annotations

import os
import subprocess

import pytest

from bide.cli.continuation import command, shell_command


@pytest.mark.parametrize("option", [["--url"], ["--url="]], ids=["separate", "joined"])
@pytest.mark.parametrize("password", ["secret", "sec@ret", "sec:r@et", "@secret@", ":secret"])
@pytest.mark.parametrize("hosts", ["broker", "a:5672,b:5672/vhost?order=given"])
def test_no_part_of_a_password_is_printed(option: list[str], password: str, hosts: str) -> None:
    url = f"amqp://ann:{password}@{hosts}"
    arguments = [option[0] + url] if option[0].endswith("=") else [option[0], url]
    printed = command(["errors", "retry", *arguments])
    assert f"amqp://ann:***@{hosts}" in printed.replace("'", "")
    assert "sec" not in printed
    assert "et@" not in printed


@pytest.mark.parametrize("name", ["password", "sslpassword", "PASSWORD"])
def test_a_password_in_the_query_of_a_url_is_not_printed(name: str) -> None:
    printed = command(["timeouts", "migrate", "--database", f"postgresql://ann@db/x?{name}=se/cr@et&sslmode=require"])
    assert printed.endswith(f"'postgresql://ann@db/x?{name}=***&sslmode=require'")


def test_a_url_without_a_password_is_unchanged() -> None:
    assert command(["send", "--url", "amqp://ann@a:5672,b:5672/"]) == "bide send --url amqp://ann@a:5672,b:5672/"


def test_a_shell_reads_odd_words_as_they_were() -> None:
    words = ["a b", "plain", "$(id)", "it's\n", "\x1b[2J\u202e\x9b'\\", "\udcff9"]
    line = shell_command(["printf", "%s\\0", *words])
    assert line.isprintable()
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(one) for one in words]
