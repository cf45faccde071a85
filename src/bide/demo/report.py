"""Audit and report of the demonstration."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bide.errors import InvalidInputError

if TYPE_CHECKING:
    from bide.delay.clock import Clock
    from bide.demo.progress import Progress
    from bide.demo.workload import Shop

TITLE: Final = "bide demo"

_MARK: Final = ".bide-demo"
_TABLES: Final = "tables"
_CONFIGURATION: Final = {
    # With so little data, compiling queries and starting many tasks would take longer than the work itself.
    "spark.sql.codegen.wholeStage": "false",
    "spark.default.parallelism": "2",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


class ReportFolder:
    """The folder of the report.

    Args:
        folder: a new or empty folder, or that of an earlier demonstration, whose files are replaced.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.page = folder / "report.html"
        self.picture = folder / "report.svg"
        self.tables = folder / _TABLES

    def create(self) -> None:
        """Create the folder.

        Raises:
            InvalidInputError: the folder contains other files, or cannot be created.
        """
        mark = self.folder / _MARK
        try:
            if self.folder.exists() and not mark.exists() and any(self.folder.iterdir()):
                raise InvalidInputError(
                    f"the folder {self.folder} contains files that 'bide demo' did not write: name another folder "
                    "with --into"
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            raise InvalidInputError(
                f"the folder {self.folder} cannot be created: {error.strerror}. Name another folder with --into, or "
                "leave out the report with --no-report"
            ) from error

    def clear(self) -> None:
        """Delete the files of an earlier demonstration."""
        for path in (self.page, self.picture):
            path.unlink(missing_ok=True)
        if self.tables.exists():
            shutil.rmtree(self.tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """Paths and headline of the report.

    Attributes:
        page: the path of the HTML page.
        picture: the path of the report as SVG.
        tables: the folder of the audit.
        summary: the headline in sentences.
        failed: a short text about the failures; empty without any.
        headline: the figures of the headline, for JSON.
    """

    page: Path
    picture: Path
    tables: Path
    summary: str
    failed: str
    headline: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "page": str(self.page),
            "picture": str(self.picture),
            "tables": str(self.tables),
            "headline": self.headline,
        }


def write_report(
    url: str, clock: Clock, shop: Shop, *, folder: ReportFolder, port: int | None, progress: Progress
) -> DemoReport:
    """Audit taps and events, and write the report.

    Args:
        url: the URL of the broker, with the password.
        folder: a folder that has been created.
        port: the port of the stream protocol; None for the default.

    Raises:
        BideError: the streams cannot be read, or Spark fails.
    """
    from bide.pipelines import session

    folder.clear()
    with session.session(None, name=TITLE, configuration=_CONFIGURATION, time_zone="UTC") as spark:
        with progress.phase("audit") as phase, session.spark_errors():
            from bide.pipelines.audit.folder import Folder
            from bide.pipelines.audit.run import run
            from bide.pipelines.audit.sources import find_sources

            done = run(spark, find_sources(url, [clock], events=[shop.events], port=port), Folder(str(folder.tables)))
            phase.note = ", ".join(f"{count:,} {table}" for table, count in done.rows.items())
        with progress.phase("report") as phase, session.spark_errors():
            from bide.pipelines.report import content
            from bide.pipelines.report.collecting import collect
            from bide.pipelines.report.spark_tables import spark_tables
            from bide.pipelines.report.writing import headline, write

            with spark_tables(spark, str(folder.tables)) as tables:
                figures = collect(tables)
            write(figures, out=folder.page, svg=folder.picture, title=TITLE)
            phase.note = "a page and a picture"
    return DemoReport(
        page=folder.page,
        picture=folder.picture,
        tables=folder.tables,
        summary=content.summary(figures),
        failed=content.failed(figures),
        headline=headline(figures),
    )
