"""``bide broker``: a private RabbitMQ on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bide.cli.continuation import shell_command
from bide.cli.output import echo, print_json, working
from bide.cli.settings import json_option, verbose_option
from bide.local_broker.cluster import MAX_NODES

if TYPE_CHECKING:
    from bide.local_broker import LocalBroker, LocalCluster

_folder_option = click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the broker. [default: $XDG_STATE_HOME/bide/broker]",
)


@click.group()
def broker() -> None:
    """A private RabbitMQ on this machine, one node or a cluster.

    The broker uses an installed RabbitMQ, but runs as a separate node with its own data, password and ports, and
    listens only on this machine. Other RabbitMQ nodes are not affected.
    """


@broker.command()
@_folder_option
@click.option("--nodes", type=click.IntRange(1, MAX_NODES), help="Number of nodes. [default: as before, or 1]")
@click.option("--namespaces", is_flag=True, help="Run nodes in network namespaces (Linux, root, iproute2).")
@click.option("--ephemeral", is_flag=True, help="Keep everything in a temporary folder, which 'stop' removes.")
@click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of RabbitMQ, with sbin/. [default: search for one]",
)
@click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False),
    help="Root folder of another system with RabbitMQ (Linux, root).",
)
@json_option("the broker's URLs, release and folder")
@verbose_option
def start(
    *,
    folder: Path | None,
    nodes: int | None,
    namespaces: bool,
    ephemeral: bool,
    home: Path | None,
    root: Path | None,
    as_json: bool,
) -> None:
    """Start the broker, and print the URL to use.

    The broker runs until 'bide broker stop'. A running broker is not changed. A shell can evaluate the output: eval
    "$(bide broker start)". '--nodes 3' starts a cluster, and the URL has all nodes; see 'bide broker node'.
    """
    from bide.local_broker import LocalBroker, LocalCluster, find_running
    from bide.local_broker.state import State, find_folder

    before = None if ephemeral and folder is None else State.load(find_folder(folder))
    count = nodes or (before.nodes if before else 0) or 1
    if namespaces and count == 1:
        raise click.UsageError("--namespaces is for clusters: give --nodes too, such as --nodes 3")
    running = find_running(folder) if before else None
    local: LocalBroker | LocalCluster
    with working("starting RabbitMQ"):
        if count == 1:
            local = LocalBroker.start(folder, ephemeral=ephemeral, detached=True, home=home, chroot=root)
        else:
            local = LocalCluster.start(
                folder,
                nodes=count,
                namespaces=namespaces or bool(before and before.cleanup),
                ephemeral=ephemeral,
                detached=True,
                home=home,
                chroot=root,
            )
    if as_json:
        print_json(local.to_dict())
        return
    was = "runs already" if running else "runs"
    echo(
        f"RabbitMQ {local.release} {was}, on this machine only, in {local.folder}; "
        f"stop it with: {_command('stop', local, is_default=folder is None and not ephemeral)}",
        err=True,
    )
    echo(shell_command(["export", f"BIDE_URL={local.url}"]))
    echo(shell_command(["export", f"BIDE_MANAGEMENT_URL={local.management_url}"]))
    if local.stream_port is not None:
        echo(shell_command(["export", f"BIDE_STREAM_PORT={local.stream_port}"]))


@broker.command()
@_folder_option
@json_option("whether a broker was stopped")
@verbose_option
def stop(*, folder: Path | None, as_json: bool) -> None:
    """Stop the broker.

    Its messages are kept for the next start, except those of an ephemeral broker. It is not an error if no broker runs.
    """
    from bide.local_broker.cluster import attach
    from bide.local_broker.state import LOCK_FILE, find_folder

    folder = find_folder(folder)
    local = attach(folder)
    was_running = local.running
    if (folder / LOCK_FILE).exists():
        with working("stopping RabbitMQ"):
            local.stop()
    if as_json:
        print_json({"folder": str(folder), "stopped": was_running})
    else:
        echo(f"the broker in {folder} is stopped" if was_running else f"no broker runs in {folder}")


@broker.command()
@_folder_option
@json_option("the broker's URLs, release and folder")
@verbose_option
def status(*, folder: Path | None, as_json: bool) -> int:
    """Show the broker and its URLs; exit with 1 if it does not run."""
    from bide.local_broker import find_running
    from bide.local_broker.state import find_folder

    folder = find_folder(folder)
    local = find_running(folder)
    if local is None:
        if as_json:
            print_json({"running": False, "folder": str(folder)})
            return 1
        raise click.ClickException(f"no broker runs in {folder}: start it with 'bide broker start'")
    values = local.to_dict()
    if as_json:
        print_json(values)
    else:
        _show(values)
    return 0


@broker.group()
def node() -> None:
    """Stop, kill, pause or start a node of a cluster.

    Nodes have numbers from 1 on; 'bide broker status' lists them.
    """


_number_argument = click.argument("number", type=int)


@node.command("stop")
@_number_argument
@_folder_option
@verbose_option
def stop_node(*, number: int, folder: Path | None) -> None:
    """Stop a node gracefully; its messages are kept."""
    one = _running_node(folder, number)
    with working(f"stopping node {number}"):
        one.stop()
    echo(f"node {number} is stopped; start it with: {_node_command('start', folder, number)}")


@node.command("kill")
@_number_argument
@_folder_option
@verbose_option
def kill_node(*, number: int, folder: Path | None) -> None:
    """Kill a node with SIGKILL, like a crash."""
    _running_node(folder, number).kill()
    echo(f"node {number} is killed; start it with: {_node_command('start', folder, number)}")


@node.command("pause")
@_number_argument
@_folder_option
@verbose_option
def pause_node(*, number: int, folder: Path | None) -> None:
    """Pause a node with SIGSTOP: it keeps its connections, but does not answer."""
    one = _running_node(folder, number)
    if one.paused:
        raise click.ClickException(
            f"node {number} is paused already: let it continue with '{_node_command('start', folder, number)}'"
        )
    one.pause()
    echo(f"node {number} is paused; let it continue with: {_node_command('start', folder, number)}")


@node.command("start")
@_number_argument
@_folder_option
@verbose_option
def start_node(*, number: int, folder: Path | None) -> None:
    """Start a node that was stopped or killed, or let a paused one continue."""
    one = _cluster(folder).node(number)
    if one.paused:
        one.resume()
    elif one.running:
        raise click.ClickException(f"node {number} runs already")
    else:
        with working(f"starting node {number}"):
            one.restart()
    echo(f"node {number} runs")


def _cluster(folder: Path | None) -> LocalCluster:
    from bide.local_broker import LocalCluster
    from bide.local_broker.state import State, find_folder

    folder = find_folder(folder)
    state = State.load(folder)
    if state is None:
        raise click.ClickException(
            f"bide started no broker in {folder}: start a cluster with 'bide broker start --nodes 3'"
        )
    if not state.nodes:
        raise click.ClickException(
            f"the broker in {folder} is a single node: start a cluster with 'bide broker start --nodes 3 --folder ...'"
        )
    return LocalCluster(folder)


def _running_node(folder: Path | None, number: int) -> LocalBroker:
    one = _cluster(folder).node(number)
    if not one.running:
        raise click.ClickException(
            f"node {number} does not run: start it with '{_node_command('start', folder, number)}'"
        )
    return one


def _node_command(name: str, folder: Path | None, number: int) -> str:
    return shell_command(["bide", "broker", "node", name, str(number), *(["--folder", str(folder)] if folder else [])])


def _show(values: dict[str, Any]) -> None:
    process = f", process {values['pid']}" if "pid" in values else f", {len(values['nodes'])} nodes"
    echo(f"RabbitMQ {values['release']} runs on this machine{process}")
    for title, name in (
        ("URL", "url"),
        ("management", "management_url"),
        ("streams", "stream_url"),
        ("folder", "folder"),
    ):
        if values[name]:
            echo(f"  {title:<11}{values[name]}")
    for one in values.get("nodes", ()):
        process = f", process {one['pid']}" if one["pid"] else ""
        echo(f"  node {one['number']:<6}{one['status']}{process}, {one['name']}")


def _command(name: str, local: LocalBroker | LocalCluster, *, is_default: bool) -> str:
    return shell_command(["bide", "broker", name, *([] if is_default else ["--folder", str(local.folder)])])
