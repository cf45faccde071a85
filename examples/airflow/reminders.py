"""Airflow DAG that schedules the reminders of each day once, however often it runs."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.sdk import dag, task
from airflow.sdk.exceptions import AirflowFailException

FOLDER = Path(os.environ.get("REMINDERS", "."))
"""The folder with a file for each day, such as ``2026-11-28.csv``, with the columns order_id, email and due."""


@task(retries=3, retry_delay=timedelta(minutes=1))  # type: ignore[untyped-decorator]  # not installed here
def schedule_day(ds: str | None = None) -> dict[str, int]:
    """Schedule the messages of one day. Its ledger has what was sent, so a repeated run sends the rest, or nothing.

    Args:
        ds: the day of the run, which Airflow passes.
    """
    assert ds is not None
    command = ["bide", "pipeline", "schedule", str(FOLDER / f"{ds}.csv"), "--json"]
    command += ["--to", "orders", "--at-column", "due", "--past", "send", "--ledger", str(FOLDER / "ledgers" / ds)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    print(run.stderr)
    if run.returncode == 2:
        # An invalid file or option, which stays the same at the next attempt.
        raise AirflowFailException(run.stderr.strip())
    if run.returncode:
        raise RuntimeError(run.stderr.strip())
    counts = json.loads(run.stdout)
    return {name: counts[name] for name in ("rows", "sent", "sent_before")}


@dag(schedule="@daily", start_date=datetime(2026, 11, 1, tzinfo=UTC), catchup=False)  # type: ignore[untyped-decorator]  # not installed here
def reminders() -> None:
    """The reminders of a day, on that day at midnight in UTC."""
    schedule_day()


reminders()
