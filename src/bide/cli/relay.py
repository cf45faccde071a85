"""``bide relay``: the relay process of a waiting hall."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from bide.cli.metrics_page import make_metrics, metrics_option, served
from bide.cli.output import echo, print_json
from bide.cli.running import run_until_signal
from bide.cli.settings import Settings, allow_option, broker_options, hall_options, json_option, pass_settings

if TYPE_CHECKING:
    from bide.amqp.connection import Connection
    from bide.delay.waiting_hall import WaitingHall


@click.command()
@click.option(
    "--prefetch",
    type=click.IntRange(1, 65535),
    default=1000,
    show_default=True,
    metavar="N",
    help="Unacknowledged messages per queue of the hall.",
)
@click.option(
    "--declare/--no-declare",
    default=True,
    show_default=True,
    help="Declare the waiting hall if it is missing.",
)
@metrics_option
@allow_option
@hall_options
@json_option("the counts at the end")
@broker_options
@pass_settings
def relay(
    settings: Settings,
    *,
    hall: WaitingHall,
    allow: tuple[str, ...],
    prefetch: int,
    declare: bool,
    metrics_port: int | None,
    as_json: bool,
) -> None:
    """Relay the messages of a waiting hall until Ctrl-C or SIGTERM.

    Without a relay, messages wait in the hall and are not lost. Several relays can work on one hall. A relay
    acknowledges a message when the broker has confirmed its copy. The first signal lets the relay finish its
    unacknowledged messages. A second signal ends it at once; another relay then takes over these messages.

    The relay delivers with its own permissions, so it sends messages only to the targets that --allow names and to the
    pick-up exchange. A message for another target goes to the undeliverable queue.

    With large bodies, a lower --prefetch takes less memory.
    """
    from bide.relay import Relay

    metrics = make_metrics(metrics_port)
    worker = Relay(settings.broker_url(), hall=hall, allow=allow, prefetch=prefetch, declare=declare)

    def started(connection: Connection) -> None:
        echo(f"relaying {hall.base} on {connection.address}, virtual host {connection.url.vhost}", err=True)

    if metrics is not None:
        metrics.watch_relay(worker)
    with served(metrics, metrics_port):
        done = run_until_signal(worker.run(on_start=started), worker.stop)
    if as_json:
        print_json(asdict(done))
        return
    echo(
        f"{done.delivered} delivered, {done.delayed} sent to the levels, {done.rounds} to the meditating queue, "
        f"{done.refused} times refused by targets, {done.undeliverable} undeliverable"
    )
