"""A RabbitMQ in memory for tests, with a clock that only the test moves.

``async with bide.testing.broker() as b`` creates a broker, ``b.connect(...)`` connects the normal client to it, and
``b.clock.advance("3d")`` lets three days pass immediately::

    async with bide.testing.broker() as b, b.connect() as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders")]))
        await client.publish("pay, please", to="reminders", delay="3d")
        b.clock.advance("3d")
        message = await anext(client.consume("reminders"))

The broker follows RabbitMQ's rules, which bide's tests compare with real brokers. Features without such rules raise
:class:`bide.errors.NotModelledError`; docs/testing.md lists them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bide.testing.memory_broker import MemoryBroker, broker

__all__ = ["MemoryBroker", "broker"]


def __getattr__(name: str) -> Any:
    # Imported on first use, because every run of pytest imports this package for its plugin.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module("bide.testing.memory_broker")
    globals().update({one: getattr(module, one) for one in __all__})
    return globals()[name]
