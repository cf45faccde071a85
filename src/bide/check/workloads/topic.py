"""Delayed messages to a topic exchange."""

from __future__ import annotations

from typing import ClassVar, Final

from bide.check.workloads.base import SingleMessageWorkload
from bide.topology import Binding, Exchange, Topology

_EXCHANGE: Final = "check.topic"
_KINDS: Final = ("order", "invoice")
_REGIONS: Final = ("eu", "us", "eu.north")


class TopicWorkload(SingleMessageWorkload):
    """Messages to a topic exchange with three queues: ``order.#``, ``*.eu`` and ``#``."""

    name: ClassVar = "topic"

    def topology(self) -> Topology:
        """The queues, the exchange and its bindings."""
        patterns = zip(self.queues, ("order.#", "*.eu", "#"), strict=True)
        return super().topology() | Topology(
            [Exchange(_EXCHANGE, "topic")],
            bindings=[Binding(_EXCHANGE, queue, pattern) for queue, pattern in patterns],
        )

    async def send_one(self, number: int) -> None:
        """Send a message."""
        kind, region = self.stage.rng.choice(_KINDS), self.stage.rng.choice(_REGIONS)
        orders, europe, everything = self.queues
        places = [
            everything,
            *([orders] if kind == "order" else []),
            *([europe] if region == "eu" else []),
        ]
        key = f"{kind}.{region}"
        draft = self.draft(number, routing_key=key)
        await self.publish(draft, places, exchange=_EXCHANGE, routing_key=key, delay=self.random_delay())
