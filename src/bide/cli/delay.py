"""``bide delay``: delay infrastructures on a broker."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

import click

from bide.cli.advice import with_options
from bide.cli.migration import migrate, transfer
from bide.cli.output import echo, print_json, terminal_width, working
from bide.cli.running import confirm, connected, run_async
from bide.cli.settings import (
    Settings,
    allow_option,
    json_option,
    layout_options,
    management_options,
    pass_settings,
)
from bide.errors import InvalidInputError, ManagementApiError
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from bide.admin.infrastructure import RemovedInfrastructure
    from bide.admin.report import VerifyReport
    from bide.amqp.connection import Connection
    from bide.delay.protocol import DelayInfrastructure, Target
    from bide.error_queues.undeliverable import Resent
    from bide.management.api import ManagementApi

_MANAGEMENT_TIMEOUT: Final = 10.0
"""Seconds that ``bide delay apply`` waits for the optional answer of the management API."""

_STATUS_MARKS: Final = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "problem": ("✗", "red"),
    "not checked": ("·", "yellow"),
}


@click.group()
def delay() -> None:
    """The exchanges and queues in which delayed messages wait.

    Publishers declare them if their user has the permission. These commands declare them in advance, check them, and
    delete them.
    """


delay.add_command(migrate)
delay.add_command(transfer)


@delay.command()
@click.option("--guard", is_flag=True, help="Keep messages whose target is gone (nservicebus, celery).")
@click.option("--protect", is_flag=True, help="Set a policy that overrides other policies on the queues.")
@layout_options()
@json_option("the counts and the policies")
@management_options
@pass_settings
def apply(
    settings: Settings, *, infrastructure: DelayInfrastructure, guard: bool, protect: bool, as_json: bool
) -> None:
    """Declare the infrastructure. What exists already stays unchanged.

    An exchange or queue with other properties is an error that names the difference, and is not changed. Policies that
    delete delayed messages or deliver them early are reported as warnings if the management API answers.
    """
    from bide.admin.apply import Applied

    with working("declaring"):
        result = run_async(_apply(settings, infrastructure, guard=guard, protect=protect))
    for warning in result["warnings"]:
        echo(f"bide: warning: {warning}", err=True)
    if as_json:
        print_json(result)
        return
    declared = Applied(**result["declared"])
    echo(f"{infrastructure.name}: {declared} on {result['broker']}, virtual host {result['vhost']}")
    if guard:
        echo(f"policy {result['guard']}: undeliverable messages go to the queue {infrastructure.undeliverable}")
    if protect:
        for one in filter(None, (result["protection"], result["schedule_protection"])):
            _print_protection(one)


def _print_protection(protection: dict[str, Any]) -> None:
    displaced, left_out = protection["displaced"], protection["left_out"]
    place = f" in place of {', '.join(displaced)}" if displaced else ""
    less = f", without {', '.join(left_out)}" if left_out else ""
    echo(f"policy {protection['policy']}: applies to the queues with priority {protection['priority']}{place}{less}")


async def _apply(
    settings: Settings, infrastructure: DelayInfrastructure, *, guard: bool, protect: bool
) -> dict[str, Any]:
    from bide.admin.infrastructure import install, install_guard
    from bide.admin.protection import protect as set_protection
    from bide.admin.protection import protect_schedule_log
    from bide.schedules.names import ScheduleNames

    async with connected(settings, "delay") as (connection, api):
        vhost = connection.url.vhost
        # The policies are set before the queues exist, so that no other policy ever applies to the queues.
        protection = await set_protection(api, vhost, infrastructure, connection.release) if protect else None
        beside = await protect_schedule_log(api, vhost, ScheduleNames(), connection.release) if protect else None
        applied = await install(connection, infrastructure)
        policy = await install_guard(connection, api, infrastructure) if guard else None
        return {
            "layout": infrastructure.name,
            "broker": connection.address,
            "vhost": connection.url.vhost,
            "declared": asdict(applied),
            "guard": policy.name if policy else None,
            "protection": protection.to_dict() if protection else None,
            "schedule_protection": beside.to_dict() if beside else None,
            "warnings": await _policy_warnings(connection, api, infrastructure),
        }


async def _policy_warnings(
    connection: Connection, api: ManagementApi, infrastructure: DelayInfrastructure
) -> list[str]:
    """Warnings about harmful policies; empty if the management API does not answer."""
    from bide.admin.policies import harmful_policies

    try:
        async with asyncio.timeout(_MANAGEMENT_TIMEOUT):
            found = await harmful_policies(api, connection.url.vhost, infrastructure, connection.release)
    except (ManagementApiError, TimeoutError):
        return []
    return [with_options(one) for one in found]


@delay.command()
@layout_options()
@json_option("the findings")
@management_options
@pass_settings
def verify(settings: Settings, *, infrastructure: DelayInfrastructure, as_json: bool) -> int:
    """Check the broker and the infrastructure on it; exit with 1 and suggest a fix if something is wrong.

    Some checks need the management API. Without it they are listed as not checked. Neither these nor warnings, marked
    with an exclamation mark, count as failures.
    """
    with working("looking"):
        report = run_async(_verify(settings, infrastructure))
    report = replace(report, findings=tuple(replace(one, text=with_options(one.text)) for one in report.findings))
    if as_json:
        print_json(report.to_dict())
    else:
        _print_report(report)
    if report.ok:
        return 0
    count = len(report.problems)
    if as_json:
        return 1
    raise click.ClickException(f"{quantity(count, 'problem')} with {report.layout} on {report.broker}")


async def _verify(settings: Settings, infrastructure: DelayInfrastructure) -> VerifyReport:
    from bide.admin.verify import verify

    async with connected(settings, "delay") as (connection, api):
        return await verify(connection, infrastructure, api)


def _print_report(report: VerifyReport) -> None:
    echo(f"{report.layout} on {report.broker}, virtual host {report.vhost}, RabbitMQ {report.release}", hang=2)
    for finding in report.findings:
        mark, colour = _STATUS_MARKS[finding.status]
        echo(f"{finding.check:<24}{finding.text}", mark=mark, colour=colour, hang=24)


@delay.command()
@click.option("--force", is_flag=True, help="Also delete messages that still wait.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@layout_options()
@json_option("the counts")
@management_options
@pass_settings
def destroy(settings: Settings, *, infrastructure: DelayInfrastructure, force: bool, yes: bool, as_json: bool) -> None:
    """Delete the infrastructure, its release queues and its policies.

    Nothing is deleted while messages wait, unless --force is given. The streams of its taps stay ('bide tap off
    --delete' deletes them).
    """
    if not yes:
        url = settings.broker_url()
        what = f"Delete the {infrastructure.name} infrastructure on {url}"
        confirm(f"{what}{', with the messages in it' if force else ''}?")
    with working("deleting"):
        result = run_async(_destroy(settings, infrastructure, force=force))
    if as_json:
        print_json({**asdict(result.removed), "complete": result.complete, "kept": result.kept})
        return
    removed = result.removed
    deleted = f"{quantity(removed.exchanges, 'exchange')} and {quantity(removed.queues, 'queue')}"
    echo(f"{deleted} deleted, with {quantity(removed.messages, 'message')}")
    if not result.complete:
        echo("the management API did not answer: release queues of targets, and policies of bide, may remain", err=True)
    if result.kept:
        echo(f"{' and '.join(result.kept)} stay, with their messages: 'bide tap off --delete' deletes them", err=True)


async def _destroy(settings: Settings, infrastructure: DelayInfrastructure, *, force: bool) -> RemovedInfrastructure:
    from bide.admin.infrastructure import remove

    async with connected(settings, "delay") as (connection, api):
        return await remove(connection, infrastructure, api, force=force)


@delay.command()
@allow_option
@click.option("--queue", metavar="NAME", help="Undeliverable queue. [default: that of the layout]")
@layout_options()
@json_option("the result for each message")
@management_options
@pass_settings
def resend(
    settings: Settings,
    *,
    infrastructure: DelayInfrastructure,
    allow: tuple[str, ...],
    queue: str | None,
    as_json: bool,
) -> int:
    """Send the messages in the undeliverable queue to their targets; exit with 1 if some stay.

    Use it once the targets exist again. Senders name the targets in headers, so only targets that --allow names get
    messages. Undeliverable messages of schedules are in the queue bide.v1.schedule.undeliverable (--queue).
    """
    with working("sending"):
        result = run_async(_resend(settings, infrastructure, allow, queue))
    if as_json:
        print_json(asdict(result))
    else:
        kept = quantity(sum(result.kept.values()), "stays", "stay")
        echo(f"{quantity(result.sent, 'message')} sent on, {kept} in the undeliverable queue")
        for reason, count in result.kept.items():
            echo(f"  {count} for {with_options(reason)}")
    return 1 if result.kept else 0


async def _resend(
    settings: Settings, infrastructure: DelayInfrastructure, allow: tuple[str, ...], queue: str | None
) -> Resent:
    from bide.client.client import connect
    from bide.error_queues.undeliverable import resend

    async with connect(settings.broker_url(), infrastructure=infrastructure) as client:
        return await resend(client, allow=allow, queue=queue, management_url=settings.management_url)


@delay.command()
@click.argument("delay_text", metavar="DELAY")
@click.option("--to", metavar="QUEUE", help="Target queue of the message.")
@click.option("--exchange", metavar="NAME", help="Target exchange of the message, instead of a queue.")
@click.option("--routing-key", default="", metavar="KEY", help="Routing key of the message, with --exchange.")
@click.option("--mermaid", is_flag=True, help="Print a Mermaid diagram instead of the table.")
@layout_options(fewer_levels=True)
@json_option("the rows")
def explain(
    *,
    infrastructure: DelayInfrastructure,
    delay_text: str,
    to: str | None,
    exchange: str | None,
    routing_key: str,
    mermaid: bool,
    as_json: bool,
) -> None:
    """Show the route of a message with this DELAY, exchange by exchange. No broker is needed."""
    from bide.delay import explain as explaining
    from bide.durations import parse_delay

    target = _target(to, exchange, routing_key)
    wait = parse_delay(delay_text)
    if as_json:
        print_json(explaining.rows(infrastructure, wait, target))
    elif mermaid:
        echo(explaining.mermaid(infrastructure, wait, target), keep="\n")
    else:
        _print_table(explaining.table(infrastructure, wait, target))


def _print_table(rows: list[tuple[str, ...]]) -> None:
    from bide.cli.folding import table
    from bide.delay.explain import markdown

    lines = markdown(rows)
    width = terminal_width()
    for line in lines if width is None or len(lines[0]) <= width else table(rows, width):
        echo(line)


def _target(to: str | None, exchange: str | None, routing_key: str) -> Target:
    from bide.delay.protocol import ExchangeTarget, QueueTarget

    if (to is None) == (exchange is None):
        raise InvalidInputError("the message needs one target: give either --to or --exchange")
    if exchange is not None:
        return ExchangeTarget(exchange, routing_key)
    assert to is not None
    if routing_key:
        raise InvalidInputError("--routing-key needs --exchange: add it, or leave out --routing-key")
    return QueueTarget(to)
