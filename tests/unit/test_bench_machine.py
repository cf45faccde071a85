"""The record of the machine and the sources in results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.suite.machine import busy_cores, source, stolen_seconds
from tests.polling import wait_until


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return str(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def test_source_names_the_commit_and_marks_changes(tmp_path: Path) -> None:
    package, other = tmp_path / "src/bide", tmp_path / "lib/bide"
    for folder in (package, other):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    assert source(package) == ""
    git(tmp_path, "init")
    git(tmp_path, "add", "src")
    git(tmp_path, "commit", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert source(package) == commit[:10]
    # What lies beside it, such as the results themselves, does not change what was measured.
    (tmp_path / "results.json").touch()
    assert source(package) == commit[:10]
    assert source(other) == ""
    (package / "__init__.py").write_text("changed = True")
    assert source(package) == f"{commit[:10]}+"


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_busy_cores_counts_a_running_process() -> None:
    command = [sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"]
    found: list[float] = []

    def is_busy() -> bool:
        # A virtual machine may stand still meanwhile.
        found.append(busy_cores())
        return found[-1] > 0.3

    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            wait_until(is_busy, "a core is busy")
            assert max(found) <= (os.cpu_count() or 1) + 0.5
        finally:
            process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_stolen_seconds_sums_the_steal_of_all_cores() -> None:
    """The sum over all cores of /proc/stat."""
    before = stolen_seconds()
    lines = Path("/proc/stat").read_text().splitlines()
    each = sum(int(line.split()[8]) for line in lines if re.match(r"cpu\d", line)) / os.sysconf("SC_CLK_TCK")
    assert before - 0.1 <= each <= stolen_seconds() + 0.1
