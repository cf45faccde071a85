"""Messages of a bulk publish whose queues and bindings are being declared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from bide.client.broker_state import BrokerState
from bide.client.bulk.in_flight import InFlightMessage
from bide.errors import BrokerError, ConnectionLostError, InvalidInputError

_FIRST_WAIT: Final = 0.05
"""Seconds to wait for declarations before other messages are sent; most declarations take less."""


class Preparing:
    """Prepares each message separately, so that a target that cannot be reached holds up only its own messages.

    Args:
        on_end: called when a message's preparation has ended.

    Attributes:
        size: the size of the messages' bodies in bytes.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.size = 0
        self._on_end = on_end
        self._by_task: dict[asyncio.Task[None], InFlightMessage] = {}
        self._ended: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        return len(self._by_task)

    def __iter__(self) -> Iterator[InFlightMessage]:
        return iter(self._by_task.values())

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`ended` would return any message."""
        return bool(self._ended)

    async def start(self, state: BrokerState, messages: Iterable[InFlightMessage]) -> None:
        """Prepare messages for a connection. Wait briefly for them, unless earlier ones are still being prepared."""
        is_first = not self._by_task
        tasks = []
        for in_flight in messages:
            task = asyncio.create_task(in_flight.prepare(state))
            tasks.append(task)
            self._by_task[task] = in_flight
            self.size += _body_size(in_flight)
            task.add_done_callback(self._on_done)
        if is_first:
            await asyncio.wait(tasks, timeout=_FIRST_WAIT)

    def ended(self) -> list[tuple[InFlightMessage, BaseException | None]]:
        """The messages whose preparation has ended since the last call, in order, each with its error or None."""
        tasks, self._ended = self._ended, []
        ended = []
        for task in tasks:
            in_flight = self._by_task.pop(task)
            self.size -= _body_size(in_flight)
            ended.append((in_flight, task.exception()))
        return ended

    def give_up(self) -> list[InFlightMessage]:
        """Stop preparing, and return the messages."""
        messages = list(self)
        for task in self._by_task:
            task.cancel()
        self._by_task, self._ended, self.size = {}, [], 0
        return messages

    async def close(self) -> None:
        """Stop preparing."""
        tasks = list(self._by_task)
        self.give_up()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            # Retrieve the exception, so that asyncio does not log it for a message that was given up.
            task.exception()
        if task in self._by_task:
            self._ended.append(task)
            self._on_end()


def _body_size(in_flight: InFlightMessage) -> int:
    assert in_flight.message is not None
    return len(in_flight.message.body)


def is_final_error(error: BaseException | None, state: BrokerState) -> bool:
    """Whether the error of a preparation is final for its message, unlike the error of a lost connection."""
    if isinstance(error, BrokerError):
        return state.connection.is_open and not isinstance(error, ConnectionLostError)
    return isinstance(error, InvalidInputError)
