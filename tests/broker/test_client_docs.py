"""The programs of docs/client.md and their output."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.readme import blocks, shape
from tests.support import Vhost
from tests.timeouts import TIMEOUT

BLOCKS = blocks("docs/client.md")
PROGRAMS = [(text, output) for (language, text), (_, output) in pairwise(BLOCKS) if language == "python"]
"""Each program, and the block after it."""


@pytest.mark.parametrize(("program", "output"), PROGRAMS)
def test_each_program_prints_what_the_page_shows(program: str, output: str, vhost: Vhost, tmp_path: Path) -> None:
    environment = {**os.environ, "BIDE_URL": vhost.url}
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=TIMEOUT
    )
    assert result.returncode == 0, result.stderr
    assert shape(result.stdout) == shape(output)
