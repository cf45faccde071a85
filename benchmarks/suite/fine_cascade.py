"""A binary cascade like NServiceBus, with a unit of 10 ms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from typing import Final

from bide.delay.cascade import RESOLUTION, BoundTarget, Cascade, CascadeInfrastructure
from bide.delay.protocol import HEADER_TO, QueueTarget, Target, round_up
from bide.delay.routes import DelayRoute, Step
from bide.errors import UnsupportedTargetError
from bide.topology import Argument, Binding, Queue, Topology

_TIMES_FINER: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class FineCascade(CascadeInfrastructure):
    """Delays of 0 to 2^levels - 1 units of 10 ms, to queues.

    Its levels are quorum queues that dead-letter at least once, as those of NServiceBus.RabbitMQ are in version 2.
    """

    levels: int

    @property
    def name(self) -> str:
        """What the layout is called."""
        return "fine-cascade"

    @property
    def resolution(self) -> timedelta:
        """10 ms."""
        return RESOLUTION / _TIMES_FINER

    @property
    def cascade(self) -> Cascade:
        """The levels as a binary cascade in seconds."""
        return _cascade(self.levels)

    def topology(self) -> Topology:
        """That of a cascade in seconds, with shorter waits."""
        coarse = CascadeInfrastructure.topology(self)
        return replace(coarse, queues=tuple(_finer(queue) for queue in coarse.queues))

    def route(self, delay: timedelta, target: Target, *, message_id: str = "") -> DelayRoute:
        """The way to a queue; zero goes through the lowest level, as with NServiceBus."""
        units = round_up(delay, self.resolution, maximum=self.max_delay)
        route = self.cascade.route(units, self._bound(target), headers={HEADER_TO: str(target)})
        return replace(route, delay=units * self.resolution)

    def steps(self, delay: timedelta, target: Target) -> tuple[Step, ...]:
        """Every exchange on the way of a message, in order."""
        units = round_up(delay, self.resolution, maximum=self.max_delay)
        coarse = self.cascade.steps(units, self._bound(target), target)
        return tuple(replace(step, delay=step.delay / _TIMES_FINER) for step in coarse)

    def _bound(self, target: Target) -> BoundTarget:
        address = _address(target)
        binding = Binding(self.delivery_exchange, address, self.cascade.exact_key(address))
        return BoundTarget(address=address, routed_to=address, requires=Topology(bindings=[binding]))


@lru_cache(maxsize=4)
def _cascade(levels: int) -> Cascade:
    return Cascade(
        family="bench.fine",
        level_names=tuple(f"bench.fine-level-{level:02}" for level in range(levels)),
        delivery="bench.fine-delivery",
        queue_arguments={
            "x-queue-type": "quorum",
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        },
    )


def _finer(queue: Queue) -> Queue:
    ttl = queue.arguments["x-message-ttl"]
    assert isinstance(ttl, int)
    arguments: dict[str, Argument] = {**queue.arguments, "x-message-ttl": ttl // _TIMES_FINER}
    return replace(queue, arguments=arguments)


def _address(target: Target) -> str:
    if not isinstance(target, QueueTarget) or target.isolated:
        raise UnsupportedTargetError(f"{target} is not a plain queue: this cascade delivers to queues only")
    return target.queue
