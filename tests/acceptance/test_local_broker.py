"""The private broker with real nodes, processes and crashes."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bide.errors import LocalBrokerError, ManagementApiError
from bide.local_broker import LocalBroker, find_running
from bide.local_broker.processes import marked
from bide.local_broker.state import Pids, State
from tests.polling import wait_until
from tests.support import Rabbitmq, flush_declarations
from tests.timeouts import TIMEOUT


def listening_addresses(pids: list[int]) -> dict[int, set[str]]:
    """Return the addresses that these processes listen on, by port, from /proc."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                    inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    addresses: dict[int, set[str]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            local, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == "0A" and inode in inodes:  # TCP_LISTEN
                address, _, port = local.partition(":")
                words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
                addresses.setdefault(int(port, 16), set()).add(str(ipaddress.ip_address(b"".join(words))))
    return addresses


def put_message(broker: LocalBroker, queue: str, text: str) -> None:
    """Declare a quorum queue in the virtual host / and publish a persistent message to it."""
    broker.management.call("PUT", "queues", "/", queue, body={"durable": True, "arguments": {"x-queue-type": "quorum"}})
    message = {
        "properties": {"delivery_mode": 2},
        "routing_key": queue,
        "payload": text,
        "payload_encoding": "string",
    }
    answer = broker.management.call("POST", "exchanges", "/", "amq.default", "publish", body=message)
    assert answer == {"routed": True}


def take_messages(broker: LocalBroker, queue: str) -> list[str]:
    """Take the messages out of a queue, once it has a leader after a restart."""
    request = {"count": 10, "ackmode": "ack_requeue_false", "encoding": "auto"}
    taken: list[str] = []

    def got_some() -> bool:
        with contextlib.suppress(ManagementApiError):
            taken.extend(
                one["payload"] for one in broker.management.call("POST", "queues", "/", queue, "get", body=request)
            )
        return bool(taken)

    wait_until(got_some, what=f"a message in {queue}")
    return taken


def run_python(source: str, **environment: str) -> subprocess.Popen[str]:
    """Run a program that starts a broker, in a process of its own. Its standard input stays open, unlike pytest's."""
    return subprocess.Popen(
        [sys.executable, "-c", "from pathlib import Path\nfrom bide.local_broker import LocalBroker\n" + source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def read_json(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the program ended with status {process.wait(timeout=TIMEOUT)}"
    loaded: dict[str, object] = json.loads(line)
    return loaded


@contextlib.contextmanager
def taken_port(port: int) -> Iterator[None]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        yield


def amqp_port(broker: LocalBroker) -> int:
    return int(broker.url.rstrip("/").rpartition(":")[2])


def test_it_listens_on_loopback_only(broker: LocalBroker) -> None:
    """Every socket, those of epmd, the distribution and a rabbitmqctl at work included."""
    state = State.load(broker.folder)
    assert state is not None
    seen: dict[int, set[str]] = {}
    stop_looking = threading.Event()

    def look() -> None:
        while not stop_looking.is_set():
            with contextlib.suppress(
                FileNotFoundError, ProcessLookupError
            ):  # a process that ends while it is looked at
                for port, addresses in listening_addresses(broker.pids).items():
                    seen.setdefault(port, set()).update(addresses)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        answer = broker.rabbitmqctl("eval", "node().")
    finally:
        stop_looking.set()
        watcher.join()

    assert answer.strip() == "bide@localhost"
    ports = state.ports
    assert {ports.amqp, ports.management, ports.stream, ports.distribution, ports.epmd} <= set(seen)
    assert all(ipaddress.ip_address(address).is_loopback for addresses in seen.values() for address in addresses), seen


def test_only_its_owner_can_read_its_secrets(broker: LocalBroker) -> None:
    assert stat.S_IMODE(broker.folder.stat().st_mode) == 0o700
    secrets = ["password", "conf/rabbitmq.conf", "broker.json", "home/.erlang.cookie"]
    assert {name: stat.S_IMODE((broker.folder / name).stat().st_mode) & 0o077 for name in secrets} == dict.fromkeys(
        secrets, 0
    )
    assert len(broker.password) == 48
    assert broker.password not in repr(broker)
    looked_at = 0
    for pid in broker.pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the node starts programs that end at once
            assert broker.password.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert broker.password.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
            looked_at += 1
    assert looked_at >= 3


def test_its_only_user_is_bide(broker: LocalBroker) -> None:
    assert [user["name"] for user in broker.management.call("GET", "users")] == ["bide"]


def test_it_runs_the_plugins_and_settings_that_bide_needs(broker: LocalBroker) -> None:
    overview = broker.management.call("GET", "overview")
    assert overview["rabbitmq_version"] == broker.release
    listeners = {listener["protocol"] for listener in overview["listeners"]}
    assert {"amqp", "http", "stream"} <= listeners
    assert "x-consistent-hash" in {kind["name"] for kind in overview["exchange_types"]}
    prefetch = broker.rabbitmqctl("eval", "application:get_env(rabbit, dead_letter_worker_consumer_prefetch).")
    assert prefetch.strip() == "{ok,1000}"


def test_starting_it_again_finds_the_running_broker(broker: LocalBroker, rabbitmq: Rabbitmq) -> None:
    again = rabbitmq.start(broker.folder)
    assert again.to_dict() == broker.to_dict()
    found = find_running(broker.folder)
    assert isinstance(found, LocalBroker)
    assert found.pid == broker.pid


def test_its_description_has_every_field(broker: LocalBroker) -> None:
    described = broker.to_dict()
    assert set(described) == {"url", "management_url", "stream_url", "release", "folder", "pid", "running"}
    assert described["running"] is True
    assert str(described["url"]).startswith("amqp://bide:")
    assert broker.vhost_url("a/b c") == f"{described['url']}/a%2Fb%20c"


def test_its_urls_do_not_end_with_a_slash(broker: LocalBroker) -> None:
    """By the AMQP URI specification, a lone slash names the virtual host with the empty name."""
    assert broker.stream_url is not None
    assert urlsplit(broker.url).path == urlsplit(broker.stream_url).path == ""
    assert urlsplit(broker.vhost_url("v")).path == "/v"


def test_adding_a_virtual_host_takes_half_the_time_of_rabbitmqctl(
    broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds to start, and each test has a virtual host of its own."""

    def run(*arguments: str) -> str:
        raise AssertionError(f"rabbitmqctl {arguments} was run")

    monkeypatch.setattr(LocalBroker, "rabbitmqctl", run)
    broker.add_vhost("quick")
    assert {vhost["name"] for vhost in broker.management.call("GET", "vhosts")} >= {"/", "quick"}
    broker.add_user("reader", "secret", tags=["monitoring"])
    broker.set_permissions("quick", "reader", configure="^$", write="^$")
    assert broker.management.call("GET", "permissions", "quick", "reader")["read"] == ".*"
    broker.delete_user("reader")
    broker.delete_vhost("quick")
    assert "quick" not in {vhost["name"] for vhost in broker.management.call("GET", "vhosts")}


def test_an_error_of_rabbitmqctl_has_its_reason(broker: LocalBroker) -> None:
    with pytest.raises(LocalBrokerError, match=r"(?s)rabbitmqctl set_permissions failed with status \d+: .*nowhere"):
        broker.rabbitmqctl("set_permissions", "--vhost", "nowhere", "bide", "", "", "")


@pytest.mark.long
def test_a_crash_keeps_messages_and_ports(rabbitmq: Rabbitmq) -> None:
    with rabbitmq.start(ephemeral=True) as broker:
        before = broker.to_dict()
        put_message(broker, "kept", "still here")
        flush_declarations(broker)
        broker.kill()
        assert broker.pids == []
        assert not broker.running
        assert broker.pid is None
        broker.restart()
        assert take_messages(broker, "kept") == ["still here"]
        assert broker.pid != before["pid"]
        assert {**broker.to_dict(), "pid": before["pid"]} == before
    assert not broker.folder.exists()
    broker.stop()  # a second time is fine


def test_a_persistent_broker_survives_stop_port_loss_and_crash(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    """Two start it at once, it is stopped, loses a port to a stranger, and is crashed altogether."""
    folder = tmp_path / "broker"
    with ThreadPoolExecutor() as pool:
        brokers = list(pool.map(lambda _: rabbitmq.start(folder), range(2)))
    assert brokers[0].to_dict() == brokers[1].to_dict()
    # One of the two started it, and its life hangs on that one.
    broker, attached = sorted(brokers, key=lambda one: one._owner_fd is None)
    password, port = broker.password, amqp_port(broker)
    put_message(broker, "kept", "still here")

    attached.stop()
    assert marked(folder) == []
    assert find_running(folder) is None
    assert (folder / "data").is_dir()
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) != 0

    with taken_port(port):
        with pytest.raises(LocalBrokerError, match=rf"another program listens on port {port} of the broker"):
            broker.restart()
        broker = rabbitmq.start(folder)
        assert amqp_port(broker) != port
    assert broker.password == password
    assert take_messages(broker, "kept") == ["still here"]

    state = State.load(folder)
    assert state is not None
    assert state.pids is not None
    os.kill(state.pids.supervisor, signal.SIGKILL)
    wait_until(lambda: marked(folder) == [], what="the node and epmd end with their supervisor")
    assert not broker.running
    broker.stop()


@pytest.mark.long
def test_a_port_that_is_lost_during_the_start_is_replaced(
    rabbitmq: Rabbitmq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[int] = []
    save = State.save

    def save_and_lose_a_port(state: State) -> None:
        """The ports are chosen and written down before the node begins its start."""
        save(state)
        if not lost:
            lost.append(state.ports.amqp)
            stack.enter_context(taken_port(state.ports.amqp))

    with contextlib.ExitStack() as stack:
        monkeypatch.setattr(State, "save", save_and_lose_a_port)
        with rabbitmq.start(tmp_path / "broker", ephemeral=True) as broker:
            assert lost
            assert amqp_port(broker) not in lost
            assert broker.management.call("GET", "overview")["rabbitmq_version"] == broker.release


def test_an_ephemeral_broker_dies_with_its_starter(rabbitmq: Rabbitmq) -> None:
    """Even by kill -9, and whatever the starter's environment says of other nodes."""
    starter = run_python(
        f"import json, sys\nbroker = LocalBroker.start(ephemeral=True, {rabbitmq.arguments})\n"
        "print(json.dumps(broker.to_dict()), flush=True)\nsys.stdin.read()",
        RABBITMQ_NODENAME="rabbit@elsewhere.invalid",
        RABBITMQ_NODE_PORT="1",
        RABBITMQ_CONFIG_FILE="/nonexistent/rabbitmq.conf",
        ERL_FLAGS="+no_such_flag",
        ERL_AFLAGS="+no_such_flag",
        ERL_EPMD_PORT="1",
    )
    with starter:
        broker = read_json(starter)
        folder = Path(str(broker["folder"]))
        assert len(marked(folder)) >= 3
        starter.kill()
        # It did not end by itself before.
        assert starter.wait(timeout=TIMEOUT) == -signal.SIGKILL
    wait_until(lambda: marked(folder) == [], what="no process is left")
    wait_until(lambda: not folder.exists(), what="the folder is gone")


@pytest.mark.long
def test_a_killed_start_does_not_break_the_next_start(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    with run_python(f"LocalBroker.start(Path({str(folder)!r}), {rabbitmq.arguments})") as starter:
        wait_until((folder / "node.pid").exists, what="the node has begun to start")
        starter.kill()
    wait_until(lambda: marked(folder) == [], what="no process is left of a start that was broken off")
    assert find_running(folder) is None

    # The state file is half written, and what was the id of the node is a stranger's by now.
    (folder / "broker.json").write_text('{"format": 1, "folder"', encoding="utf-8")
    (folder / "node.pid").write_text(f"{os.getpid()}\n", encoding="ascii")
    with rabbitmq.start(folder) as broker:
        assert broker.running
        assert broker.pid != os.getpid()
    assert marked(folder) == []


def test_a_detached_broker_outlives_its_starter(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    with run_python(
        f"LocalBroker.start(Path({str(folder)!r}), ephemeral=True, detached=True, {rabbitmq.arguments})"
    ) as starter:
        assert starter.wait(timeout=TIMEOUT) == 0
    broker = find_running(folder)
    assert broker is not None
    assert broker.management.call("GET", "overview")["rabbitmq_version"] == broker.release
    broker.stop()
    assert marked(folder) == []
    assert not folder.exists()


def test_a_foreign_process_with_the_id_of_a_dead_node_is_not_killed(
    rabbitmq: Rabbitmq, broker: LocalBroker, tmp_path: Path
) -> None:
    state = State.load(broker.folder)
    assert state is not None
    with subprocess.Popen(["sleep", "300"]) as stranger:
        folder = tmp_path / "broker"
        folder.mkdir()
        (folder / "bide-broker.lock").touch()
        stale = Pids(supervisor=stranger.pid, epmd=stranger.pid, server=stranger.pid)
        State(
            folder=folder,
            ephemeral=False,
            release=state.release,
            ports=state.ports,
            plugins=state.plugins,
            commands=state.commands,
            environment=state.environment,
            stop_seconds=1.0,
            pids=stale,
        ).save()
        assert find_running(folder) is None
        dead = LocalBroker(folder)
        assert dead.pid is None
        dead.stop()
        dead.kill()
        assert stranger.poll() is None
        stranger.terminate()


def test_a_failed_start_gives_the_reason_and_leaves_only_its_log(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    with pytest.raises(LocalBrokerError) as raised:
        rabbitmq.start(folder, ephemeral=True, extra_config="no.such.key = 1")
    assert "ended while it started" in str(raised.value)
    assert f"{folder}/log/server.log" in str(raised.value)
    assert "no.such.key" in str(raised.value)
    assert marked(folder) == []
    assert {entry.name for entry in folder.iterdir()} == {"log"}


def test_a_start_that_takes_too_long_is_ended(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    with pytest.raises(LocalBrokerError, match=r"was not ready after 0\.2 s"):
        LocalBroker.start(folder, home=rabbitmq.home, chroot=rabbitmq.chroot, timeout=timedelta(seconds=0.2))
    assert marked(folder) == []


def test_a_missing_password_file_is_an_error(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    (tmp_path / "bide-broker.lock").touch()
    (tmp_path / "data" / "bide@localhost").mkdir(parents=True)
    with pytest.raises(LocalBrokerError, match=r"password is missing or empty: restore the file, or remove"):
        rabbitmq.start(tmp_path)


def test_a_folder_with_other_files_is_refused(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it", encoding="utf-8")
    with pytest.raises(LocalBrokerError, match="has files that are not a broker's: give a new or an empty folder"):
        rabbitmq.start(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(LocalBrokerError, match=r"thesis\.txt cannot be used for a broker: .*[Ee]xists"):
        rabbitmq.start(tmp_path / "thesis.txt")


def test_a_folder_without_a_broker_is_an_error(tmp_path: Path) -> None:
    assert find_running(tmp_path) is None
    with pytest.raises(LocalBrokerError, match=f"there is no broker in {tmp_path}"):
        _ = LocalBroker(tmp_path).url
