"""The report as files."""

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
    """Write the page, and the picture where one is wanted, in the place of older ones.

    Raises:
        InvalidInputError: a file cannot be written.
    """
    from bide.pipelines.report.page import page

    with _replacing(out) as beside:
        beside.write_text(page(figures, title=title), encoding="utf-8")
    if svg is not None:
        from bide.pipelines.charts.svg import document
        from bide.pipelines.report.picture import picture

        with _replacing(svg) as beside:
            beside.write_text(document(picture(figures, title=title), name="report"), encoding="utf-8")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write in place of another: whoever reads that meanwhile sees the old one or the new one."""
    beside = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        yield beside
        beside.replace(path)
    except OSError as error:
        raise InvalidInputError(f"the file {path} cannot be written: {error.strerror}; name another") from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def headline(figures: Figures) -> dict[str, Any]:
    """The figures of the headline, for JSON."""
    found: dict[str, Any] = {"folder": figures.folder, "missing": list(figures.missing)}
    if (head := figures.headline) is not None:
        found |= {
            "since": head.since and head.since.isoformat(),
            "until": head.until and head.until.isoformat(),
            **{name: getattr(head, name) for name in ("scheduled", "delivered", "pending", "overdue", "lost", "early")},
            **{f"{name}_ms": getattr(head, name) for name in ("p50", "p95", "p99", "max")},
        }
    if figures.failures is not None:
        found["failures"] = figures.failures.total
        found["failure_groups"] = len(figures.failures.groups) + figures.failures.others
    found["undecodable"] = figures.undecodable_total
    return found
