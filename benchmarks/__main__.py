"""``python -m benchmarks``: the benchmark's command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.suite.command import bench
from bide.cli.app import run


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return the exit code; see ``bide.cli``."""
    return run(arguments, command=bench, program="python -m benchmarks")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
