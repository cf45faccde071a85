"""``bide pipeline``, with all its commands."""

from __future__ import annotations

import click

from bide.cli.pipeline.audit import audit
from bide.cli.pipeline.bundle import bundle
from bide.cli.pipeline.plan import plan
from bide.cli.pipeline.replay import replay
from bide.cli.pipeline.report import report
from bide.cli.pipeline.schedule import schedule

__all__ = ["pipeline"]


@click.group()
def pipeline() -> None:
    """Run jobs on many messages: in this process, or with Spark on this machine or, with --master, on a cluster.

    Small inputs of schedule, audit --once, plan, report and replay --audit need no Spark, and neither do plans from
    rates and most replays of an error queue: bide[pipeline] is enough. Other inputs need bide[spark] and Java 17 or
    later.
    """


for _command in (audit, bundle, plan, replay, report, schedule):
    pipeline.add_command(_command)
