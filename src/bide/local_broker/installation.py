"""Search for a RabbitMQ installation on this machine."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bide.errors import BrokerNotFoundError, LocalBrokerError

HOME_VARIABLE = "BIDE_RABBITMQ_HOME"
"""Folder of the RabbitMQ to start, with ``sbin`` in it. By default, bide searches for a RabbitMQ."""

MINIMUM_RELEASE = (3, 10)

# Folders in which package managers install programs, and which the PATH of an ordinary user may lack.
_MORE_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", "/opt/homebrew/bin")
# Packages of Debian, Ubuntu, Fedora and RabbitMQ itself: one folder for each release.
_LIBRARY = "usr/lib/rabbitmq/lib"
_HOMEBREW = ("/opt/homebrew/opt/rabbitmq", "/usr/local/opt/rabbitmq", "/home/linuxbrew/.linuxbrew/opt/rabbitmq")

# This script runs in its own mount namespace, so the mounts disappear with its process.
_ENTER_ROOT = """
root=$1 && shift
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
while [ "$1" != -- ]; do
    mkdir -p "$root$1"
    mount --rbind "$1" "$root$1"
    shift
done
shift
exec chroot "$root" "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """A RabbitMQ server on disk.

    Attributes:
        home: the folder with ``sbin`` and ``plugins``, as seen from inside *chroot*.
        epmd: the Erlang port mapper daemon that belongs to it, as seen from inside *chroot*.
        release: for example ``"3.10.8"``.
        path: the ``PATH`` for its scripts.
        chroot: the root folder of the system that it is installed in, or None for this system.
    """

    home: Path
    epmd: Path
    release: str
    path: str
    chroot: Path | None = None

    def command(self, *command: str | Path, visible: Iterable[Path] = ()) -> list[str]:
        """Return the command line that runs *command*, inside the root folder if there is one.

        Args:
            command: a program of this installation and its arguments.
            visible: folders of this system to mount at the same paths inside the root folder.
        """
        words = [str(word) for word in command]
        if self.chroot is None:
            return words
        folders = [str(folder) for folder in visible]
        enter = ["unshare", "--mount", "--propagation", "private", "sh", "-eu", "-c", _ENTER_ROOT, "sh"]
        return [*enter, str(self.chroot), *folders, "--", *words]


def find_installation(*, home: Path | None = None, chroot: Path | None = None) -> Installation:
    """Find a RabbitMQ server of release 3.10 or newer.

    Args:
        home: the folder with ``sbin/rabbitmq-server``. By default, these are searched in this order: the environment
            variable ``BIDE_RABBITMQ_HOME``, the PATH, the folders of the system's packages, and Homebrew.
        chroot: search in this root folder of another system instead; running that RabbitMQ requires root.

    Raises:
        BrokerNotFoundError: there is no RabbitMQ.
        LocalBrokerError: the RabbitMQ is too old, or *chroot* cannot be used here.
    """
    if chroot is not None:
        _check_chroot(chroot)
        chroot = chroot.resolve()
    root = chroot or Path("/")
    if home is None and chroot is None and os.environ.get(HOME_VARIABLE):
        home = Path(os.environ[HOME_VARIABLE])
    found = next(_candidates(root, home, chroot), None)
    if found is None:
        if home is not None:
            raise BrokerNotFoundError(f"{home} has no sbin/rabbitmq-server: give the folder of an unpacked RabbitMQ")
        if chroot is not None:
            raise BrokerNotFoundError(f"no RabbitMQ is installed in the root folder {chroot}: install one there")
        raise BrokerNotFoundError(_how_to_install())
    release = release_of(root / found.relative_to("/"))
    if numbers(release) < MINIMUM_RELEASE:
        raise LocalBrokerError(
            f"RabbitMQ {release} in {found} is too old: bide needs {'.'.join(map(str, MINIMUM_RELEASE))} or newer; "
            f"unpack a newer release and set {HOME_VARIABLE} to its folder"
        )
    own = [] if chroot else os.environ.get("PATH", "").split(os.pathsep)
    # Empty entries are left out, because they mean the current folder.
    path = os.pathsep.join(folder for folder in (*own, *_MORE_PATH) if folder)
    return Installation(home=found, epmd=_find_epmd(root, path), release=release, path=path, chroot=chroot)


def numbers(release: str) -> tuple[int, ...]:
    """Parse the leading numbers of a release, for comparisons: ``"4.3.0-rc.1"`` is ``(4, 3, 0)``."""
    match = re.match(r"\d+(?:\.\d+)*", release)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def release_of(home: Path) -> str:
    """Read the release of the RabbitMQ in *home* from the name of its core application."""
    for plugin in sorted((home / "plugins").glob("rabbit-*")):
        if match := re.fullmatch(r"rabbit-(\d.*?)(?:\.ez)?", plugin.name):
            return match.group(1)
    raise LocalBrokerError(
        f"{home} is not a complete RabbitMQ, because plugins/rabbit-RELEASE is missing: unpack it again"
    )


def _check_chroot(chroot: Path) -> None:
    if platform.system() != "Linux" or os.geteuid() != 0:
        raise LocalBrokerError(f"running RabbitMQ from the root folder {chroot} needs root on Linux: omit the folder")
    if not chroot.is_dir():
        raise BrokerNotFoundError(f"the root folder {chroot} does not exist: check the path")


def _candidates(root: Path, home: Path | None, chroot: Path | None) -> Iterator[Path]:
    """Yield folders with a server, best first, as seen from *root*."""
    homes: Iterable[Path]
    if home is not None:
        homes = [home.expanduser() if chroot else home.expanduser().resolve()]
    elif chroot is not None:
        homes = _library(root)
    else:
        on_path = shutil.which("rabbitmq-server")
        # Debian's file on the PATH is a wrapper that requires its own user; it has no rabbitmq-env next to it.
        beside = [Path(on_path).resolve().parent.parent] if on_path else []
        homes = [*beside, *_library(root), *(Path(path).resolve() for path in _HOMEBREW)]
    for home_folder in homes:
        sbin = root / home_folder.relative_to("/") / "sbin"
        if os.access(sbin / "rabbitmq-server", os.X_OK) and (sbin / "rabbitmq-env").exists():
            yield home_folder


def _library(root: Path) -> list[Path]:
    """Return the folders of the package manager, newest release first."""
    folders = (root / _LIBRARY).glob("rabbitmq_server-*")
    newest_first = sorted(folders, key=lambda folder: numbers(folder.name.partition("-")[2]), reverse=True)
    return [Path("/") / folder.relative_to(root) for folder in newest_first]


def _find_epmd(root: Path, path: str) -> Path:
    inside = os.pathsep.join(str(root / folder.lstrip("/")) for folder in path.split(os.pathsep))
    if epmd := shutil.which("epmd", path=inside):
        return Path("/") / Path(epmd).relative_to(root)
    if erl := shutil.which("erl", path=inside):
        # <erlang>/bin/erl, and <erlang>/erts-13.1.5/bin/epmd
        for epmd_path in sorted(Path(erl).resolve().parent.parent.glob("erts-*/bin/epmd"), reverse=True):
            return Path("/") / epmd_path.relative_to(root.resolve())
    raise BrokerNotFoundError("RabbitMQ is installed, but neither epmd nor erl is on the PATH: install Erlang")


def _how_to_install() -> str:
    if sys.platform == "darwin":
        install = "'brew install rabbitmq'"
    elif shutil.which("apt-get"):
        install = "'apt-get update && apt-get install rabbitmq-server' as root"
    else:
        install = "install RabbitMQ 3.10 or newer"
    return f"no RabbitMQ was found: {install}, or set {HOME_VARIABLE} to the folder of an unpacked one"
