"""The output of commands in docs/waiting-hall.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.timeouts import TIMEOUT

PAGE = (Path(__file__).parents[2] / "docs" / "waiting-hall.md").read_text()


def test_the_program_prints_the_documented_output(vhost_url: str) -> None:
    found = re.search(r"```python\n(# hall\.py\n.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    environment = {**os.environ, "BIDE_URL": vhost_url, "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", found[1]], capture_output=True, text=True, env=environment, timeout=TIMEOUT, check=False
    )
    assert (done.returncode, done.stdout) == (0, found[2]), done.stderr


def test_the_page_shows_the_table_of_explain() -> None:
    found = re.search(r"\$ bide (delay explain [^\n]*)\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    done = subprocess.run(
        [sys.executable, "-m", "bide", *found[1].split()], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    assert done.stdout == found[2]


def test_the_page_shows_the_output_of_the_other_commands(vhost_url: str) -> None:
    """But for the address."""
    environment = {**os.environ, "BIDE_URL": vhost_url}
    options = ("--layout", "waiting-hall", "--levels", "4")

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "bide", *arguments, *options],
            capture_output=True,
            text=True,
            env=environment,
            timeout=TIMEOUT,
            check=False,
        )
        return done.stdout + done.stderr

    assert run("delay", "apply").partition(" on ")[0] in PAGE
    (relays,) = (line for line in run("delay", "verify").splitlines() if line.startswith("✗ relays"))
    assert relays in PAGE
