"""The failed tasks of a write in the workload ``spark`` of ``bide check``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bide.check.workloads.spark import SparkWorkload


class Tracker:
    """Spark's reports about a job of two stages. The last one comes a few calls after the end of the job."""

    def __init__(self) -> None:
        self._calls = 0

    def getJobIdsForGroup(self, group: str) -> list[int]:  # noqa: N802 (Spark's name)
        return [4] if group == "run-1" else []

    def getJobInfo(self, job: int) -> SimpleNamespace:  # noqa: N802 (Spark's name)
        assert job == 4
        self._calls += 1
        return SimpleNamespace(stageIds=[7, 8], status="SUCCEEDED" if self._calls > 3 else "RUNNING")

    def getStageInfo(self, stage: int) -> SimpleNamespace:  # noqa: N802 (Spark's name)
        return SimpleNamespace(numFailedTasks=int(stage == 8 and self._calls > 3))


def test_failures_that_spark_reports_after_the_write_are_counted() -> None:
    stage: Any = None
    workload, tracker = SparkWorkload(stage), Tracker()
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=lambda: tracker))
    workload._session = session
    assert workload._failed_tasks("run-1", "confirmed") == 1
