"""``bide broker``: a private RabbitMQ on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bide.cli.continuation import shell_command
from bide.cli.output import echo, print_json, working
from bide.cli.settings import json_option, verbose_option

if TYPE_CHECKING:
    from bide.local_broker import LocalBroker

_folder_option = click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the broker. [default: $XDG_STATE_HOME/bide/broker]",
)


@click.group()
def broker() -> None:
    """A private RabbitMQ on this machine.

    It uses an installed RabbitMQ, but runs as a separate node with its own data, password and ports, and listens only
    on this machine. Other RabbitMQ nodes are not affected.
    """


@broker.command()
@_folder_option
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
def start(*, folder: Path | None, ephemeral: bool, home: Path | None, root: Path | None, as_json: bool) -> None:
    """Start the broker, and print the URL to use.

    It runs until 'bide broker stop'. A broker that already runs is not changed. A shell can evaluate the output:
    eval "$(bide broker start)".
    """
    from bide.local_broker import LocalBroker, find_running

    running = None if ephemeral and folder is None else find_running(folder)
    if running is None:
        with working("starting RabbitMQ"):
            local = LocalBroker.start(folder, ephemeral=ephemeral, detached=True, home=home, chroot=root)
    else:
        local = running
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
    from bide.local_broker import LocalBroker, default_folder
    from bide.local_broker.state import LOCK_FILE

    place = (folder or default_folder()).expanduser().resolve()
    local = LocalBroker(place)
    was_running = local.running
    if (place / LOCK_FILE).exists():
        with working("stopping RabbitMQ"):
            local.stop()
    if as_json:
        print_json({"folder": str(place), "stopped": was_running})
    else:
        echo(f"the broker in {place} is stopped" if was_running else f"no broker runs in {place}")


@broker.command()
@_folder_option
@json_option("the broker's URLs, release and folder")
@verbose_option
def status(*, folder: Path | None, as_json: bool) -> int:
    """Show the broker and its URLs; exit with 1 if it does not run."""
    from bide.local_broker import default_folder, find_running

    place = (folder or default_folder()).expanduser().resolve()
    local = find_running(place)
    if local is None:
        if as_json:
            print_json({"running": False, "folder": str(place)})
            return 1
        raise click.ClickException(f"no broker runs in {place}: start it with 'bide broker start'")
    values = local.to_dict()
    if as_json:
        print_json(values)
    else:
        _show(values)
    return 0


def _show(values: dict[str, Any]) -> None:
    echo(f"RabbitMQ {values['release']} runs on this machine, process {values['pid']}")
    for title, name in (
        ("URL", "url"),
        ("management", "management_url"),
        ("streams", "stream_url"),
        ("folder", "folder"),
    ):
        if values[name]:
            echo(f"  {title:<11}{values[name]}")


def _command(name: str, local: LocalBroker, *, is_default: bool) -> str:
    return shell_command(["bide", "broker", name, *([] if is_default else ["--folder", str(local.folder)])])
