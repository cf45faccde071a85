"""Files of a local broker: its folder, its lock, and ``broker.json``."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from bide.errors import LocalBrokerError
from bide.local_broker.configuration import SINGLE_NODE, BrokerNode, Ports

STATE_FILE = "broker.json"
PASSWORD_FILE = "password"  # noqa: S105 - a file name
LOCK_FILE = "bide-broker.lock"
COOKIE_FILE = "home/.erlang.cookie"
_FORMAT = 1
_SUBFOLDERS = ("conf", "conf/conf.d", "data", "home", "log")
_POLL_SECONDS = 0.02
"""Seconds between two attempts to lock the folder, because ``flock`` has no timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pids:
    """The process ids of a broker. *epmd* is None if the node shares the epmd of its cluster."""

    supervisor: int
    server: int
    epmd: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A broker as described in ``broker.json``, which the supervisor reads too.

    Attributes:
        folder: the folder with all files of the broker.
        ephemeral: whether the folder is removed when the broker stops.
        release: for example ``"3.10.8"``.
        ports: the ports that the node listens on.
        plugins: the enabled plugins.
        commands: the command lines of ``epmd``, ``server`` and ``rabbitmqctl``. For a cluster as a whole, ``server``
            is a process that runs as long as the cluster: the epmd that its nodes share or, with network namespaces,
            ``sleep``.
        environment: the environment of these commands.
        stop_seconds: how long the node may take to stop before it is killed.
        pids: the process ids when the broker became ready; the processes may have ended since.
        node: the name, address and network namespace of the node.
        nodes: the number of nodes of a cluster, each in a subfolder; 0 for a single node.
        cleanup: commands to run after the end, such as removing a network namespace.
    """

    folder: Path
    ephemeral: bool
    release: str
    ports: Ports
    plugins: tuple[str, ...]
    commands: dict[str, list[str]]
    environment: dict[str, str]
    stop_seconds: float
    pids: Pids | None = None
    node: BrokerNode = SINGLE_NODE
    nodes: int = 0
    cleanup: tuple[list[str], ...] = ()

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read the file in a folder; None if it is missing or unreadable."""
        try:
            values = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
            if values.pop("format") != _FORMAT:
                return None
            values |= {"folder": folder, "ports": Ports(**values["ports"]), "plugins": tuple(values["plugins"])}
            values |= {"node": BrokerNode(**values.get("node", {})), "cleanup": tuple(values.get("cleanup", ()))}
            if values["pids"] is not None:
                values["pids"] = Pids(**values["pids"])
            return cls(**values)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def save(self) -> None:
        """Write the file atomically, so that a reader sees either the old or the new content."""
        values = {"format": _FORMAT, **asdict(self), "folder": str(self.folder)}
        write_private(self.folder / STATE_FILE, json.dumps(values, indent=2) + "\n")

    def taken_ports(self) -> list[int]:
        """Return the ports of the broker that other programs listen on. Call this while the broker is stopped."""
        if self.node.namespace:
            return []
        shared = () if "epmd" in self.commands else (self.ports.epmd,)
        return [port for port in self.ports.taken() if port not in shared]

    def with_pids(self, pids: Pids | None) -> Self:
        """Return this state with other process ids."""
        return replace(self, pids=pids)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, replacing an existing one atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


@contextlib.contextmanager
def locked(folder: Path, *, seconds: float) -> Iterator[None]:
    """Hold the folder's lock: only one process at a time can start or stop its broker.

    Raises:
        LocalBrokerError: another process holds the lock for longer than *seconds*.
    """
    path = folder / LOCK_FILE
    deadline = time.monotonic() + seconds
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if _try_lock(descriptor) and _is_still(descriptor, path):
                yield
                return
        finally:
            os.close(descriptor)
        if time.monotonic() >= deadline:
            raise LocalBrokerError(
                f"another process has been starting or stopping the broker in {folder} for {seconds:g} s: wait for it"
            )
        time.sleep(_POLL_SECONDS)  # flock has no timeout


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(descriptor: int, path: Path) -> bool:
    """Return whether *path* is still the open file; the previous holder of the lock may have removed the folder."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def create_folder(folder: Path) -> None:
    """Create the folder, accessible only to its owner.

    Raises:
        LocalBrokerError: the folder cannot be created, belongs to another user, or has files that are not a broker's.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise LocalBrokerError(f"the folder {folder} belongs to another user: give one of your own")
        # Look for files before the lock: another process may be creating this broker, and the lock is its first file.
        if any(folder.iterdir()) and not (folder / LOCK_FILE).exists():
            raise LocalBrokerError(
                f"the folder {folder} has files that are not a broker's: give a new or an empty folder"
            )
        folder.chmod(0o700)
        (folder / LOCK_FILE).touch(mode=0o600)
    except OSError as error:
        raise LocalBrokerError(
            f"the folder {folder} cannot be used for a broker: {error.strerror}; give another folder"
        ) from error


def create_subfolders(folder: Path) -> None:
    """Create the subfolders, and the cookie with which tools authenticate to the node."""
    try:
        for name in _SUBFOLDERS:
            (folder / name).mkdir(mode=0o700, exist_ok=True)
        cookie = folder / COOKIE_FILE
        if not cookie.exists() or not cookie.read_text(encoding="ascii"):
            write_private(cookie, secrets.token_hex(20))
            cookie.chmod(0o400)
    except OSError as error:
        raise LocalBrokerError(
            f"the folder {folder} cannot be used for a broker: {error.filename}: {error.strerror}; give another folder"
        ) from error


def password_of(folder: Path) -> str:
    """Return the broker's password, which the first start generates.

    Raises:
        LocalBrokerError: the file is missing although the node has data, which requires that password.
    """
    path = folder / PASSWORD_FILE
    try:
        password = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        password = ""
    if password:
        return password
    if any((folder / "data").iterdir()):
        raise LocalBrokerError(
            f"{path} is missing or empty: restore the file, or remove {folder}, which deletes all messages"
        )
    password = secrets.token_hex(24)
    write_private(path, password + "\n")
    return password


def find_folder(folder: Path | None) -> Path:
    """Return the absolute path of a broker's folder, by default :func:`default_folder`."""
    return (folder or default_folder()).expanduser().resolve()


def default_folder() -> Path:
    """Return the default folder of a broker: ``bide/broker`` in $XDG_STATE_HOME or ``~/.local/state``."""
    state_home = os.environ.get("XDG_STATE_HOME", "")
    # The XDG base directory specification says to ignore a relative path.
    base = Path(state_home) if Path(state_home).is_absolute() else Path.home() / ".local" / "state"
    return base / "bide" / "broker"


def choose_folder(folder: Path | None, *, ephemeral: bool) -> Path:
    """Return the folder to start a broker in."""
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="bide-broker-")) if ephemeral else default_folder()
    return find_folder(folder)


def remove_folder(folder: Path, *, keep: str | None = None) -> None:
    """Remove a broker's folder, or everything in it except one entry, also in the folders of a cluster's nodes."""
    if keep is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for entry in folder.iterdir():
        if (entry / keep).is_dir():
            remove_folder(entry, keep=keep)
        elif entry.is_dir() and entry.name != keep:
            shutil.rmtree(entry, ignore_errors=True)
        elif not entry.is_dir():
            entry.unlink(missing_ok=True)
