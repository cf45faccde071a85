"""What README.md shows, and a shell to paste it into."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from bide.local_broker.installation import HOME_VARIABLE
from tests.patience import PATIENCE
from tests.support import Rabbitmq

ROOT: Final = Path(__file__).parents[1]
README: Final = (ROOT / "README.md").read_text(encoding="utf-8")
INSTALL: Final = 'make setup rabbitmq java && . .venv/bin/activate && cd "$(mktemp -d)"\n'
"""What tests have done already."""

_BLOCK: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CHANGING: Final = (
    # Widths of columns.
    (r" +", " "),
    (r"-{2,}", "--"),
    (r"(?<!\w)/[\w./-]+", "PATH"),
    (r"\b[0-9a-f]{32}\b", "ID"),
    # Dates, times and what is counted; a slow machine is late by seconds.
    (r"\d+([-.,:+ ]?\d+)*", "N"),
    (r"\bN m?s\b", "N s"),
)


def blocks(title: str | None) -> list[tuple[str, str]]:
    """Language and text of the blocks of a section, or of what stands above the first one."""
    _, found, section = README.partition(f"\n## {title}\n") if title else ("", "it is there", README)
    assert found, f"there is no section {title}"
    return _BLOCK.findall(section.partition("\n## ")[0])


def shape(text: str) -> list[str]:
    """What stays the same from run to run, line by line."""
    for pattern, instead in _CHANGING:
        text = re.sub(pattern, instead, text)
    return text.strip().splitlines()


class Shell:
    """The shell of somebody who has bide, and no broker yet. Variables stay from one paste to the next.

    Attributes:
        folder: where it is.
        state: where programs keep what lasts.
    """

    def __init__(self, folder: Path, rabbitmq: Rabbitmq) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("BIDE_")},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "XDG_STATE_HOME": str(self.state),
        }
        if (home := rabbitmq.home or os.environ.get(HOME_VARIABLE)) is not None:
            self.environment[HOME_VARIABLE] = str(home)

    def paste(self, commands: str) -> str:
        """What they print, on standard error too. None may fail."""
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
                code = process.wait(timeout=PATIENCE)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        said = printed.read_text(encoding="utf-8")
        assert code == 0, said
        pairs = (one.partition("=") for one in variables.read_text(encoding="utf-8").split("\0") if one)
        self.environment = {name: value for name, _, value in pairs}
        return said
