"""Text of other systems: no control characters, forged lines or reordering in output."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bide
from bide.amqp import tls_warnings
from bide.amqp.url import BrokerUrl
from bide.cli.app import run
from bide.cli.output import echo, json_line, print_json
from bide.cli.running import confirm
from bide.cli.settings import configure_logging, verbose_option
from bide.delay.explain import mermaid
from bide.delay.protocol import QueueTarget
from bide.durations import parse_delay
from bide.foreign_text import visible, visible_json
from bide.pipelines.charts import svg
from bide.pipelines.charts.drawing import Drawing, Label
from bide.runtime.logs import logger
from bide.topology.rendering import graphviz
from tests.timeouts import TIMEOUT

UNSAFE = "\x00\x07\x1b[2J\r\n\x7f\x85\x9b31m\u202e\u2066\u2028\u200f\ufeff\ud800"
"""C0, C1 and bidirectional controls, ends of lines and paragraphs, and what has no UTF-8."""


def is_safe(text: str, keep: str = "") -> bool:
    return all(one.isprintable() or one in keep for one in text)


@given(st.text(st.characters()))
def test_visible_text_has_no_control_characters(text: str) -> None:
    assert is_safe(visible(text))
    assert is_safe(visible(text, keep="\n\t"), "\n\t")


def test_readable_text_is_unchanged() -> None:
    text = "Grüße, 東京, שלום, 🎉 \\x1b"
    assert visible(text) == text


@given(st.text(st.characters()))
def test_json_keeps_its_meaning_without_control_characters(text: str) -> None:
    written = visible_json({text: [text]})
    assert is_safe(written)
    assert json.loads(written) == {text: [text]}


def test_the_command_line_writes_no_foreign_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"name": UNSAFE, UNSAFE: [UNSAFE]})
    shown = capsys.readouterr().out
    assert is_safe(shown, "\n")
    assert json.loads(shown)["name"] == UNSAFE
    line = json_line({"name": UNSAFE}).decode()
    assert is_safe(line.removesuffix("\n"))
    assert json.loads(line) == {"name": UNSAFE}


def test_pages_and_pictures_hold_no_foreign_control_character() -> None:
    topology = bide.Topology([bide.Exchange("a\x9b\u202e\x1bb", "fanout")])
    drawing = Drawing(title=UNSAFE, width=9, height=9, marks=(Label(x=0, y=9, text=UNSAFE),))
    shown = (svg.escape_html(UNSAFE), graphviz(topology), svg.document(drawing, name="chart"))
    for one in shown:
        assert is_safe(one, "\n\t")
    target = QueueTarget("a\x9b\u202e\x1bb")
    assert is_safe(mermaid(bide.Clock(), parse_delay("3s"), target), "\n")


def test_a_log_record_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    log = logger("bide.test_foreign_text")
    try:
        raise ValueError(UNSAFE)
    except ValueError as error:
        log.warning("%s: %d failed: %s", f"id{UNSAFE}", 3, error, exc_info=error)
    (record,) = caplog.records
    assert is_safe(record.getMessage())
    assert record.msg == "%s: %d failed: %s"
    assert is_safe(logging.Formatter().format(record), "\n\t")


def test_an_error_of_a_command_is_one_line_of_printable_text() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bide", "delay", "explain", "3s", "--to", "x", "--layout", "a\nb\x1b[2J\u202ec\u009b"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert is_safe(done.stderr.removesuffix("\n"))


class Socket(NamedTuple):
    """The addresses of a connection between two machines."""

    peer: str
    own: str

    def getpeername(self) -> tuple[str, int]:
        return self.peer, 5672

    def getsockname(self) -> tuple[str, int]:
        return self.own, 40_000


@pytest.mark.parametrize(
    ("options", "peer", "own", "says"),
    [
        ("amqp://u:hidden@h", "10.0.0.1", "10.0.0.2", "without TLS"),
        ("amqp://u:hidden@h", "fe80::1%eth0", "fe80::2%eth0", "without TLS"),
        ("amqp://u:hidden@h", "127.0.0.1", "127.0.0.1", None),
        ("amqp://u:hidden@h", "::1", "::1", None),
        ("amqp://u:hidden@h", "10.0.0.1", "10.0.0.1", None),
        ("amqps://u:hidden@h", "10.0.0.1", "10.0.0.2", None),
        ("amqps://u:hidden@h?verify=false", "127.0.0.1", "127.0.0.1", "verify=false"),
    ],
)
def test_sending_a_password_in_the_clear_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, options: str, peer: str, own: str, says: Any
) -> None:
    monkeypatch.setattr(tls_warnings, "_warned", set())
    for _ in range(2):
        tls_warnings.warn_about_broker(BrokerUrl.parse(options), Socket(peer, own))
    assert [says in one for one in caplog.messages] == ([True] if says else [])
    assert "hidden" not in caplog.text


@pytest.mark.parametrize(
    ("base", "peer", "own", "warns"),
    [
        ("http://h:15672", "10.0.0.1", "10.0.0.2", True),
        ("http://h:15672", "fe80::1%eth0", "fe80::2%eth0", True),
        ("http://h:15672", "10.0.0.1", "10.0.0.1", False),
        ("http://h:15672", "127.0.0.1", "127.0.0.1", False),
        ("http://h:15672", "::1", "::1", False),
        ("https://h:15671", "10.0.0.1", "10.0.0.2", False),
    ],
)
def test_a_password_for_a_management_api_that_others_can_read_is_not_sent_silently(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, base: str, peer: str, own: str, *, warns: bool
) -> None:
    monkeypatch.setattr(tls_warnings, "_warned", set())
    for _ in range(2):
        tls_warnings.warn_about_http(base, "u", Socket(peer, own))
    assert [base in one and "without TLS" in one for one in caplog.messages] == [True] * warns


@pytest.mark.parametrize(
    ("peer", "own", "warns"),
    [
        ("10.0.0.1", "10.0.0.2", True),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("10.0.0.1", "10.0.0.1", False),
        ("::1", "::1", False),
    ],
)
def test_a_password_for_a_database_on_another_machine_is_not_sent_silently(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, peer: str, own: str, *, warns: bool
) -> None:
    monkeypatch.setattr(tls_warnings, "_warned", set())
    for _ in range(2):
        tls_warnings.warn_about_database("ana", Socket(peer, own), "use TLS")
    said = ["'ana'" in one and "without TLS" in one and one.endswith(": use TLS") for one in caplog.messages]
    assert said == [True] * warns


@pytest.mark.parametrize(
    "options", [{}, {"err": True}, {"mark": UNSAFE, "colour": "red"}, {"colour": "red", "fit": True}]
)
def test_a_printed_line_is_one_line_of_printable_text(
    capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    echo(f"name {UNSAFE}", **options)
    shown = "".join(capsys.readouterr())
    assert shown.count("\n") == 1
    assert is_safe(shown.removesuffix("\n"))
    assert "name" in shown


def test_colour_does_not_depend_on_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    echo("\x1b[31mred", mark="✓", colour="green")
    echo("\x1b[31mred", colour="yellow")
    green, yellow, reset = "\x1b[32m", "\x1b[33m", "\x1b[0m"
    assert terminal.getvalue() == f"{green}✓{reset} \\x1b[31mred\n{yellow}\\x1b[31mred{reset}\n"


def test_a_traceback_of_a_command_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    @verbose_option
    def broken() -> None:
        raise RuntimeError(UNSAFE)

    try:
        assert run(["-v"], command=broken) == 1
    finally:
        configure_logging(0)
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert is_safe(shown, "\n")


def test_a_question_is_one_line_of_printable_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    confirm(f"delete {UNSAFE}?")
    shown = "".join(capsys.readouterr())
    assert "delete" in shown
    assert is_safe(shown.rstrip("\n"))


def terminal_output(module: Path) -> set[str]:
    """The calls by which a module writes to standard output or standard error, or asks a question."""
    tree = ast.parse(module.read_text())
    calls = (ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))
    found = {one for one in calls if re.fullmatch(_TERMINAL_OUTPUT, one)}
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "click")
    return found | {f"from click import {one.name}" for node in imports for one in node.names}


_TERMINAL_OUTPUT = (
    r"print|pprint|click\.(echo|secho|style|echo_via_pager|confirm|prompt|progressbar)|traceback\.print_\w+|os\.write"
    r"|sys\.(__)?std(out|err)(__)?\.(buffer\.)?write\w*"
)


def test_all_output_of_the_command_line_passes_the_function_that_escapes_it() -> None:
    """A name in any line may have control characters, and a call that forgets it looks like one that does not."""
    package = Path(bide.__file__).parent
    modules = sorted(one for layer in ("cli", "demo", "pipelines") for one in (package / layer).rglob("*.py"))
    found = {str(one.relative_to(package)): calls for one in modules if (calls := terminal_output(one))}
    assert found == {
        "cli/output.py": {"click.echo", "click.style", "os.write"},
        "cli/running.py": {"click.confirm"},
        "cli/streams.py": {"sys.stderr.write"},
        "pipelines/session.py": {"os.write"},  # what Java wrote
    }


def own_loggers(module: Path) -> list[str]:
    """Calls of ``getLogger`` for a logger of bide, rather than the root logger or a logger of another package."""
    found: list[str] = []
    text = module.read_text()
    if "getLogger" not in text:  # parsing all modules takes longer than reading them
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger") and node.args:
            name = node.args[0]
            if not isinstance(name, ast.Constant) or str(name.value).partition(".")[0] == "bide":
                found.append(f"{module.name}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_every_module_uses_the_logger_that_escapes_foreign_text() -> None:
    source = Path(bide.__file__).parent
    modules = [one for one in source.rglob("*.py") if one != source / "runtime" / "logs.py"]
    assert len(modules) > 100
    assert own_loggers(source / "runtime" / "logs.py")
    assert [call for one in modules for call in own_loggers(one)] == []
