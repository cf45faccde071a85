"""``bide relay``: the process that a waiting hall needs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from bide.cli.output import print_json
from bide.cli.settings import Settings, allow_option, broker_options, hall_options, json_option, pass_settings
from bide.runtime.logs import logger

if TYPE_CHECKING:
    from bide.amqp.connection import Connection
    from bide.delay.waiting_hall import WaitingHall
    from bide.relay import Relay, Relayed

log = logger(__name__)


@click.command()
@click.option(
    "--prefetch",
    type=click.IntRange(1, 65535),
    default=1000,
    show_default=True,
    metavar="N",
    help="Prefetch for each of its two queues.",
)
@click.option(
    "--declare/--no-declare",
    default=True,
    show_default=True,
    help="Put the waiting hall on the broker where it is missing.",
)
@allow_option
@hall_options
@json_option("at the end what was done")
@broker_options
@pass_settings
def relay(
    settings: Settings, *, hall: WaitingHall, allow: tuple[str, ...], prefetch: int, declare: bool, as_json: bool
) -> None:
    """Send the messages of a waiting hall on, until Ctrl-C or SIGTERM.

    Without a relay, messages wait in the hall; nothing is lost. Any number may work on one hall: each message is
    acknowledged when the broker has its successor. The first signal lets it finish the messages that it holds,
    a second one ends it at once; then another relay takes over what was left.

    The relay delivers with its own permissions. So it sends messages only to the targets that --allow names and to the
    pick-up exchange; a message for another target is set aside in the undeliverable queue.

    With large bodies, a lower --prefetch takes less memory.
    """
    from bide.relay import Relay

    worker = Relay(settings.broker_url(), hall=hall, allow=allow, prefetch=prefetch, declare=declare)

    def started(connection: Connection) -> None:
        click.echo(f"relaying {hall.base} on {connection.address}, virtual host {connection.url.vhost}", err=True)

    done = asyncio.run(_until_a_signal(worker, started))
    if as_json:
        print_json(asdict(done))
        return
    click.echo(
        f"{done.delivered} delivered, {done.delayed} sent to the levels, {done.rounds} sent round, "
        f"{done.refused} times refused by targets, {done.undeliverable} set aside"
    )


async def _until_a_signal(worker: Relay, started: Callable[[Connection], None]) -> Relayed:
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        log.info("%s: finishing the messages in flight", number.name)
        for one in signals:
            loop.remove_signal_handler(one)
        worker.stop()

    signals = [one for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    for number in signals:
        loop.add_signal_handler(number, stop, number)
    return await worker.run(on_start=started)
