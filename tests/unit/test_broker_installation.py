"""The search for RabbitMQ in folders laid out like its packages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bide.errors import BrokerNotFoundError, LocalBrokerError
from bide.local_broker import installation
from bide.local_broker.installation import find_installation, numbers, release_of

needs_root = pytest.mark.xfail(
    os.geteuid() != 0, reason="a root folder can be entered by root alone", raises=LocalBrokerError, strict=True
)


def make_home(home: Path, release: str, *, environment_script: bool = True) -> Path:
    (home / "plugins" / f"rabbit-{release}").mkdir(parents=True)
    (home / "plugins" / f"rabbit_common-{release}").mkdir()
    (home / "sbin").mkdir()
    make_program(home / "sbin" / "rabbitmq-server")
    if environment_script:
        (home / "sbin" / "rabbitmq-env").touch()
    return home


def make_program(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is installed but an epmd, on the PATH; return the only folder of the PATH."""
    make_program(tmp_path / "bin" / "epmd")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("BIDE_RABBITMQ_HOME", raising=False)
    monkeypatch.setattr(installation, "_MORE_PATH", ())
    monkeypatch.setattr(installation, "_HOMEBREW", (str(tmp_path / "homebrew"),))
    monkeypatch.setattr(installation, "_LIBRARY", str(tmp_path / "library").lstrip("/"))
    return tmp_path / "bin"


def test_a_given_home_is_used(tmp_path: Path) -> None:
    home = make_home(tmp_path / "rabbitmq_server-4.1.2", "4.1.2")
    found = find_installation(home=home)
    assert (found.home, found.release, found.chroot) == (home, "4.1.2", None)
    assert found.epmd == tmp_path / "bin" / "epmd"
    assert found.command(home / "sbin" / "rabbitmqctl", "status") == [str(home / "sbin" / "rabbitmqctl"), "status"]


def test_the_path_never_holds_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f":{tmp_path / 'bin'}::/bin")
    found = find_installation(home=make_home(tmp_path / "unpacked", "4.1.2"))
    assert found.path == f"{tmp_path / 'bin'}:/bin"


def test_the_environment_variable_chooses_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_home(tmp_path / "unpacked", "3.13.7")
    monkeypatch.setenv("BIDE_RABBITMQ_HOME", str(home))
    assert find_installation().home == home


def test_the_server_on_the_path_is_used(tmp_path: Path, bare_machine: Path) -> None:
    home = make_home(tmp_path / "unpacked", "4.2.0")
    (bare_machine / "rabbitmq-server").symlink_to(home / "sbin" / "rabbitmq-server")
    assert find_installation().home == home


def test_a_wrapper_on_the_path_is_not_the_server(tmp_path: Path, bare_machine: Path) -> None:
    """Debian's /usr/sbin/rabbitmq-server insists on a user of its own; the server is in its library folder."""
    wrapper = make_home(tmp_path / "wrapper", "3.10.8", environment_script=False)
    (bare_machine / "rabbitmq-server").symlink_to(wrapper / "sbin" / "rabbitmq-server")
    with pytest.raises(BrokerNotFoundError, match=r"no RabbitMQ was found: .*, or set BIDE_RABBITMQ_HOME"):
        find_installation()
    home = make_home(tmp_path / "library" / "rabbitmq_server-3.10.8", "3.10.8")
    assert find_installation().home == home


def test_homebrew_is_searched_last(tmp_path: Path) -> None:
    home = make_home(tmp_path / "homebrew", "4.2.0")
    assert find_installation().home == home


@needs_root
def test_a_root_folder_is_searched_for_its_newest_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    library = root / str(tmp_path / "library").lstrip("/")
    for release in ("3.10.8", "4.3.6", "4.10.0"):
        make_home(library / f"rabbitmq_server-{release}", release)
    make_program(root / "usr/bin/epmd")
    monkeypatch.setattr(installation, "_MORE_PATH", ("/usr/bin",))
    found = find_installation(chroot=root)
    assert found.home == tmp_path / "library" / "rabbitmq_server-4.10.0"
    assert found.epmd == Path("/usr/bin/epmd")
    assert (found.release, found.chroot) == ("4.10.0", root)
    command = found.command("/usr/bin/epmd", "-port", "1", visible=[Path("/tmp/x")])
    assert command[0] == "unshare"
    assert command[-6:] == [str(root), "/tmp/x", "--", "/usr/bin/epmd", "-port", "1"]


def test_epmd_is_found_in_the_folder_of_erlang(tmp_path: Path, bare_machine: Path) -> None:
    home = make_home(tmp_path / "unpacked", "4.2.0")
    (bare_machine / "epmd").unlink()
    with pytest.raises(BrokerNotFoundError, match="neither epmd nor erl is on the PATH"):
        find_installation(home=home)
    make_program(tmp_path / "erlang" / "bin" / "erl")
    make_program(tmp_path / "erlang" / "erts-15.2" / "bin" / "epmd")
    (bare_machine / "erl").symlink_to(tmp_path / "erlang" / "bin" / "erl")
    assert find_installation(home=home).epmd == tmp_path / "erlang" / "erts-15.2" / "bin" / "epmd"


def test_no_server_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BrokerNotFoundError, match=r"has no sbin/rabbitmq-server: give the folder of an unpacked"):
        find_installation(home=tmp_path)


@needs_root
def test_a_root_folder_without_a_server_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BrokerNotFoundError, match="no RabbitMQ is installed in the root folder"):
        find_installation(chroot=tmp_path)
    with pytest.raises(BrokerNotFoundError, match=r"the root folder .*nowhere does not exist"):
        find_installation(chroot=tmp_path / "nowhere")


def test_a_release_below_the_minimum_is_refused(tmp_path: Path) -> None:
    home = make_home(tmp_path / "old", "3.9.13")
    with pytest.raises(LocalBrokerError, match=r"RabbitMQ 3\.9\.13 in .*old is too old: bide needs 3\.10 or newer"):
        find_installation(home=home)


def test_an_incomplete_installation_is_an_error(tmp_path: Path) -> None:
    home = make_home(tmp_path / "half", "4.0.0")
    (home / "plugins" / "rabbit-4.0.0").rmdir()
    with pytest.raises(LocalBrokerError, match="is not a complete RabbitMQ"):
        find_installation(home=home)


@pytest.mark.parametrize(
    ("plugin", "release"),
    [("rabbit-3.10.8", "3.10.8"), ("rabbit-4.0.0-rc.1", "4.0.0-rc.1"), ("rabbit-3.7.1.ez", "3.7.1")],
)
def test_the_release_is_that_of_the_core_application(tmp_path: Path, plugin: str, release: str) -> None:
    (tmp_path / "plugins" / plugin).mkdir(parents=True)
    assert release_of(tmp_path) == release


@pytest.mark.parametrize(
    ("release", "expected"), [("3.10.8", (3, 10, 8)), ("4.3.0-rc.1", (4, 3, 0)), ("4", (4,)), ("beta", ())]
)
def test_releases_compare_by_number(release: str, expected: tuple[int, ...]) -> None:
    assert numbers(release) == expected
