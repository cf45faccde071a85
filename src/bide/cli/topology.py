"""``bide topology``: patterns of exchanges and queues, and the route of a message."""

from __future__ import annotations

import re
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from bide.cli.definitions import read_definitions
from bide.cli.output import echo, print_json, working
from bide.cli.running import confirm, run_async
from bide.cli.selecting import pairs_of
from bide.cli.settings import Settings, broker_options, json_option, management_options, pass_settings
from bide.errors import InvalidInputError
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from bide.admin.apply import Applied
    from bide.admin.destroy import Removed
    from bide.admin.live_topology import Comparison
    from bide.amqp.connection import Connection
    from bide.management.api import ManagementApi
    from bide.patterns.catalogue import Pattern
    from bide.topology import Topology


@click.group()
def topology() -> None:
    """Patterns of exchanges, queues and bindings: show or apply them, and explain the route of a message.

    'bide topology list' lists the patterns; 'bide topology show NAME --help' lists the options of a pattern.
    """


@topology.command("list")
@json_option("the patterns, with options and caveats,")
def list_patterns(*, as_json: bool) -> None:
    """List all patterns, the eighteen numbered ones first."""
    from bide.cli.topology_view import pattern_values, print_patterns
    from bide.patterns.catalogue import PATTERNS

    if as_json:
        print_json([pattern_values(one) for one in PATTERNS])
        return
    print_patterns(PATTERNS)


class _PatternGroup(click.Group):
    """A group with a command for each pattern, created when it is used.

    Args:
        name: the name of the group.
        work: the function that all commands call, with the pattern, its topology and the command's options.
        purpose: the help text of the group.
    """

    def __init__(self, name: str, work: Callable[..., int | None], purpose: str) -> None:
        super().__init__(
            name, help=purpose, short_help=purpose.partition(";")[0], subcommand_metavar="PATTERN [OPTIONS]"
        )
        self._work = work

    def list_commands(self, ctx: click.Context) -> list[str]:
        from bide.patterns.catalogue import PATTERNS

        return [one.name for one in PATTERNS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        from bide.patterns.catalogue import find_pattern

        pattern = find_pattern(cmd_name)
        own: list[click.Parameter] = list(getattr(self._work, "__click_params__", ()))
        return click.Command(
            pattern.name,
            params=[*_pattern_options(pattern), *reversed(own)],
            callback=_pattern_command(pattern, self._work),
            help="\n\n".join(filter(None, (pattern.summary, pattern.caveat and f"Caveat: {pattern.caveat}"))),
            short_help=pattern.title,
        )


def _pattern_options(pattern: Pattern) -> list[click.Option]:
    options = [
        click.Option(
            [f"--{one.name}", f"pattern_{one.parameter}"],
            multiple=True,
            metavar=one.form,
            help=f"{_first_clause(one.help)}{' Repeatable.' if one.repeatable else ''}"
            f"{' [required]' if one.required else ''}",
        )
        for one in pattern.options
    ]
    sample = click.Option(["--sample"], is_flag=True, help="Use sample values instead of the options above.")
    return [*options, sample]


def _first_clause(text: str) -> str:
    """The first clause of a description. ``bide topology list --json`` has the whole text."""
    first = re.split("[;.] ", text, maxsplit=1)[0].removesuffix(".")
    return f"{first[:1].upper()}{first[1:]}."


def _pattern_command(pattern: Pattern, work: Callable[..., int | None]) -> Callable[..., int | None]:
    def command(*, sample: bool, **values: Any) -> int | None:
        texts = {one.name: values.pop(f"pattern_{one.parameter}") for one in pattern.options}
        given = {name: list(value) for name, value in texts.items() if value}
        if sample and given:
            raise click.UsageError(f"--sample sets all options of the pattern: leave out --{next(iter(given))}")
        made = pattern.sample_topology() if sample else pattern.topology(given)
        return work(pattern, made, **values)

    return command


@click.option("--mermaid", "forms", multiple=True, flag_value="mermaid", help="Print a Mermaid diagram.")
@click.option("--dot", "forms", multiple=True, flag_value="dot", help="Print a graph for Graphviz.")
@click.option("--definitions", "forms", multiple=True, flag_value="definitions", help="Print definitions for RabbitMQ.")
def _show(pattern: Pattern, made: Topology, *, forms: tuple[str, ...]) -> None:
    from bide.cli.topology_view import topology_lines
    from bide.topology.rendering import definitions, graphviz, mermaid

    match forms:
        case ("mermaid",):
            echo(mermaid(made).rstrip("\n"), keep="\n")
        case ("dot",):
            echo(graphviz(made).rstrip("\n"), keep="\n")
        case ("definitions",):
            print_json(definitions(made))
        case (one, another, *_):
            raise click.UsageError(f"--{one} and --{another} are two output formats: give one")
        case _:
            echo(pattern.summary)
            for line in topology_lines(made):
                echo(line)
            if pattern.caveat:
                echo(f"caveat: {pattern.caveat}")


@json_option("the counts")
@broker_options
@pass_settings
def _apply(settings: Settings, pattern: Pattern, made: Topology, *, as_json: bool) -> None:
    with working("declaring"):
        applied, broker, vhost = run_async(_apply_topology(settings, made))
    if as_json:
        print_json({"pattern": pattern.name, **asdict(applied), "broker": broker, "vhost": vhost})
        return
    echo(f"{pattern.name}: {applied} on {broker}, virtual host {vhost}")


async def _apply_topology(settings: Settings, made: Topology) -> tuple[Applied, str, str]:
    from bide.admin.apply import apply
    from bide.patterns.building import references

    _refuse_exclusive(made)
    async with _open_connection(settings) as connection:
        applied = await apply(connection, made, external=references(made))
        return applied, connection.address, connection.url.vhost


def _refuse_exclusive(made: Topology) -> None:
    for queue in made.queues:
        if queue.exclusive:
            raise InvalidInputError(
                f"the queue {queue.name!r} would be exclusive to this command's connection and deleted with it: "
                "declare it in the program that uses it"
            )


@json_option("the differences")
@management_options
@pass_settings
def _diff(settings: Settings, pattern: Pattern, made: Topology, *, as_json: bool) -> int:
    from bide.cli.topology_view import comparison_values, print_comparison

    with working("looking"):
        comparison = run_async(_compare_topology(settings, made))
    if as_json:
        print_json(comparison_values(comparison))
    else:
        print_comparison(comparison)
        if not comparison:
            echo(f"{pattern.name} is on the broker as it should be")
    return 1 if comparison else 0


async def _compare_topology(settings: Settings, made: Topology) -> Comparison:
    from bide.admin.live_topology import compare_live

    async with _open_management(settings) as (api, vhost):
        return await compare_live(api, vhost, made)


@click.option("--force", is_flag=True, help="Also delete queues that hold messages.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option("the counts")
@broker_options
@pass_settings
def _destroy(settings: Settings, pattern: Pattern, made: Topology, *, force: bool, yes: bool, as_json: bool) -> None:
    if not yes:
        names = ", ".join([*(one.name for one in made.exchanges), *(one.name for one in made.queues)][:6])
        confirm(
            f"Delete {quantity(len(made.exchanges), 'exchange')} and {quantity(len(made.queues), 'queue')} on "
            f"{settings.broker_url()} "
            f"({names}{', ...' if len(made.exchanges) + len(made.queues) > 6 else ''})"
            f"{', with the messages in them' if force else ''}?"
        )
    with working("deleting"):
        removed = run_async(_destroy_topology(settings, made, force=force))
    if as_json:
        print_json(asdict(removed))
        return
    deleted = f"{quantity(removed.exchanges, 'exchange')} and {quantity(removed.queues, 'queue')}"
    echo(f"{deleted} deleted, with {quantity(removed.messages, 'message')}")


async def _destroy_topology(settings: Settings, made: Topology, *, force: bool) -> Removed:
    from bide.admin.destroy import destroy
    from bide.patterns.building import references

    async with _open_connection(settings) as connection:
        return await destroy(connection, made, force=force, external=references(made))


for _group in (
    _PatternGroup("show", _show, "Print the topology of a pattern."),
    _PatternGroup("apply", _apply, "Declare a pattern. What exists already stays unchanged."),
    _PatternGroup(
        "diff", _diff, "Compare a pattern with the broker; exit with 1 if something is missing or different."
    ),
    _PatternGroup("destroy", _destroy, "Delete a pattern's exchanges and queues, unless the queues hold messages."),
):
    topology.add_command(_group)


@topology.command()
@click.option("--exchange", required=True, metavar="NAME", help="Exchange of the publish; '' is the default exchange.")
@click.option("--key", default="", metavar="KEY", help="Routing key.")
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    help='Header; 2 is a number, "2" in quotes is text. Repeatable.',
)
@click.option("--cc", multiple=True, metavar="KEY", help="Additional routing key in the CC header. Repeatable.")
@click.option("--bcc", multiple=True, metavar="KEY", help="Additional routing key in the BCC header. Repeatable.")
@click.option("--pattern", "pattern_text", metavar="TEXT", help="Use a pattern: its name and options, as for 'show'.")
@click.option("--definitions", "file", type=click.File("rb"), help="Use a file of RabbitMQ definitions; - is stdin.")
@click.option("--vhost", metavar="NAME", help="Virtual host in the file, if it has several.")
@click.option("--from-broker", is_flag=True, help="Use the broker's topology, including policies.")
@click.option("--all", "every", is_flag=True, help="List every binding that does not match.")
@json_option("the route")
@management_options
@pass_settings
def explain(
    settings: Settings,
    *,
    exchange: str,
    key: str,
    headers: tuple[str, ...],
    cc: tuple[str, ...],
    bcc: tuple[str, ...],
    pattern_text: str | None,
    file: BinaryIO | None,
    vhost: str | None,
    from_broker: bool,
    every: bool,
    as_json: bool,
) -> int:
    """Show where a message would go, and which bindings do not match; exit with 1 if it is unroutable.

    Nothing is sent. Give one topology: --pattern, --definitions or --from-broker.
    """
    from bide.cli.topology_view import print_itinerary
    from bide.delay.protocol import check_name
    from bide.topology.itinerary import plan

    if sum((pattern_text is not None, file is not None, from_broker)) != 1:
        raise click.UsageError("explain needs one topology: give --pattern, --definitions or --from-broker")
    if vhost is not None and file is None:
        raise click.UsageError("--vhost needs --definitions; the virtual host of a broker is in its URL")
    message = _message_headers(headers, cc, bcc)
    check_name("routing key", key, empty=True)
    if pattern_text is not None:
        asked = _pattern_topology(pattern_text)
    elif file is not None:
        asked = read_definitions(file, vhost)
    else:
        with working("looking"):
            asked = run_async(_live_topology(settings))
    itinerary = plan(asked, exchange, key, message)
    if as_json:
        print_json(itinerary.to_dict())
    else:
        print_itinerary(itinerary, every=every)
    return 0 if itinerary.queues or itinerary.possible else 1


def _message_headers(headers: tuple[str, ...], cc: tuple[str, ...], bcc: tuple[str, ...]) -> dict[str, Any]:
    from bide.patterns.options import header_value

    made: dict[str, Any] = {name: header_value(text) for name, text in pairs_of("--header", headers).items()}
    for name, keys in (("CC", cc), ("BCC", bcc)):
        if keys:
            made[name] = list(keys)
    return made


def _pattern_topology(text: str) -> Topology:
    """The topology of a pattern whose name and options are given as one text."""
    from bide.patterns.catalogue import find_pattern

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise click.UsageError(
            f"--pattern {text!r} cannot be read ({error}): write it as for 'bide topology show'"
        ) from None
    if not words:
        raise click.UsageError("--pattern is empty: name a pattern, with its options as for 'bide topology show'")
    name, *arguments = words
    pattern = find_pattern(name)
    made: list[Topology] = []

    def keep(_: Pattern, topology: Topology) -> None:
        made.append(topology)

    command = click.Command(
        pattern.name, params=list(_pattern_options(pattern)), callback=_pattern_command(pattern, keep)
    )
    command.main(arguments, prog_name=f"--pattern {pattern.name}", standalone_mode=False)
    if not made:
        # The text has --help, and the help was printed.
        raise click.UsageError("--pattern takes the options of a topology: leave out --help")
    return made[0]


async def _live_topology(settings: Settings) -> Topology:
    from bide.admin.live_topology import read_topology

    async with _open_management(settings) as (api, vhost):
        return await read_topology(api, vhost, policies=True)


@asynccontextmanager
async def _open_connection(settings: Settings) -> AsyncIterator[Connection]:
    from bide.amqp.connection import Connection

    url = settings.broker_url()
    connection = await Connection.open(replace(url, name=f"{url.name} (topology)"))
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def _open_management(settings: Settings) -> AsyncIterator[tuple[ManagementApi, str]]:
    from bide.admin.locate import management_api

    url = settings.broker_url()
    async with management_api(url, settings.management_url) as api:
        yield api, url.vhost
