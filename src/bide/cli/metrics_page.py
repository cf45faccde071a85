"""Metrics page of a process: the option ``--metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from bide.cli.output import echo
from bide.errors import InvalidInputError

if TYPE_CHECKING:
    from bide.observability.metrics import Metrics

metrics_option: Final = click.option(
    "--metrics",
    "metrics_port",
    type=click.IntRange(0, 65_535),
    metavar="PORT",
    help="Loopback port for Prometheus metrics; 0 chooses a free one.",
)


def make_metrics(port: int | None) -> Metrics | None:
    """Metrics for :func:`served`; None without a port.

    Raises:
        InvalidInputError: the extra ``bide[metrics]`` is not installed.
    """
    if port is None:
        return None
    try:
        from bide.observability.metrics import Metrics
    except ImportError as error:
        raise InvalidInputError(f"--metrics: {error}") from error
    return Metrics()


@contextmanager
def served(metrics: Metrics | None, port: int | None) -> Iterator[None]:
    """Serve the metrics during a block, and print their address."""
    if metrics is None or port is None:
        yield
        return
    with metrics.serve(port) as page:
        echo(f"metrics on {page.url}", err=True)
        yield
