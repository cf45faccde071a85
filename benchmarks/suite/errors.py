"""The benchmark's own error."""

from __future__ import annotations

from bide.errors import BideError


class BenchmarkError(BideError):
    """A case of the benchmark could not be measured."""
