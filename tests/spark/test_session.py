"""What the pipelines of the command line say when Spark cannot be started as it was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bide.cli.app import run

ANY_PLAN = ("pipeline", "plan", "--rate", "1/s", "--delay", "5m", "--for", "1m")


def test_without_java_it_says_what_to_install(tmp_path: Path) -> None:
    elsewhere = {**os.environ, "JAVA_HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "bide", *ANY_PLAN],
        env=elsewhere,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "bide: Spark needs a Java 17 or later, and there is none: install one, or set JAVA_HOME to the folder of one\n"
    )


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("zone", ["Mars/Olympus", ""])
def test_a_time_zone_that_is_none(zone: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ANY_PLAN, "--time-zone", zone]) == 2
    assert capsys.readouterr().err == (
        f"bide: Spark does not know the time zone {zone!r}: give one such as UTC, Europe/Berlin or +02:00\n"
    )
