"""Pipelined, confirmed publishing to queues and exchanges that may be missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, Final, Generic, TypeVar

from bide.admin.apply import exists
from bide.amqp.connection import Connection
from bide.client.pipelined_sender import PipelinedMessage, PipelinedSender
from bide.errors import AccessRefusedError, BideError, TargetNotFoundError, UnroutableError
from bide.runtime.bounded_cache import BoundedCache
from bide.topology import DEFAULT_EXCHANGE, Exchange, Topology

_EXCHANGE_KNOWN_FOR: Final = 30.0
"""Seconds for which an exchange counts as existing after a check."""

_Message = TypeVar("_Message", bound=PipelinedMessage)


class TargetSender(Generic[_Message]):
    """Sends messages to targets that may be missing.

    A publish to an exchange that is missing, or that refuses this user, makes the broker close the channel, and the
    other messages on that channel are sent again. So exchanges are checked first, and messages to queues have a channel
    of their own.

    Args:
        safe_exchanges: exchanges that need no check, besides the default exchange.
        on_result: called once for each message, as by :class:`PipelinedSender`; with a ``TargetNotFoundError`` if its
            exchange does not exist.
        failed: called with the error when no channel can be opened, or the check of an exchange fails.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        safe_exchanges: Collection[str] = (),
        on_result: Callable[[_Message, BideError | None], None],
        failed: Callable[[BideError], None],
    ) -> None:
        self._connection = connection
        self._safe = frozenset({DEFAULT_EXCHANGE, *safe_exchanges})
        self._on_result = on_result
        self._failed = failed
        self._to_queues = PipelinedSender[_Message](connection, on_result=on_result, failed=failed)
        self._to_exchanges = PipelinedSender[_Message](connection, on_result=self._on_exchange_result, failed=failed)
        self._known = BoundedCache[str, float]()
        self._checking: dict[str, list[_Message]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def put(self, message: _Message) -> None:
        """Send a message as soon as possible."""
        exchange = message.exchange
        if exchange in self._safe:
            self._to_queues.put(message)
        elif self._known.get(exchange, 0.0) > self._connection.loop.time():
            self._to_exchanges.put(message)
        elif exchange in self._checking:
            self._checking[exchange].append(message)
        else:
            self._checking[exchange] = [message]
            task = asyncio.create_task(self._check(exchange))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Send no more messages, and report no more results."""
        self._to_queues.close()
        self._to_exchanges.close()
        for task in self._tasks:
            task.cancel()

    async def _check(self, exchange: str) -> None:
        missing: BideError | None = None
        try:
            if not await exists(self._connection, Topology([Exchange(exchange)])):
                missing = TargetNotFoundError(f"the exchange {exchange!r} does not exist")
        except AccessRefusedError as error:
            # Since 4.3, RabbitMQ does not tell a user without any permission for an exchange whether it exists.
            missing = error
        except BideError as error:
            self._failed(error)
            return
        if missing is None:
            self._known[exchange] = self._connection.loop.time() + _EXCHANGE_KNOWN_FOR
        for message in self._checking.pop(exchange):
            if missing is None:
                self._to_exchanges.put(message)
            else:
                self._on_result(message, missing)

    def _on_exchange_result(self, message: _Message, error: BideError | None) -> None:
        if isinstance(error, AccessRefusedError | TargetNotFoundError):
            self._known.pop(message.exchange, None)
        self._on_result(message, error)


def undeliverable_reason(error: BideError, target: str, *, exchange: str, routing_key: str) -> str:
    """Why a message cannot reach its target, for the undeliverable queue.

    Args:
        error: the result of the message.
        target: the target as text: ``q:<queue>`` or ``x:<exchange>``.
        exchange: the exchange that the message was published to.
    """
    if not isinstance(error, UnroutableError):
        return str(error)
    key = f" with the routing key {routing_key!r}" if exchange else ""
    return f"no queue takes messages for {target}{key}"
