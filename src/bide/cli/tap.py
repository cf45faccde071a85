"""``bide tap``: switch the taps of a delay infrastructure on and off."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from bide.cli.output import echo, print_json, working
from bide.cli.running import confirm, connected, run_async
from bide.cli.settings import (
    Settings,
    broker_options,
    duration_of,
    json_option,
    layout_options,
    management_options,
    pass_settings,
)
from bide.errors import InvalidInputError
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from bide.admin.taps import StreamStatus, TapStatus, TurnedOff, TurnedOn
    from bide.delay.protocol import DelayInfrastructure
    from bide.delay.taps import Retention

_UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE: Final = re.compile(r"(\d+)\s*([A-Za-z]*)")


@click.group()
def tap() -> None:
    """Two streams that record every delayed message when it is scheduled and when it is due.

    Publishers and consumers need no change. NServiceBus and Celery systems need no change either.
    """


@tap.command()
@click.option("--max-age", metavar="DELAY", help="Age limit of messages in each stream. [default: 7d]")
@click.option("--max-bytes", metavar="SIZE", help="Size limit of each stream: 500MB, 2TB. [default: 10GB]")
@layout_options(taps=True)
@json_option("the result")
@broker_options
@pass_settings
def on(
    settings: Settings,
    *,
    infrastructure: DelayInfrastructure,
    max_age: str | None,
    max_bytes: str | None,
    as_json: bool,
) -> None:
    """Declare the streams and bind them. Streams that exist already keep their messages."""
    from bide.delay.taps import taps_of

    retention = _retention(max_age, max_bytes)
    taps = taps_of(infrastructure)
    with working("binding"):
        done, broker, vhost = run_async(_on(settings, infrastructure, retention))
    if as_json:
        print_json({"layout": infrastructure.name, "broker": broker, "vhost": vhost, **asdict(done)})
        return
    echo(f"{infrastructure.name}: taps on, {done.bindings} bindings on {broker}, virtual host {vhost}")
    for which, name in zip(("scheduled", "delivered"), taps.names, strict=True):
        echo(f"  {which}  {name}  {'new' if name in done.created else 'exists'}")
    if taps.defeats:
        echo(
            f"note: from now on a message for a deleted endpoint is only in {taps.delivered}: the tap on "
            f"{taps.defeats} counts as a route, so the alternate exchange does not get the message",
            err=True,
        )


async def _on(
    settings: Settings, infrastructure: DelayInfrastructure, retention: Retention | None
) -> tuple[TurnedOn, str, str]:
    from bide.admin.taps import turn_on

    async with connected(settings, "tap") as (connection, _):
        done = await turn_on(connection, infrastructure, retention=retention)
        return done, connection.address, connection.url.vhost


@tap.command()
@click.option("--delete", is_flag=True, help="Also delete the streams with their messages.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@layout_options(taps=True)
@json_option("the result")
@broker_options
@pass_settings
def off(settings: Settings, *, infrastructure: DelayInfrastructure, delete: bool, yes: bool, as_json: bool) -> None:
    """Unbind the streams. They stay with their messages, unless --delete is given."""
    from bide.delay.taps import taps_of

    names = taps_of(infrastructure).names
    if delete and not yes:
        confirm(f"Delete {' and '.join(names)} on {settings.broker_url()}?")
    with working("unbinding"):
        done = run_async(_off(settings, infrastructure, delete=delete))
    if as_json:
        print_json(asdict(done))
        return
    said = "taps off"
    if done.kept:
        said += f"; {' and '.join(done.kept)} stay with their messages"
    if done.deleted:
        said += f"; {' and '.join(done.deleted)} deleted, with about {quantity(done.messages, 'message')}"
    echo(f"{infrastructure.name}: {said}")


async def _off(settings: Settings, infrastructure: DelayInfrastructure, *, delete: bool) -> TurnedOff:
    from bide.admin.taps import turn_off

    async with connected(settings, "tap") as (connection, _):
        return await turn_off(connection, infrastructure, delete=delete)


@tap.command()
@layout_options(taps=True)
@json_option("the status")
@management_options
@pass_settings
def status(settings: Settings, *, infrastructure: DelayInfrastructure, as_json: bool) -> int:
    """Show whether the taps are on, and the sizes of their streams; exit with 1 if they miss some messages.

    Bindings and limits are shown only if the management API answers. The broker updates message counts every five
    seconds.
    """
    with working("reading the status"):
        found = run_async(_status(settings, infrastructure))
    if as_json:
        print_json(found.to_dict())
    else:
        _print_status(found)
    return 1 if found.state == "incomplete" else 0


async def _status(settings: Settings, infrastructure: DelayInfrastructure) -> TapStatus:
    from bide.admin.taps import read_status

    async with connected(settings, "tap") as (connection, api):
        return await read_status(connection, infrastructure, api)


def _print_status(found: TapStatus) -> None:
    echo(f"{found.layout} on {found.broker}, virtual host {found.vhost}: taps {found.state}")
    for which, stream in found.streams.items():
        echo(f"  {which}  {stream.name}  {_stream_text(stream)}")
    if found.state == "incomplete":
        echo("some messages are not recorded: run 'bide tap on' with the same options", err=True)
    if found.why:
        echo(f"bindings and limits are not known: {found.why}", err=True)
    if found.port == 0:
        echo(
            "the broker does not speak the stream protocol: run 'rabbitmq-plugins enable rabbitmq_stream' to read the "
            "streams with this protocol",
            err=True,
        )


def _stream_text(stream: StreamStatus) -> str:
    if not stream.exists:
        return "does not exist"
    parts = [quantity(stream.messages, "message")]
    if stream.bindings is not None:
        parts.append(f"{stream.bindings} of {stream.wanted} bindings")
    limits = []
    if "x-max-age" in stream.arguments:
        limits.append(str(stream.arguments["x-max-age"]))
    if "x-max-length-bytes" in stream.arguments:
        limits.append(f"{int(stream.arguments['x-max-length-bytes']):,} bytes")
    if limits:
        parts.append(f"keeps {', '.join(limits)}")
    return ", ".join(parts)


def _retention(max_age: str | None, max_bytes: str | None) -> Retention | None:
    """The limits that were given; None without any, so that an existing stream keeps its limits."""
    from bide.delay.taps import Retention

    given: dict[str, Any] = {}
    if max_age is not None:
        given["max_age"] = duration_of("--max-age", max_age)
    if max_bytes is not None:
        given["max_bytes"] = _size(max_bytes)
    return Retention(**given) if given else None


def _size(text: str) -> int:
    """Parse a number of bytes with an optional unit."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2].upper() not in _UNITS:
        raise InvalidInputError(
            f"the size {text!r} cannot be read: give a whole number of bytes, or a size such as 500MB or 2TB"
        )
    return int(found[1]) * _UNITS[found[2].upper()]
