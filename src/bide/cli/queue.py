"""``bide queue``: the types and the delivery limits of queues."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from bide.cli.output import echo, print_json, working
from bide.cli.running import confirm, connected, run_async
from bide.cli.settings import Settings, json_option, management_options, pass_settings
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from bide.admin.delivery_limit import LimitedQueue
    from bide.admin.to_quorum import QuorumConversion


@click.group()
def queue() -> None:
    """Turn classic queues into quorum queues, and raise the delivery limits of quorum queues."""


@queue.command("delivery-limit")
@click.argument("names", nargs=-1, metavar="[QUEUE]...")
@click.option(
    "--at-least", type=click.IntRange(1), metavar="N", help="Deliveries that a queue has to allow. [default: no limit]"
)
@click.option("--dry-run", is_flag=True, help="Only print the changes; exit with 1 if there are any.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option("the queues and the policies")
@management_options
@pass_settings
def set_delivery_limit(
    settings: Settings, *, names: tuple[str, ...], at_least: int | None, dry_run: bool, yes: bool, as_json: bool
) -> int:
    """Find quorum queues that give up messages after too few deliveries, and set policies that raise the limit.

    At its delivery limit, a quorum queue drops or dead-letters a message, even if retries are left. Since RabbitMQ 4.0
    the default limit is 20. RabbitMQ applies one policy to a queue. So each queue gets a policy of its own, with the
    definition of the policy that it displaces.

    No policy can raise a limit that an argument of the queue or an operator policy sets. Such queues are listed, and
    the exit code is 1.
    """
    with working("looking"):
        found = run_async(_find_limited(settings, names, at_least))
    raisable = [one for one in found if one.policy is not None]
    if not as_json:
        _print_limited(found)
    done = bool(raisable) and not dry_run
    if done:
        if not yes:
            confirm(f"Set {quantity(len(raisable), 'policy', 'policies')} on {settings.broker_url()}?")
        with working("setting policies"):
            run_async(_set_policies(settings, raisable))
    if as_json:
        print_json({"queues": [_limited_values(one) for one in found], "set": done})
    elif done:
        echo(f"{quantity(len(raisable), 'policy', 'policies')} set")
    elif not found:
        echo("no quorum queue has too low a delivery limit")
    return 1 if (dry_run and found) or len(raisable) < len(found) else 0


@queue.command("to-quorum")
@click.argument("name", metavar="QUEUE")
@click.option("--pause-publishers", is_flag=True, help="Close other connections while the queue is replaced.")
@click.option("--dry-run", is_flag=True, help="Only print what would be done.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option("the result")
@management_options
@pass_settings
def to_quorum(
    settings: Settings, *, name: str, pause_publishers: bool, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Turn a classic queue into a quorum queue of the same name, with its messages and bindings.

    Stop the consumers of the queue first; publishers can continue. The messages wait in the queue NAME.to-quorum
    meanwhile. If the command is interrupted, run it again: it continues where it stopped. Messages that were being
    moved at the interruption may arrive twice.

    For some milliseconds there is no queue of this name. Messages through the default exchange may be lost then, even
    if they are confirmed; messages through other exchanges are not affected. With --pause-publishers, all other
    connections of the virtual host are closed and refused for about a second, and publishers with confirms lose
    nothing. This requires an administrator.
    """
    with working("looking"):
        plan = run_async(_plan_conversion(settings, name, may_allow=not dry_run))
    if not as_json:
        _print_plan(plan)
    if dry_run or not plan.holding:
        if as_json:
            print_json(asdict(plan))
        return
    if not yes:
        confirm(f"Turn {name} on {settings.broker_url()} into a quorum queue?")
    with working("moving messages"):
        done = run_async(_convert(settings, name, pause_publishers=pause_publishers))
    if as_json:
        print_json(asdict(done))
        return
    echo(f"{name} is a quorum queue: {quantity(done.moved, 'message')} moved, {quantity(done.bindings, 'binding')}")
    echo(f"see its delivery limit: bide queue delivery-limit {shlex.quote(name)} --dry-run", err=True)


def _print_plan(plan: QuorumConversion) -> None:
    if not plan.holding:
        echo(f"{plan.queue} is a quorum queue already")
        return
    messages, bindings = quantity(plan.messages, "message"), quantity(plan.bindings, "binding")
    echo(f"{plan.queue}: {plan.found}, {messages}, {bindings}, {quantity(plan.consumers, 'consumer')} to stop")
    echo(f"  holding queue  {plan.holding}")
    echo(f"  arguments      {', '.join(f'{name}={value}' for name, value in plan.arguments.items()) or '-'}")
    if plan.dropped:
        echo(f"  left out       {', '.join(plan.dropped)}, which quorum queues do not have")


async def _plan_conversion(settings: Settings, name: str, *, may_allow: bool) -> QuorumConversion:
    from bide.admin.exclusive_access import end_abandoned_access
    from bide.admin.locate import management_api
    from bide.admin.to_quorum import HOLDING, plan_conversion

    if may_allow:
        url = settings.broker_url()
        async with management_api(url, settings.management_url) as api:
            if await api.queue(url.vhost, name + HOLDING) is not None:
                # A conversion may have been killed while it refused the connections of publishers.
                await end_abandoned_access(api, url.vhost)
    async with connected(settings, "queue") as (connection, api):
        return await plan_conversion(connection, api, name)


async def _convert(settings: Settings, name: str, *, pause_publishers: bool) -> QuorumConversion:
    from bide.admin.to_quorum import convert

    async with connected(settings, "queue") as (connection, api):
        return await convert(connection, api, name, pause_publishers=pause_publishers)


async def _find_limited(settings: Settings, names: Sequence[str], least: int | None) -> list[LimitedQueue]:
    from bide.admin.delivery_limit import limited_queues

    async with connected(settings, "queue") as (connection, api):
        return await limited_queues(
            api, connection.url.vhost, release=connection.release, least=least, names=frozenset(names)
        )


async def _set_policies(settings: Settings, queues: Sequence[LimitedQueue]) -> None:
    async with connected(settings, "queue") as (connection, api):
        for one in queues:
            if one.policy is not None:
                await api.set_policy(connection.url.vhost, one.policy)


def _print_limited(found: Sequence[LimitedQueue]) -> None:
    for one in found:
        text = f"{one.queue}: limit {one.limit} ({one.source})"
        if one.policy is None:
            way_out = "change that policy" if one.source != "argument" else "declare the queue without the argument"
            echo(f"{text}; no policy can raise it: {way_out}", mark="✗", colour="red")
            continue
        instead = f" in place of {one.displaced}" if one.displaced else ""
        limit = one.policy.definition["delivery-limit"]
        echo(f"{text}; policy {one.policy.name}{instead}: delivery-limit {limit}", mark="!", colour="yellow")


def _limited_values(one: LimitedQueue) -> dict[str, Any]:
    policy = one.policy
    return {
        "queue": one.queue,
        "limit": one.limit,
        "source": one.source,
        "policy": None
        if policy is None
        else {
            "name": policy.name,
            "pattern": policy.pattern,
            "definition": dict(policy.definition),
            "apply-to": policy.apply_to,
            "priority": policy.priority,
        },
        "displaced": one.displaced,
    }
