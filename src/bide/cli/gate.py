"""``bide gate``: the process that delivers scheduled messages."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from bide.cli.metrics_page import make_metrics, metrics_option, served
from bide.cli.output import echo, print_json
from bide.cli.running import run_until_signal
from bide.cli.settings import Settings, allow_option, broker_options, json_option, pass_settings

if TYPE_CHECKING:
    from bide.amqp.connection import Connection


@click.command()
@click.option(
    "--state",
    type=click.Path(file_okay=False),
    required=True,
    metavar="FOLDER",
    help="Folder of the index, one for each gate.",
)
@click.option(
    "--retention",
    type=int,
    metavar="BYTES",
    help="Bytes that a policy lets each stream keep. [default: 2 GB]",
)
@click.option(
    "--declare/--no-declare",
    default=True,
    show_default=True,
    help="Declare the schedule log if it is missing.",
)
@metrics_option
@allow_option
@json_option("the counts at the end")
@broker_options
@pass_settings
def gate(
    settings: Settings,
    *,
    state: str,
    retention: int | None,
    allow: tuple[str, ...],
    declare: bool,
    metrics_port: int | None,
    as_json: bool,
) -> None:
    """Deliver scheduled messages until Ctrl-C or SIGTERM.

    Without a gate, scheduled messages wait in the schedule log and are not lost. Run two gates or more, each with a
    folder of its own: they share the work, and take over from each other within seconds. The first signal lets a gate
    finish its messages in flight. A second signal ends it at once; another gate then delivers these messages again.

    The gate delivers with its own permissions, so it sends messages only to the targets that --allow names. A message
    for another target goes to the undeliverable queue.

    The folder holds an index, so that the gate starts faster. If it is deleted, the gate builds a new one from the log.
    """
    from bide.gate import Gate
    from bide.schedules.names import LOG_BYTES, ScheduleNames

    operations = ScheduleNames().operations
    metrics = make_metrics(metrics_port)
    worker = Gate(
        settings.broker_url(),
        allow=allow,
        state=state,
        retention=LOG_BYTES if retention is None else retention,
        declare=declare,
        observers=[] if metrics is None else [metrics],
    )

    def started(connection: Connection) -> None:
        echo(
            f"following {operations} on {connection.address}, virtual host {connection.url.vhost}, as {worker.name}",
            err=True,
        )

    if metrics is not None:
        metrics.watch_gate(worker)
    with served(metrics, metrics_port):
        done = run_until_signal(worker.run(on_start=started), worker.stop)
    if as_json:
        print_json(asdict(done))
        return
    echo(
        f"{done.delivered} delivered, {done.refused} times refused by targets, {done.undeliverable} undeliverable, "
        f"{done.answered} answers"
    )
