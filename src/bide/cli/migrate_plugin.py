"""``bide migrate-plugin``: leave rabbitmq_delayed_message_exchange."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

import click

from bide.cli.definitions import read_definitions
from bide.cli.output import echo, print_json, working
from bide.cli.running import confirm, connected, run_async
from bide.cli.settings import (
    Settings,
    broker_options,
    hall_options,
    json_option,
    layout_options,
    management_options,
    pass_settings,
    verbose_option,
)
from bide.errors import InvalidInputError
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from datetime import datetime

    from bide.delay.protocol import DelayInfrastructure
    from bide.delay.waiting_hall import WaitingHall
    from bide.delayed_plugin.exchanges import DelayedExchange, Way
    from bide.delayed_plugin.replacing import Replaced
    from bide.delayed_plugin.scheduling import Imported

_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group("migrate-plugin")
def migrate_plugin() -> None:
    """Leave rabbitmq_delayed_message_exchange, which does not run on RabbitMQ 4.3.

    In this order: check and plan; stop the publishers; export the messages that wait; apply; import the messages; start
    the publishers; disable the plugin; upgrade.
    """


def _source_options(command: _Command) -> _Command:
    command = click.option("--vhost", metavar="NAME", help="Virtual host in the file, if it has several.")(command)
    return click.option(
        "--definitions", "file", type=click.File("rb"), help="Read a file of RabbitMQ definitions; - is stdin."
    )(command)


_way_option = click.option(
    "--way",
    type=click.Choice(["hall", "plain"]),
    default="hall",
    show_default=True,
    help="hall: publishers keep x-delay. plain: they use bide.",
)


_REMOVED: Final = (
    "no exchange of the delayed-message plugin, which is not enabled here. If exchanges are missing: 'bide "
    "migrate-plugin plan --definitions FILE' and 'apply' declare them from definitions that were exported earlier, or "
    "from a backup. Waiting messages are in the plugin's Mnesia table on each node, where 'bide migrate-plugin export' "
    "reads them; 'rabbitmq-plugins disable' and the feature flag khepri_db delete this table"
)
_REMAINING: Final = (
    "the plugin is not enabled here, so it delivers nothing, and the messages that wait are not counted: run "
    "'bide migrate-plugin export' for each node, 'apply', and 'import' without --delivered-before. On RabbitMQ 4.3, "
    "whose feature flag khepri_db has deleted these messages, run only 'apply'"
)


@migrate_plugin.command()
@_source_options
@json_option("the exchanges")
@management_options
@pass_settings
def check(settings: Settings, *, file: BinaryIO | None, vhost: str | None, as_json: bool) -> int:
    """List the exchanges of the plugin; exit with 1 if there are any."""
    found, is_enabled = _find(settings, file, vhost)
    if as_json:
        print_json([one.to_dict() for one in found])
    else:
        for one in found:
            waiting = "" if one.waiting is None else f", {quantity(one.waiting, 'message waits', 'messages wait')}"
            through = f", bound to {', '.join(one.incoming)}" if one.incoming else ""
            echo(f"{one.name}: {one.routing_type}, {quantity(len(one.bindings), 'binding')}{waiting}{through}")
        if is_enabled:
            if not found:
                echo("no exchange of the delayed-message plugin")
        else:
            echo(_REMAINING if found else _REMOVED)
    return 1 if found else 0


@migrate_plugin.command()
@_source_options
@_way_option
@hall_options
@json_option("the plan, with RabbitMQ definitions,")
@management_options
@pass_settings
def plan(
    settings: Settings, *, file: BinaryIO | None, vhost: str | None, way: Way, hall: WaitingHall, as_json: bool
) -> int:
    """Print what 'apply' would declare. Nothing is changed; exit with 1 if an exchange cannot be replaced."""
    from bide.delayed_plugin.exchanges import entry_topology, holding_topology
    from bide.topology import Topology
    from bide.topology.rendering import definitions

    found, _ = _find(settings, file, vhost)
    problems = {one.name: one.problems(way) for one in found}
    made = Topology()
    for one in found:
        if problems[one.name]:
            continue
        held = holding_topology(one, way)
        (delivery,) = held.exchanges
        entry = entry_topology(delivery, held.bindings, hall)
        made |= entry if way == "plain" else held | entry
    if as_json:
        print_json(
            {
                "way": way,
                "exchanges": [{**one.to_dict(), "problems": problems[one.name]} for one in found],
                "definitions": definitions(made),
            }
        )
    else:
        _print_plan(found, problems, way, hall)
    return 1 if any(problems.values()) else 0


def _print_plan(found: list[DelayedExchange], problems: Mapping[str, list[str]], way: Way, hall: WaitingHall) -> None:
    for one in found:
        if problems[one.name]:
            echo(f"{one.name}: {'; '.join(problems[one.name])}", mark="✗", colour="red")
            continue
        bindings = quantity(len(one.bindings), "binding")
        if way == "plain":
            echo(
                f"{one.name}: a {one.routing_type} exchange of this name, with its {bindings}", mark="✓", colour="green"
            )
        else:
            echo(
                f"{one.name}: messages with x-delay go to {hall.check_in}, others to {one.delivery}, a "
                f"{one.routing_type} exchange with its {bindings}",
                mark="✓",
                colour="green",
            )
    if found:
        _print_next_step(way)


def _print_next_step(way: Way) -> None:
    from bide.delay.waiting_hall import DELIVERY_SUFFIX

    if way == "hall":
        echo(f"then run a relay: bide relay --allow 'x:*{DELIVERY_SUFFIX}'")
    else:
        echo("then publish with bide.messaging.delayed_message.DelayedMessagePublisher, or with delay=")


@migrate_plugin.command()
@click.argument("names", nargs=-1, metavar="[EXCHANGE]...")
@_source_options
@_way_option
@click.option(
    "--exported",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Export of the messages that wait now. Repeatable.",
)
@click.option("--force", is_flag=True, help="Lose waiting messages that are not exported.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@hall_options
@json_option("the result")
@management_options
@pass_settings
def apply(
    settings: Settings,
    *,
    names: tuple[str, ...],
    file: BinaryIO | None,
    vhost: str | None,
    way: Way,
    exported: tuple[Path, ...],
    force: bool,
    yes: bool,
    hall: WaitingHall,
    as_json: bool,
) -> None:
    """Replace the exchanges of the plugin, by default all. The next run finishes an interrupted one.

    Run it also after you imported definitions with replaced exchanges: RabbitMQ does not export their binding to the
    waiting hall correctly, so their messages are delivered at once.

    Stop the publishers first. Consumers can continue: their queues get the same bindings. Messages that wait are lost
    with their exchange, so the command does nothing if some of them were not exported.

    With --definitions, the exchanges in the file that no longer exist are declared too.
    """
    missing = () if file is None and vhost is None else _find(settings, file, vhost)[0]
    if not yes:
        confirm(
            f"Replace {', '.join(names) or 'all exchanges of the delayed-message plugin'} on {settings.broker_url()}?"
        )
    with working("replacing"):
        done = run_async(_replace(settings, names, missing, way, exported, hall, force=force))
    if as_json:
        print_json(asdict(done))
        return
    echo(f"{quantity(len(done.exchanges), 'exchange')} replaced")
    if done.finished:
        echo(f"the interrupted replacement of {', '.join(done.finished)} finished")
    if done.repaired:
        echo(f"the binding of {', '.join(done.repaired)} to the waiting hall repaired: RabbitMQ exports it incorrectly")
    if not done.exchanges:
        return
    if done.since is None:
        echo(
            "the plugin is not enabled here and has delivered nothing: import this broker's exports without "
            "--delivered-before"
        )
    else:
        since = done.since.isoformat(timespec="milliseconds")
        echo(f"the plugin delivers nothing from them any more: bide migrate-plugin import --delivered-before {since}")
    _print_next_step(way)


async def _replace(
    settings: Settings,
    names: tuple[str, ...],
    missing: Sequence[DelayedExchange],
    way: Way,
    exported: tuple[Path, ...],
    hall: WaitingHall,
    *,
    force: bool,
) -> Replaced:
    from bide.delayed_plugin.export import count_waiting
    from bide.delayed_plugin.replacing import replace_exchanges

    async with connected(settings, "migrate-plugin") as (connection, api):
        counts: Counter[str] = Counter()
        for path in exported:
            counts += count_waiting(path, connection.url.vhost, now=connection.now())
        return await replace_exchanges(
            connection, api, hall, way=way, names=names, missing=missing, exported=counts, force=force
        )


@migrate_plugin.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE")
@click.option(
    "--rabbitmqctl",
    "command",
    default="rabbitmqctl",
    show_default=True,
    metavar="COMMAND",
    help="Command that runs rabbitmqctl.",
)
@json_option("the counts")
@verbose_option
def export(*, path: Path, command: str, as_json: bool) -> None:
    """Write the messages that wait in the plugin on one node to FILE. Nothing is changed on the node.

    The messages are read with 'rabbitmqctl eval', so run this where rabbitmqctl reaches the node, or give a COMMAND
    such as 'docker exec rabbit rabbitmqctl'. Each node of a cluster has messages of its own: export each node, with
    --node in the COMMAND. An interrupted export continues with the same FILE.
    """
    from bide.delayed_plugin.export import export as export_messages

    words = _words(command)
    with working("reading"):
        done = run_async(export_messages(path, [*words, "--quiet"]))
    if as_json:
        exchanges = [{"vhost": vhost, "exchange": name, "messages": n} for (vhost, name), n in done.exchanges.items()]
        print_json({"messages": done.messages, "resumed": done.resumed, "exchanges": exchanges})
        return
    echo(
        f"{quantity(done.messages, 'message')} in {path}" + (f", {done.resumed} of them before" if done.resumed else "")
    )
    for (vhost, name), count in sorted(done.exchanges.items()):
        echo(f"  {count} of {name}, virtual host {vhost}")


@migrate_plugin.command("import")
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--delivered-before", metavar="TIME", help="Skip messages due before this time, as 'apply' prints it.")
@layout_options()
@json_option("the counts")
@broker_options
@pass_settings
def import_file(
    settings: Settings, *, path: Path, delivered_before: str | None, infrastructure: DelayInfrastructure, as_json: bool
) -> int:
    """Schedule the messages of an export with their due times; exit with 1 if some cannot be sent.

    Only messages of the virtual host in the URL are sent. An interrupted import continues with the same FILE, and
    repeats at most 5000 messages: FILE.progress records how far it got. Messages that cannot be sent are listed in
    FILE.refused with the reasons.
    """
    from bide.durations import parse_due_time

    until = None if delivered_before is None else parse_due_time(delivered_before)
    with working("scheduling"):
        done = run_async(_import(settings, path, infrastructure, until))
    if as_json:
        print_json(asdict(done))
    else:
        echo(
            f"{quantity(done.scheduled, 'message')} scheduled, {done.delivered} delivered by the plugin before, "
            f"{done.elsewhere} of other virtual hosts, {done.refused} refused"
        )
        if done.refused:
            echo(f"see {path}.refused", err=True)
    return 1 if done.refused else 0


async def _import(
    settings: Settings, path: Path, infrastructure: DelayInfrastructure, delivered_before: datetime | None
) -> Imported:
    from bide.amqp.connection import Connection
    from bide.client.client import connect
    from bide.delayed_plugin.scheduling import import_messages

    url = settings.broker_url()
    async with connect(url, infrastructure=infrastructure) as client:
        connection = await Connection.open(url)
        try:
            return await import_messages(path, client, connection, delivered_before=delivered_before)
        finally:
            await connection.close()


def _find(settings: Settings, file: BinaryIO | None, vhost: str | None) -> tuple[list[DelayedExchange], bool]:
    """The exchanges of the plugin, and whether it is enabled. For a file of definitions, it counts as enabled."""
    from bide.delayed_plugin.exchanges import delayed_exchanges

    if vhost is not None and file is None:
        raise click.UsageError("--vhost needs --definitions; the virtual host of a broker is in its URL")
    if file is not None:
        topology = read_definitions(file, vhost)
        return delayed_exchanges(topology), True
    with working("looking"):
        return run_async(_find_on_broker(settings))


async def _find_on_broker(settings: Settings) -> tuple[list[DelayedExchange], bool]:
    from bide.admin.locate import management_api
    from bide.delayed_plugin.replacing import find_delayed

    url = settings.broker_url()
    async with management_api(url, settings.management_url) as api:
        found = await find_delayed(api, url.vhost)
    return found.exchanges, found.is_enabled


def _words(command: str) -> list[str]:
    """The words of a command line, as a shell reads them."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidInputError(
            f"--rabbitmqctl is {command!r}: {error}. Write it as in a shell, such as 'docker exec rabbit rabbitmqctl'"
        ) from error
    if not words:
        raise InvalidInputError("--rabbitmqctl is empty: give a command")
    return words
