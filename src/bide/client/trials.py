"""Unconfirmed messages sent to another host, to find out whether that host confirms them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any, Final, Protocol

from bide.amqp.confirms import Awaited
from bide.amqp.connection import Connection
from bide.client.broker_state import BrokerState
from bide.client.failover import Trial
from bide.delay.protocol import Target

_MAX_TARGETS: Final = 5
"""The maximum number of targets to try. A single target may itself be the reason why messages are not confirmed."""


class Waiting(Protocol):
    """A message that is not confirmed yet. If another host confirms it, ``confirmed_elsewhere`` is set."""

    # PreparedMessage, or None for a message that cannot be sent.
    message: Any
    attempts: int
    confirmed_elsewhere: bool
    hops: int

    @property
    def mandatory(self) -> bool:
        """Whether the broker returns the message if no queue takes it."""


class Trials:
    """Chooses messages that wait for their confirms and sends them over a connection to another host.

    Args:
        state_on: returns a new :class:`BrokerState` for a connection, given the previous one.

    Attributes:
        sources: functions that return the waiting messages that may be sent again.
    """

    def __init__(self, state_on: Callable[[Connection, BrokerState | None], BrokerState]) -> None:
        self.sources = set[Callable[[], Iterable[Waiting]]]()
        self._state_on = state_on

    def of_targets(self) -> list[Trial]:
        """One trial for each of a few targets of the waiting messages."""
        targets = list(self._by_target())
        return [partial(self._is_confirmed, one) for one in random.sample(targets, min(len(targets), _MAX_TARGETS))]

    def _by_target(self) -> dict[tuple[Target, bool], list[Waiting]]:
        """The waiting messages, by target and by whether they are delayed."""
        found: dict[tuple[Target, bool], list[Waiting]] = {}
        for one in chain.from_iterable(source() for source in self.sources):
            message = one.message
            if message is not None and not one.confirmed_elsewhere:
                found.setdefault((message.target, message.delay is not None or message.due is not None), []).append(one)
        return found

    async def _is_confirmed(self, target: tuple[Target, bool], other: Connection) -> bool:
        """Send a waiting message over another connection, and return whether that host confirms it."""
        candidates = self._by_target().get(target)
        if candidates is None:
            return False
        waiting = random.choice(candidates)  # noqa: S311 (no secret)
        state = self._state_on(other, None)
        async with await other.channel(confirms=True) as channel:
            made = prepared = None
            while made is None:
                prepared = await state.prepare(waiting.message, prepared)
                if state.is_outdated:
                    state = self._state_on(other, state)
                    continue
                made = state.encode(
                    waiting.message, channel=channel.number, mandatory=waiting.mandatory, prepared=prepared
                )
            message, encoded = made
            waiting.message = message
            confirm = Awaited(encoded.exchange, encoded.routing_key, message.message_id, message.body, loop=other.loop)
            channel.post(encoded.frames, confirm)
            waiting.attempts += 1
            waiting.hops = encoded.hops
            await confirm.future
            waiting.confirmed_elsewhere = True
        return True
