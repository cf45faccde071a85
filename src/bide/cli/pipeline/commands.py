"""All commands of ``bide pipeline``."""

from __future__ import annotations

from bide.cli.pipeline.audit import audit
from bide.cli.pipeline.bundle import bundle
from bide.cli.pipeline.group import pipeline
from bide.cli.pipeline.plan import plan
from bide.cli.pipeline.replay import replay
from bide.cli.pipeline.report import report

__all__ = ["pipeline"]

for _command in (audit, bundle, plan, replay, report):
    pipeline.add_command(_command)
