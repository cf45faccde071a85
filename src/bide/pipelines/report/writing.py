"""Files of a report: the page, the picture, and the headline as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from bide.errors import InvalidInputError

if TYPE_CHECKING:
    from bide.pipelines.report.figures import Figures


def write(figures: Figures, *, out: Path, svg: Path | None, title: str) -> None:
    """Write the page, and optionally the picture; existing files are replaced.

    Raises:
        InvalidInputError: a file cannot be written.
    """
    from bide.pipelines.report.page import page

    with _replacing(out) as file:
        file.write_text(page(figures, title=title), encoding="utf-8")
    if svg is not None:
        from bide.pipelines.charts.svg import document
        from bide.pipelines.report.picture import picture

        with _replacing(svg) as file:
            file.write_text(document(picture(figures, title=title), name="report"), encoding="utf-8")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file that replaces another file atomically at the end of the block."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise InvalidInputError(f"the file {path} cannot be written: {error.strerror}; name another") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def headline(figures: Figures) -> dict[str, Any]:
    """The figures of the headline, for JSON."""
    found: dict[str, Any] = {"folder": figures.folder, "missing": list(figures.missing)}
    if (head := figures.headline) is not None:
        found |= {
            "since": head.since and head.since.isoformat(),
            "until": head.until and head.until.isoformat(),
            **{name: getattr(head, name) for name in ("scheduled", "delivered", "pending", "overdue", "lost", "early")},
            **head.ended,
            **{f"{name}_ms": getattr(head, name) for name in ("p50", "p95", "p99", "max")},
        }
    if figures.failures is not None:
        found["failures"] = figures.failures.total
        found["failure_groups"] = len(figures.failures.groups) + figures.failures.others
    if figures.schedules is not None:
        total = figures.schedules.total
        found["schedules"] = {**total.outcomes, "pending": total.pending, "overdue": total.overdue}
    found["undecodable"] = figures.undecodable_total
    return found
