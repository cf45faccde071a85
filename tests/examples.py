"""The number of generated examples of a property test."""

from __future__ import annotations

from hypothesis import settings


def examples(share: float) -> settings:
    """Settings with this multiple of the examples of the profile, which are fewer in ``make check``."""
    assert settings.default is not None
    return settings(max_examples=max(round(share * settings.default.max_examples), 1))
