"""``bide demo``: watch delayed messages arrive on time."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from bide.cli.output import print_json
from bide.cli.running import run_async
from bide.cli.settings import Settings, broker_options, json_option, pass_settings

if TYPE_CHECKING:
    from bide.amqp.url import BrokerUrl
    from bide.demo.figures import Figures
    from bide.demo.progress import Progress


@click.command()
@click.option("--messages", default=4000, show_default=True, metavar="N", help="How many to publish.")
@click.option("--longest", default="20s", show_default=True, metavar="DELAY", help="The longest delay.")
@click.option("--seed", default=1, show_default=True, metavar="N", help="The same one plans the same messages.")
@json_option("the figures")
@broker_options
@pass_settings
def demo(settings: Settings, *, messages: int, longest: str, seed: int, as_json: bool) -> int:
    """Publish delayed messages to queues and to a topic exchange, and measure how late each of them arrives.

    On a private RabbitMQ that is started for it, or with --url or BIDE_URL on yours, under names of its own. Everything
    is taken away again. Exits with 1 if a message was lost, early, altered, or came where it did not belong.
    """
    from rich.console import Console

    from bide.amqp.url import BrokerUrl
    from bide.demo.plan import make_plan
    from bide.demo.progress import Progress
    from bide.demo.view import outcome, showing
    from bide.duration import parse_delay

    prefix = f"bide-demo-{secrets.token_hex(3)}"
    progress = Progress(
        plan=make_plan(prefix, messages=messages, longest=parse_delay(longest), seed=seed),
    )
    console = Console(stderr=as_json, highlight=False)
    with ExitStack() as stack:
        stack.enter_context(showing(progress, console))
        if settings.url:
            url = settings.broker_url()
        else:
            from bide.broker import LocalBroker

            with progress.phase("start") as phase:
                broker = stack.enter_context(LocalBroker.start(ephemeral=True))
                phase.note = f"RabbitMQ {broker.release}, on this machine only"
            url = BrokerUrl.parse(broker.url)
        figures = run_async(_demonstrate(url, prefix, progress))
    if as_json:
        print_json(figures.to_dict())
    else:
        console.print(outcome(figures, progress.lateness, live=console.is_terminal))
    return 1 if figures.problems else 0


async def _demonstrate(url: BrokerUrl, prefix: str, progress: Progress) -> Figures:
    from bide.delay.clock import Clock
    from bide.demo.run import demonstrate, remove

    clock = Clock(prefix=prefix)
    try:
        return await demonstrate(url, clock, progress)
    finally:
        with progress.phase("clean") as phase:
            removed = await remove(url, clock, progress.plan)
            phase.note = f"{removed.queues} queues and {removed.exchanges} exchanges removed"
