"""Fixtures for pytest, which loads them wherever bide is installed.

``bide_broker`` is a new broker in memory for each test, and ``bide_clock`` is its clock. Override ``bide_release`` to
use the rules of another release.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from bide.testing import MemoryBroker
    from bide.testing.rules.clock import VirtualClock


@pytest.fixture(scope="session")
def bide_release() -> tuple[int, ...]:
    """The release of RabbitMQ whose rules the broker in memory follows."""
    return (4, 3)


@pytest.fixture
def bide_broker(bide_release: tuple[int, ...]) -> Iterator[MemoryBroker]:
    """A broker in memory: ``async with bide_broker.connect() as client``, or ``with bide_broker.connect_sync()``."""
    # Imported only here, because every run of pytest imports this module.
    from bide.testing import broker

    with broker(release=bide_release) as made:
        yield made


@pytest.fixture
def bide_clock(bide_broker: MemoryBroker) -> VirtualClock:
    """The clock of the broker in memory: ``bide_clock.advance("3d")``."""
    return bide_broker.clock
