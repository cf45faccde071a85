"""The programs of docs/testing.md, whose tests pass."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.timeouts import TIMEOUT

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
PROGRAMS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))

CONFTEST = """
import pytest

@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"
"""


def test_every_program_has_a_name() -> None:
    assert PAGE.count("```python") == len(PROGRAMS) == 3


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_passes(name: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / name).write_text(PROGRAMS[name])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
