"""A RabbitMQ in memory, with a clock that moves when the test says so.

``async with bide.testing.broker() as b`` gives one, ``b.connect(...)`` a client that is the real one, and
``b.clock.advance("3d")`` lets three days pass in no time::

    async with bide.testing.broker() as b, b.connect() as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders")]))
        await client.publish("pay, please", to="reminders", delay="3d")
        b.clock.advance("3d")
        message = await anext(client.consume("reminders"))

It follows the rules of RabbitMQ, which the tests of bide compare with real brokers; what it has no rules for raises
:class:`bide.errors.NotModelledError`. docs/testing.md says what that is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bide.testing.memory_broker import MemoryBroker, broker

__all__ = ["MemoryBroker", "broker"]


def __getattr__(name: str) -> Any:
    # Imported when it is first used: every run of pytest imports this package, for its plugin.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module("bide.testing.memory_broker")
    globals().update({one: getattr(module, one) for one in __all__})
    return globals()[name]
