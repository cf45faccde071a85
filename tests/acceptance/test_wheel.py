"""The wheel of bide, installed by pip into a fresh environment of each Python that is found."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from bide.version import VERSION
from tests.readme import README, ROOT, blocks, shape
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from tests.support import Vhost

pytestmark = [pytest.mark.long, pytest.mark.timeout(10 * TIMEOUT)]

RELEASES: Final = ("3.11", "3.12", "3.13", "3.14")
ROOTS: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bide" / "brokers"
"""The Debian roots of scripts/broker-root.sh, into which scripts/install-pythons.sh installs Python."""


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        cwd="/",
        text=True,
        timeout=5 * TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of bide, and those of its dependencies in the pinned versions."""
    folder = tmp_path_factory.mktemp("wheels")
    pins = re.findall(r"^[\w.-]+==\S+", (ROOT / "requirements" / "lock.txt").read_text(), re.MULTILINE)
    (folder / "pins.txt").write_text("\n".join(pins))
    build: list[str | Path] = [
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--constraint",
        folder / "pins.txt",
        "--wheel-dir",
        folder,
    ]
    run(sys.executable, "-m", "pip", *build, ROOT)
    return folder


def test_the_description_has_no_link_that_an_index_cannot_follow(wheels: Path) -> None:
    (wheel,) = wheels.glob("bide-*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = (one for one in files.namelist() if one.endswith(".dist-info/METADATA"))
        message = email.message_from_bytes(files.read(name))
    assert message["Description-Content-Type"] == "text/markdown"
    text = message.get_payload(decode=True)
    assert isinstance(text, bytes)
    assert re.findall(r"\]\((?!https://)[^)]*\)", text.decode()) == []
    assert "```mermaid" not in text.decode(), "an index shows its source"


def interpreters(release: str) -> Iterator[tuple[list[str], Path]]:
    """Commands of interpreters of a release that may be here, and the root folder that they see."""
    if sys.version_info[:2] == tuple(map(int, release.split("."))):
        yield [sys.executable], Path("/")
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for path in (shutil.which(f"python{release}"), *sorted(pyenv.glob(f"{release}.*/bin/python{release}"))):
        if path is not None:
            yield [str(path)], Path("/")
    for root in sorted(ROOTS.glob("*/")):
        if (root / f"usr/bin/python{release}").exists() and os.geteuid() == 0:
            yield ["chroot", str(root), f"/usr/bin/python{release}"], root


def makes_environments(command: list[str]) -> bool:
    """Whether an interpreter runs and has venv, which Debian has in a package of its own."""
    return subprocess.run([*command, "-c", "import ensurepip"], capture_output=True, check=False).returncode == 0


@pytest.fixture(params=RELEASES)
def python(request: pytest.FixtureRequest) -> Iterator[tuple[list[str], Path, str]]:
    """The command of an interpreter, a folder, and the name of the folder for that interpreter."""
    found = next((one for one in interpreters(request.param) if makes_environments(one[0])), None)
    if found is None:
        pytest.skip(f"there is no Python {request.param} here with venv; see scripts/install-pythons.sh")
    command, root = found
    with tempfile.TemporaryDirectory(prefix="bide-wheel-", dir=root / "tmp") as folder:
        yield command, Path(folder), f"/{Path(folder).relative_to(root)}"


def test_the_wheel_works_in_a_fresh_environment(
    python: tuple[list[str], Path, str], wheels: Path, vhost: Vhost
) -> None:
    command, folder, inside = python
    for wheel in wheels.glob("*.whl"):
        shutil.copy(wheel, folder)
    (_, program), (_, shown) = blocks(README, "Send a message later")
    (folder / "tea.py").write_text(program)
    enter, installed = command[:-1], f"{inside}/venv/bin"
    run(*command, "-m", "venv", f"{inside}/venv")
    fresh = [*enter, f"{installed}/python", "-I"]
    run(*fresh, "-m", "pip", "install", "--no-index", "--find-links", inside, "bide")
    run(*fresh, "-m", "pip", "check")
    assert run(*enter, f"{installed}/bide", "version", PYTHONPATH="") == f"bide {VERSION}\n"
    names = "import bide; print(len([getattr(bide, name) for name in bide.__all__]))"
    assert int(run(*fresh, "-W", "error", "-c", names)) > 20
    assert shape(run(*fresh, "-W", "error", f"{inside}/tea.py", BIDE_URL=vhost.url)) == shape(shown)
