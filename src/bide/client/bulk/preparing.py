"""Messages of a bulk publish whose queues and bindings are being declared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from bide.client.broker_state import BrokerState
from bide.client.bulk.in_flight import InFlightMessage
from bide.errors import BrokerError, ConnectionLostError, InvalidInputError

_MOMENT: Final = 0.05
"""Seconds to wait for what messages need before others go on without them: most of it is declared in less."""


class Preparing:
    """Prepares each message by itself, so that a target that cannot be reached holds up only its own messages.

    Args:
        on_end: called when a message's preparation has ended.

    Attributes:
        size: bytes of the bodies of the messages.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.size = 0
        self._on_end = on_end
        self._parcels: dict[asyncio.Task[None], InFlightMessage] = {}
        self._ended: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        return len(self._parcels)

    def __iter__(self) -> Iterator[InFlightMessage]:
        return iter(self._parcels.values())

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`ended` would return something."""
        return bool(self._ended)

    async def start(self, session: BrokerState, parcels: Iterable[InFlightMessage]) -> None:
        """Prepare messages for a session, and wait a moment for them, unless others take longer than that already."""
        is_first = not self._parcels
        tasks = []
        for parcel in parcels:
            task = asyncio.create_task(_prepare(session, parcel))
            tasks.append(task)
            self._parcels[task] = parcel
            self.size += _size(parcel)
            task.add_done_callback(self._end)
        if is_first:
            await asyncio.wait(tasks, timeout=_MOMENT)

    def ended(self) -> list[tuple[InFlightMessage, BaseException | None]]:
        """The messages whose preparation has ended since the last call, in order, with the errors that ended it."""
        tasks, self._ended = self._ended, []
        ended = []
        for task in tasks:
            parcel = self._parcels.pop(task)
            self.size -= _size(parcel)
            ended.append((parcel, task.exception()))
        return ended

    def give_up(self) -> list[InFlightMessage]:
        """Stop preparing, and return the messages."""
        parcels = list(self)
        for task in self._parcels:
            task.cancel()
        self._parcels, self._ended, self.size = {}, [], 0
        return parcels

    async def close(self) -> None:
        """Stop preparing."""
        tasks = list(self._parcels)
        self.give_up()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            # So asyncio does not log the error of a message that was given up meanwhile.
            task.exception()
        if task in self._parcels:
            self._ended.append(task)
            self._on_end()


def _size(parcel: InFlightMessage) -> int:
    assert parcel.message is not None
    return len(parcel.message.body)


def is_verdict(error: BaseException | None, session: BrokerState) -> bool:
    """Whether the error of a preparation is the last word on its message, and not that of a broken connection."""
    if isinstance(error, BrokerError):
        return session.connection.is_open and not isinstance(error, ConnectionLostError)
    return isinstance(error, InvalidInputError)


async def _prepare(session: BrokerState, parcel: InFlightMessage) -> None:
    assert parcel.message is not None
    parcel.preparation = await session.prepare(parcel.message, parcel.preparation)
    parcel.prepared_in = session
