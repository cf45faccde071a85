"""Audit what the demonstration did, and draw the report of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.util import find_spec
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
    # So few rows are counted before their queries would be compiled, and by a few tasks.
    "spark.sql.codegen.wholeStage": "false",
    "spark.default.parallelism": "2",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


class ReportPlace:
    """The folder of the report.

    Args:
        folder: new, empty, or one of an earlier demonstration, whose files are replaced.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.page = folder / "report.html"
        self.picture = folder / "report.png"
        self.tables = folder / _TABLES

    def begin(self) -> None:
        """Make it.

        Raises:
            InvalidInputError: it has other things in it, or cannot be made.
        """
        mark = self.folder / _MARK
        try:
            if self.folder.exists() and not mark.exists() and any(self.folder.iterdir()):
                raise InvalidInputError(
                    f"the folder {self.folder} has things that are of no 'bide demo': name another with --into"
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            raise InvalidInputError(
                f"the folder {self.folder} cannot be made: {error.strerror}; name another with --into, or none with "
                "--no-report"
            ) from error

    def clear(self) -> None:
        """Remove what an earlier demonstration has left."""
        for path in (self.page, self.picture):
            path.unlink(missing_ok=True)
        if self.tables.exists():
            shutil.rmtree(self.tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The report.

    Attributes:
        picture: the same as PNG; None where Pillow is missing.
        tables: the folder of the audit.
        summary: its headline, in sentences.
        failed: what failed, in a few words.
        headline: its figures, for JSON.
    """

    page: Path
    picture: Path | None
    tables: Path
    summary: str
    failed: str
    headline: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "page": str(self.page),
            "picture": self.picture and str(self.picture),
            "tables": str(self.tables),
            "headline": self.headline,
        }


def tell(url: str, clock: Clock, shop: Shop, *, place: ReportPlace, port: int | None, progress: Progress) -> Told:
    """Read taps and events into tables, and draw them.

    Args:
        url: of the broker, with the password.
        place: which was begun.
        port: of the broker's stream protocol, None for the usual one.

    Raises:
        BideError: the streams cannot be read, or Spark fails.
    """
    from bide.pipelines import session

    place.clear()
    picture = place.picture if find_spec("PIL") is not None else None
    with session.session(None, name=TITLE, configuration=_CONFIGURATION, time_zone="UTC") as spark:
        with progress.phase("audit") as phase, session.spark_errors():
            from bide.pipelines.audit.folder import Folder
            from bide.pipelines.audit.run import run
            from bide.pipelines.audit.sources import find_sources

            done = run(spark, find_sources(url, [clock], events=[shop.events], port=port), Folder(str(place.tables)))
            phase.note = ", ".join(f"{count:,} {table}" for table, count in done.rows.items())
        with progress.phase("report") as phase, session.spark_errors():
            from bide.pipelines.report import content
            from bide.pipelines.report.collecting import collect
            from bide.pipelines.report.writing import headline, write

            figures = collect(spark, str(place.tables))
            write(figures, out=place.page, png=picture, title=TITLE)
            phase.note = "a page" if picture is None else "a page and a picture"
    return Told(
        page=place.page,
        picture=picture,
        tables=place.tables,
        summary=content.summary(figures),
        failed=content.failed(figures),
        headline=headline(figures),
    )
