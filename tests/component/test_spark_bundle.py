"""bide as one file for Spark executors."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest

from bide.cli.app import run
from bide.spark.bundle import own_bundle
from tests.timeouts import TIMEOUT

# As an executor has it: what is installed here is out of sight, but for what PySpark and PyArrow need.
LOOK = """
import sys
sys.path[:] = [sys.argv[1], *(one for one in sys.path if "site-packages" not in one)]
import anyio._backends._asyncio, bide.client.bulk.schedules, bide.client.bulk.sync, bide.streams.log, httpx2, pamqp
httpx2.AsyncClient()
from importlib.metadata import version
print(bide.__spec__.cached or bide.__file__, bide.client.bulk.sync.__file__, httpx2.__file__, version("bide"))
"""


def looked(file: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOOK, file], capture_output=True, text=True, check=True, timeout=TIMEOUT
    )
    return done.stdout.split()


def test_the_bundle_has_every_module_that_an_executor_needs() -> None:
    file = own_bundle()
    assert looked(file) == [
        f"{file}/bide/__init__.pyc",
        f"{file}/bide/client/bulk/sync.pyc",
        f"{file}/httpx2/__init__.pyc",
        version("bide"),
    ]
    assert "pyspark_bide/__init__.py" in ZipFile(file).namelist()


def test_another_python_version_uses_the_sources(tmp_path: Path) -> None:
    file = tmp_path / "other.zip"
    with ZipFile(own_bundle()) as ours, ZipFile(file, "w") as other:
        for name in ours.namelist():
            contents = ours.read(name)
            other.writestr(name, b"\0\0\r\n" + contents[4:] if name.endswith(".pyc") else contents)
    assert looked(file)[1] == f"{file}/bide/client/bulk/sync.py"


def test_the_command_writes_or_replaces_the_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "b.zip"
    place.write_text("something else")
    assert run(["pipeline", "bundle", str(place)]) == 0
    assert capsys.readouterr().out.startswith(f"{place}: ")
    assert "bide/__init__.py" in ZipFile(place).namelist()
    assert list(tmp_path.iterdir()) == [place]
    assert run(["pipeline", "bundle", str(tmp_path / "nowhere" / "b.zip")]) == 2
    assert "nowhere/b.zip cannot be written: No such file or directory" in capsys.readouterr().err
