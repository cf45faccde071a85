"""Dagster asset that schedules the reminders of a day once, however often it is made."""

# ruff: noqa: I002 (Dagster reads the annotation of the context, and accepts no postponed one)

import json
import os
import subprocess
from pathlib import Path

import dagster as dg

FOLDER = Path(os.environ.get("REMINDERS", "."))
"""The folder with a file for each day, such as ``2026-11-28.csv``, with the columns order_id, email and due."""

DAYS = dg.DailyPartitionsDefinition(start_date="2026-11-01", end_offset=1)


@dg.asset(partitions_def=DAYS, retry_policy=dg.RetryPolicy(max_retries=3, delay=60))  # type: ignore[untyped-decorator]  # not installed here
def reminders(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """The messages of one day. Its ledger has what was sent, so a repeated run sends the rest, or nothing."""
    day = context.partition_key
    command = ["bide", "pipeline", "schedule", str(FOLDER / f"{day}.csv"), "--json"]
    command += ["--to", "orders", "--at-column", "due", "--past", "send", "--ledger", str(FOLDER / "ledgers" / day)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    context.log.info(run.stderr)
    if run.returncode:
        # Exit code 2 is an invalid file or option, which stays the same at the next attempt.
        raise dg.Failure(run.stderr.strip(), allow_retries=run.returncode != 2)
    counts = json.loads(run.stdout)
    return dg.MaterializeResult(metadata={name: counts[name] for name in ("rows", "sent", "sent_before")})


definitions = dg.Definitions(assets=[reminders])
