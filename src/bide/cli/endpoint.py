"""``bide endpoint``: the queues and exchanges of endpoints."""

from __future__ import annotations

import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bide.cli.output import echo, print_json, working
from bide.cli.running import run_async
from bide.cli.settings import Settings, broker_options, json_option, layout_options, pass_settings

if TYPE_CHECKING:
    from bide.admin.apply import Applied
    from bide.admin.endpoints import QueueType
    from bide.delay.message_type import MessageType
    from bide.delay.protocol import DelayInfrastructure
    from bide.topology import Topology


@click.group()
def endpoint() -> None:
    """Create the queues and exchanges of endpoints before they start."""


@endpoint.command("create")
@click.argument("name", metavar="NAME")
@click.option("--error-queue", metavar="QUEUE", help="Also declare this queue for failed messages.")
@click.option("--audit-queue", metavar="QUEUE", help="Also declare this queue for audit copies.")
@click.option("--subscribe", multiple=True, metavar="TYPE", help="Bind NAME to events of TYPE. Repeatable.")
@click.option("--publish", multiple=True, metavar="TYPE", help="Also declare the exchanges of event TYPE. Repeatable.")
@click.option("--instance", "instances", multiple=True, metavar="ID", help="Also declare NAME-ID. Repeatable.")
@click.option(
    "--type",
    "kind",
    type=click.Choice(["quorum", "classic"]),
    default="quorum",
    show_default=True,
    help="Type of the queues.",
)
@layout_options()
@json_option("the names")
@broker_options
@pass_settings
def create(
    settings: Settings,
    *,
    name: str,
    error_queue: str | None,
    audit_queue: str | None,
    subscribe: tuple[str, ...],
    publish: tuple[str, ...],
    instances: tuple[str, ...],
    kind: QueueType,
    infrastructure: DelayInfrastructure,
    as_json: bool,
) -> None:
    """Declare the queue of an endpoint, and bind it to the delay infrastructure, which has to exist.

    With the layout nservicebus, endpoints of .NET and of bide can then start without the permission to declare: bide's
    with declare=False, those of .NET without their installers. Queues and exchanges that exist stay unchanged. A queue
    of another type is an error.

    TYPE is the name of a class without a base class and interfaces, or MODULE:NAME of a bide.MessageType. The module is
    imported, also from the current folder.
    """
    from bide.admin.endpoints import endpoint_topology

    others = [one for one in (error_queue, audit_queue) if one is not None]
    topology = endpoint_topology(
        infrastructure,
        name,
        instances=instances,
        sent_to=others,
        subscriptions=[_message_type(one) for one in subscribe],
        publications=[_message_type(one) for one in publish],
        queue_type=kind,
    )
    with working("declaring"):
        declared, vhost = run_async(_create(settings, infrastructure, topology))
    if as_json:
        print_json(_values(topology, infrastructure, declared))
        return
    echo(f"{infrastructure.name}: {declared} on the virtual host {vhost}")
    for queue in topology.queues:
        echo(f"  {queue.name}")


def _message_type(text: str) -> MessageType:
    """The type with this name, or the one that a Python module describes."""
    from bide.delay.message_type import MessageType

    module, colon, name = text.partition(":")
    if not colon:
        return MessageType(text)
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:
        raise click.UsageError(f"{text!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(found, MessageType):
        raise click.UsageError(f"{text!r} is of type {type(found).__name__}: name a bide.MessageType")
    return found


async def _create(settings: Settings, infrastructure: DelayInfrastructure, topology: Topology) -> tuple[Applied, str]:
    from dataclasses import replace

    from bide.admin.endpoints import create_endpoint
    from bide.amqp.connection import Connection

    url = settings.broker_url()
    connection = await Connection.open(replace(url, name=f"{url.name} (endpoint)"))
    try:
        return await create_endpoint(connection, infrastructure, topology), url.vhost
    finally:
        await connection.close()


def _values(topology: Topology, infrastructure: DelayInfrastructure, declared: Applied) -> dict[str, Any]:
    return {
        "layout": infrastructure.name,
        "queues": [one.name for one in topology.queues],
        "exchanges": [one.name for one in topology.exchanges],
        "declared": asdict(declared),
    }
