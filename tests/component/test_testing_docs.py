"""The programs of docs/testing.md, whose tests pass."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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
    assert PAGE.count("```python") == len(PROGRAMS) == 4


def test_the_programs_pass(tmp_path: Path) -> None:
    """All in one run, because pytest starts slowly."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, program in PROGRAMS.items():
        (tmp_path / name).write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^(\w+\.py)::\w+ PASSED", done.stdout, re.MULTILINE) == sorted(PROGRAMS), done.stdout
