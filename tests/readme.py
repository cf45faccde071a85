"""Code blocks of README.md and docs pages, and a shell to run them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Final

from bide.local_broker.installation import HOME_VARIABLE
from tests.support import Rabbitmq, Vhost
from tests.timeouts import TIMEOUT

ROOT: Final = Path(__file__).parents[1]
README: Final = "README.md"
GETTING_STARTED: Final = "docs/getting-started.md"
PIPELINE: Final = "docs/pipeline.md"
INSTALL: Final = "pip install 'bide[pipeline]' && cd \"$(mktemp -d)\"\n"
"""What tests have done already."""

_BLOCK: Final = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_CHANGING: Final = (
    # Widths of columns; Spark leaves out the zeros at the end of a time, and fills its cell with spaces.
    (r" +(?=\|)", ""),
    (r" +", " "),
    (r"-{2,}", "--"),
    (r"(?<!\w)/[\w./-]+", "PATH"),
    (r"\b([0-9a-f]{16}){1,2}\b", "ID"),
    (r"version [0-9a-f]{20}-\d+", "version ID"),
    # Dates, times and what is counted; a slow machine is late by seconds.
    (r"\d+([-.,:+ ]?\d+)*", "N"),
    (r"\bN m?s\b", "N s"),
)
_SLOW_API: Final = re.compile(r"(?m)^(?:bide: )?the delivery limit of .* \(its management API is too slow\)\n")


def read(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    """The text of a section."""
    _, found, rest = read(page).partition(f"\n## {title}\n")
    assert found, f"{page} has no section {title}"
    return rest.partition("\n## ")[0]


def table(page: str, title: str, number: int = 0) -> list[list[str]]:
    """The rows of a table of a section, without its head."""
    found = re.findall(r"^\|.*\n\|[-|]+\|\n((?:\|.*\n)+)", section(page, title), re.MULTILINE)
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip()[1:-1])] for row in found[number].splitlines()]
    return [[cell.replace(r"\|", "|") for cell in row] for row in rows]


def code(cell: str) -> list[str]:
    """The texts between backticks."""
    return re.findall(r"`([^`]+)`", cell)


def blocks(page: str, title: str | None = None) -> list[tuple[str, str]]:
    """Language and text of the blocks of a section, or of the whole page."""
    found = _BLOCK.findall(read(page) if title is None else section(page, title))
    return [(language, dedent(text)) for _, language, text in found]


def commands_of(block: str) -> list[tuple[str, str]]:
    """Each command of a console block, and the output below it."""
    found = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)
    assert found[0] == ""
    return list(zip(found[1::2], found[2::2], strict=True))


def shape(text: str) -> list[str]:
    """What stays the same from run to run, line by line."""
    for pattern, instead in _CHANGING:
        text = re.sub(pattern, instead, text)
    return text.strip().splitlines()


def without_left_out(printed: list[str], shown: list[str]) -> list[str]:
    """What is printed, where ``...`` replaces the lines for which it stands in what is shown."""
    pattern = "".join(r"((?:.*\n)*?)" if line == "..." else re.escape(f"{line}\n") for line in shown)
    found = re.fullmatch(pattern, "".join(f"{line}\n" for line in printed))
    return printed if found is None else shown


def without_slow_api(printed: str) -> str:
    """What is printed, without the warning of a busy machine that it assumes the default delivery limit."""
    return _SLOW_API.sub("", printed)


class Shell:
    """A shell with bide. Variables stay from one paste to the next.

    Args:
        folder: where it is.
        vhost: what the commands use; if None, there is no broker.

    Attributes:
        state: where programs keep what lasts.
    """

    def __init__(self, folder: Path, rabbitmq: Rabbitmq, vhost: Vhost | None = None) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("BIDE_")},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "XDG_STATE_HOME": str(self.state),
        }
        if (home := rabbitmq.home or os.environ.get(HOME_VARIABLE)) is not None:
            self.environment[HOME_VARIABLE] = str(home)
        if vhost is not None:
            self.environment |= {"BIDE_URL": vhost.url, "BIDE_MANAGEMENT_URL": vhost.broker.management_url}

    def check(self, commands: Iterable[tuple[str, str]]) -> None:
        """Paste commands one by one, and compare what they print with what is shown."""
        for command, shown in commands:
            printed = re.sub(r"virtual host \S+", "virtual host /", self.paste(command))
            expected = shape(shown)
            assert without_left_out(shape(printed), expected) == expected, f"{command}\n{printed}"

    def paste(self, commands: str) -> str:
        """What they print, on standard error too, as :func:`without_slow_api` leaves it. None may fail."""
        printed, variables = self.folder / "printed", self.folder / "variables"
        with (
            printed.open("wb") as output,
            subprocess.Popen(
                ["bash", "-e", "-c", f"{commands}\nenv -0 >{variables}"],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
        ):
            try:
                code = process.wait(timeout=TIMEOUT)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        text = without_slow_api(printed.read_text(encoding="utf-8"))
        assert code == 0, text
        pairs = (one.partition("=") for one in variables.read_text(encoding="utf-8").split("\0") if one)
        self.environment = {name: value for name, _, value in pairs}
        return text
