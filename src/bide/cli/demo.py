"""``bide demo``: watch delayed messages arrive on time."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from bide.cli.advice import with_options
from bide.cli.console import require_console, serve_console
from bide.cli.output import print_json
from bide.cli.running import ended_by_signals, run_async
from bide.cli.settings import Settings, json_option, management_options, pass_settings
from bide.errors import BideError

if TYPE_CHECKING:
    from collections.abc import Callable

    from bide.amqp.url import BrokerUrl
    from bide.demo.figures import DemoFigures
    from bide.demo.progress import Progress
    from bide.demo.report import DemoReport, ReportFolder
    from bide.demo.workload import Shop

_STDERR: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Broker:
    """The broker of the demonstration.

    Attributes:
        url_text: the URL, with the password.
        stream_port: the port for the stream protocol; None for the default port.
        management_url: the URL of the management API; None for the default URL.
    """

    url: BrokerUrl
    url_text: str
    stream_port: int | None
    management_url: str | None


@click.command()
@click.option("--messages", default=4000, show_default=True, metavar="N", help="Number of delayed messages.")
@click.option("--longest", default="20s", show_default=True, metavar="DELAY", help="Longest delay.")
@click.option("--seed", default=1, show_default=True, metavar="N", help="Random seed; equal seeds plan equal messages.")
@click.option("--report/--no-report", "with_report", default=True, show_default=True,
              help="Also run an endpoint, an audit and a report (needs Spark).")  # fmt: skip
@click.option("--into", type=click.Path(path_type=Path, file_okay=False), default=Path("bide-demo"), show_default=True,
              metavar="DIR", help="Folder of the report. An earlier report is replaced.")  # fmt: skip
@click.option("--stream-port", type=click.IntRange(1, 65535), metavar="PORT",
              help="Stream port. [default: BIDE_STREAM_PORT, 5552, TLS: 5551]")  # fmt: skip
@click.option("--console", "is_served", is_flag=True, help="Keep the messages, and serve a console until Ctrl-C.")
@json_option("the figures")
@management_options
@pass_settings
def demo(
    settings: Settings,
    /,
    *,
    messages: int,
    longest: str,
    seed: int,
    with_report: bool,
    into: Path,
    stream_port: int | None,
    is_served: bool,
    as_json: bool,
) -> int:
    """Publish delayed messages to queues and to a topic exchange, and measure the lateness of each message.

    The second part runs an endpoint whose handler sometimes fails, audits taps and events with Spark, and writes a
    report with plots. It needs Spark and Java; without them the demo ends after the first part.

    The demo starts a private RabbitMQ, or uses the broker of --url or BIDE_URL under unique names. It deletes
    everything at the end, except the report. With --console, it first shows the waiting and the failed messages on a
    web page, until Ctrl-C. This needs bide[console].

    It exits with 1 if a message was lost, early, altered, undeliverable or delivered to the wrong queue, if an order
    did not end as planned, or if the report failed.
    """
    if is_served:
        if as_json:
            raise click.UsageError(
                "--console prints an address, so it cannot be used with --json: give only one of the two"
            )
        require_console()
    from rich.console import Console

    from bide.demo.plan import make_plan
    from bide.demo.progress import Progress
    from bide.demo.view import result, showing
    from bide.demo.workload import make_shop
    from bide.durations import parse_delay

    # A private broker needs no unique names.
    prefix = f"bide-demo-{secrets.token_hex(3)}" if settings.url else "demo"
    delay = parse_delay(longest)
    progress = Progress(plan=make_plan(prefix, messages=messages, longest=delay, seed=seed))
    report_folder, no_report = _report_folder(into) if with_report else (None, "")
    with ExitStack() as stack:
        # A duplicate of standard error, because standard error is redirected while Spark starts.
        duplicate = stack.enter_context(os.fdopen(os.dup(_STDERR), "w", encoding="utf-8")) if as_json else None
        console = Console(file=duplicate, highlight=False)
        display = stack.enter_context(ExitStack())
        display.enter_context(showing(progress, console))
        broker = _demo_broker(settings, stream_port, progress, stack)
        shop = None
        if report_folder is not None or is_served:
            unreadable = _why_unreadable(broker)
            no_report = no_report or (unreadable if report_folder is not None else "")
            shop = None if unreadable else make_shop(prefix, messages=messages, longest=delay, seed=seed)
        demonstration = _DemoCommand(broker, prefix, progress, shop, report_folder)

        def show(figures: DemoFigures) -> None:
            shown = result(
                figures,
                progress.lateness,
                live=console.is_terminal,
                report=demonstration.report,
                no_report=no_report or demonstration.failure,
            )
            console.print(shown, crop=False)

        def serve(figures: DemoFigures) -> None:
            display.close()
            show(figures)
            demonstration.serve()

        figures = demonstration.run(serve if is_served else None)
    if as_json:
        report = None if demonstration.report is None else demonstration.report.to_dict()
        print_json(figures.to_dict() | {"report": report, "no_report": no_report or demonstration.failure or None})
    elif not is_served:
        show(figures)
        console.print("\n  bide demo --console keeps the messages, and shows them on a web page", style="dim")
    return 1 if figures.problems or demonstration.failure else 0


def _report_folder(into: Path) -> tuple[ReportFolder | None, str]:
    """The folder of the report, or None and the reason why there will be no report.

    Raises:
        InvalidInputError: the folder cannot be used for a report.
    """
    from bide.pipelines.requirements import missing

    if reason := missing():
        return None, reason
    from bide.demo.report import ReportFolder

    folder = ReportFolder(into)
    folder.create()
    return folder, ""


def _demo_broker(settings: Settings, stream_port: int | None, progress: Progress, stack: ExitStack) -> _Broker:
    """The broker that the settings name, or a new one until the stack ends."""
    from bide.admin.locate import stream_port as known_stream_port
    from bide.amqp.url import BrokerUrl

    if settings.url:
        return _Broker(
            url=settings.broker_url(),
            url_text=settings.url,
            stream_port=stream_port or known_stream_port(settings.url, os.environ),
            management_url=settings.management_url,
        )
    from bide.local_broker import LocalBroker

    with progress.phase("start") as phase:
        broker = stack.enter_context(LocalBroker.start(ephemeral=True))
        phase.note = f"RabbitMQ {broker.release}, on this machine only"
    return _Broker(
        url=BrokerUrl.parse(broker.url),
        url_text=broker.url,
        stream_port=broker.stream_port or stream_port,
        management_url=broker.management_url,
    )


def _why_unreadable(broker: _Broker) -> str:
    """Why streams of this broker cannot be read; empty if they can be read."""
    from bide.streams.log import Address

    try:
        Address.of(broker.url_text, broker.stream_port).connect().close()
    except BideError as error:
        return f"{error}; enable the plugin rabbitmq_stream there, and name its port with --stream-port"
    return ""


class _DemoCommand:
    """The demonstration on a broker, with its report, its console and its cleanup.

    Attributes:
        report: the report, once it is written.
        failure: why the report failed, or empty.
    """

    def __init__(
        self, broker: _Broker, prefix: str, progress: Progress, shop: Shop | None, report_folder: ReportFolder | None
    ) -> None:
        from bide.delay.clock import Clock

        self.report: DemoReport | None = None
        self.failure = ""
        self._broker, self._progress, self._shop, self._report_folder = broker, progress, shop, report_folder
        self._clock = Clock(prefix=prefix)

    def run(self, then: Callable[[DemoFigures], None] | None) -> DemoFigures:
        """Run the demonstration, write the report, call *then* with the figures, and clean up."""
        from bide.demo.run import demonstrate

        broker, shop = self._broker, self._shop
        try:
            figures = run_async(
                demonstrate(broker.url, self._clock, self._progress, shop=shop, management_url=broker.management_url)
            )
            if shop is not None and self._report_folder is not None:
                self._write_report(shop, self._report_folder)
            if then is not None:
                then(figures)
        finally:
            run_async(self._clean_up())
        return figures

    def serve(self) -> None:
        """Serve a console until Ctrl-C or SIGTERM."""
        from bide.console.settings import Access
        from bide.console.vhost import ConsoleVhost

        broker = self._broker
        console_vhost = ConsoleVhost(
            url=broker.url,
            infrastructure=self._clock,
            management_url=broker.management_url,
            stream_port=broker.stream_port,
        )
        serve_console([console_vhost], Access(port=0))

    def _write_report(self, shop: Shop, folder: ReportFolder) -> None:
        from bide.demo.report import write_report

        broker = self._broker
        try:
            with ended_by_signals():
                self.report = write_report(
                    broker.url_text, self._clock, shop, folder=folder, port=broker.stream_port, progress=self._progress
                )
        except (BideError, OSError) as error:
            # The deliveries are measured: print their figures even if the report fails.
            self.failure = " ".join(with_options(str(error)).split())

    async def _clean_up(self) -> None:
        from bide.demo.run import remove

        with self._progress.phase("clean") as phase:
            removed = await remove(self._broker.url, self._clock, self._progress.plan, shop=self._shop)
            phase.note = f"{removed.queues} queues and {removed.exchanges} exchanges removed"
