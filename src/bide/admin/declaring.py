"""Declarations, bindings and deletions, retried if a busy broker refuses them.

RabbitMQ aborts a declaration that takes too long, for example on a busy machine or while a cluster elects leaders, and
closes the channel or the connection. A moment later it accepts the same call. The following replies are retried. They
are internal errors (541) unless the table gives a code:

==================================================================  ========  ==================================
answer                                                              releases  where in rabbitmq-server
==================================================================  ========  ==================================
Cannot declare quorum queue ...: cluster_not_formed, or             3.10-4.3  rabbit_quorum_queue:
{erpc,timeout}, or {erpc,noconnection}                                        declare_queue_error/4
Could not declare quorum queue ... because the metadata store       4.0-4.3   rabbit_quorum_queue:start_cluster/1
operation timed out
Cannot declare a queue ... on node ... (a stream)                   3.10-4.3  rabbit_stream_queue:create_stream/1
Could not declare stream ..., Could not set leader PID for ...      4.0-4.3   rabbit_stream_queue:create_stream/1
failed to declare exchange ... because the operation timed out      4.0-4.3   rabbit_channel:handle_method/6
failed to delete exchange ... due to a timeout                      4.0-4.3   rabbit_channel:handle_method/6
Could not add (or remove) binding due to timeout                    4.0-4.3   rabbit_channel:binding_action/4
The operation to delete the queue from the metadata store timed     4.0-4.3   rabbit_amqqueue:delete_with/6
out
Cannot delete queue ... on node ... (a stream)                      3.10-4.3  rabbit_stream_queue:delete/4
no text: the process of the channel died, for example of an         3.10-4.3  rabbit_binary_generator:
unexpected timeout of Mnesia, Khepri or Ra                                    map_exception
access to vhost ... refused ...: vhost ... is down                  3.10-4.3  rabbit_reader:is_vhost_alive/2
404 home node ... of durable queue ... is down or inaccessible      3.10-4.3  rabbit_amqqueue:priv_absent/4
404 queue ... process is stopped by supervisor                      3.10-4.3  rabbit_amqqueue:priv_absent/4
404 failed to perform operation on queue ... due to timeout, or     3.10-4.3  rabbit_amqqueue:priv_absent/4
...: its leader (3.10: master replica) may be stopping ...
320 broker forced connection closure with reason 'shutdown'         3.10-4.3  rabbit_reader:handle_other/2
no broker answers: the node is starting; since 4.0 the start can    4.0-4.3   rabbit_khepri:setup/1
fail with timeout_waiting_for_leader in the log
==================================================================  ========  ==================================

Other replies are errors at once: a refused permission (403), other properties or a limit on queues (406), an exchange
type without its plugin (503, 406), and three internal errors: a feature flag that is off, a deprecated feature that is
not permitted, and a channel interceptor.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import timedelta
from itertools import islice
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.errors import BrokerError, BrokerUnreachableError, ClosedError, ConnectionLostError, TargetNotFoundError
from bide.runtime.backoff import Backoff
from bide.runtime.logs import logger

log = logger(__name__)

RETRY_FOR: Final = timedelta(seconds=30)
"""How long to keep retrying after a refusal; each success resets the time."""

_MAX_IN_FLIGHT: Final = 256
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0

_PERMANENT: Final = ("feature flag", "deprecated", "Interceptor")
"""Words in the reply texts of internal errors that are not retried."""

_TEMPORARY: Final = (
    "is down or inaccessible",
    "stopped by supervisor",
    "due to timeout",
    "may be stopping or being demoted",
)
"""Words in the reply text of a 404 for a queue that exists but cannot be reached."""

_Item = TypeVar("_Item")


def is_temporary(error: BaseException) -> bool:
    """Whether a refusal is temporary: the broker may accept the call a moment later, maybe on a new connection."""
    if isinstance(error, TargetNotFoundError):
        return any(text in str(error) for text in _TEMPORARY)
    if isinstance(error, BrokerUnreachableError):
        return not isinstance(error.__cause__, ssl.SSLCertVerificationError)
    return isinstance(error, ConnectionLostError) and not any(text in str(error) for text in _PERMANENT)


class Declaring:
    """Calls of channels, such as ``Channel.bind``, retried if the broker refuses them temporarily.

    A retry follows a randomised pause with backoff, and has fewer calls in flight. If the connection is lost, another
    connection is opened, and calls that were answered are not repeated. The first connection is used as long as it is
    open, because a node of RabbitMQ 4 sees its own declarations at once, and other nodes see them a moment later.

    Args:
        connection: the first connection. It is not closed.
        retry_for: how long to keep retrying after a refusal; each success resets the time.
        can_move: whether to continue over another connection.
    """

    def __init__(self, connection: Connection, *, retry_for: timedelta = RETRY_FOR, can_move: bool = True) -> None:
        self._connection = connection
        self._replacement: Connection | None = None
        self._channel: Channel | None = None
        self._retry_for = retry_for.total_seconds()
        self._can_move = can_move
        self._batch_limit = _MAX_IN_FLIGHT
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self._refused_at: list[float] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            if self._channel is not None:
                await self._channel.close()
            if self._replacement is not None:
                await self._replacement.close()
            return
        if self._channel is not None:
            self._channel.abandon()
        if self._replacement is not None:
            self._replacement.give_up(ClosedError("the connection was closed"))

    async def each(
        self,
        call: Callable[[Channel, _Item], asyncio.Future[Any]],
        items: Iterable[_Item],
        *,
        skip_missing: bool = False,
    ) -> AsyncIterator[tuple[_Item, Any]]:
        """Make a call for each item, in order, and yield the item with the broker's reply.

        Args:
            skip_missing: skip items that do not exist instead of raising an error.

        Raises:
            BrokerError: the broker refuses permanently, or for too long.
        """
        pending = deque(items)
        size = _MAX_IN_FLIGHT
        while pending:
            batch = list(islice(pending, min(size, self._batch_limit)))
            for item, result in zip(batch, await self._results(call, batch), strict=False):
                if skip_missing and isinstance(result, TargetNotFoundError) and not is_temporary(result):
                    # The broker closed the channel and answers no later call of the batch. These calls are repeated,
                    # at first one by one, because more items may be missing.
                    pending.popleft()
                    size = 1
                    break
                if isinstance(result, BaseException):
                    await self._pause_after(result)
                    break
                pending.popleft()
                self._backoff.reset()
                self._refused_at = []
                yield item, result
            else:
                size = min(size * 4, _MAX_IN_FLIGHT)

    async def all(self, call: Callable[[Channel, _Item], asyncio.Future[Any]], items: Iterable[_Item]) -> list[Any]:
        """Make a call for each item, and return the replies.

        Raises:
            BrokerError: as for :meth:`each`.
        """
        return [reply async for _, reply in self.each(call, items)]

    async def _results(self, call: Callable[[Channel, _Item], asyncio.Future[Any]], batch: list[_Item]) -> list[Any]:
        """The replies or errors of a batch; one error if no channel can be opened."""
        try:
            channel = await self._open_channel()
        except BrokerError as error:
            return [error]
        # Every call ends: when the channel closes, the first call fails with the reason, and the others after it.
        return await asyncio.gather(*(call(channel, item) for item in batch), return_exceptions=True)

    async def _open_channel(self) -> Channel:
        if self._channel is None or not self._channel.is_open:
            if self._connection.lost.done() and isinstance(closed := self._connection.lost.result(), ClosedError):
                raise closed
            if not self._connection.is_open and self._can_move:
                self._connection = self._replacement = await Connection.open(self._connection.url)
            self._channel = await self._connection.channel()
        return self._channel

    async def _pause_after(self, error: BaseException) -> None:
        """Pause before the next attempt, or raise the error if a retry is pointless."""
        # The time counts from the first refusal, because the broker may take a minute to refuse.
        self._refused_at.append(self._connection.loop.time())
        seconds = self._refused_at[-1] - self._refused_at[0]
        if not is_temporary(error):
            raise error
        if not (self._can_move or self._connection.is_open):
            log.warning("the broker refused a declaration temporarily: %s", error)
            raise error
        assert isinstance(error, BrokerError)
        if seconds >= self._retry_for:
            text = f"{error}; it was tried {len(self._refused_at)} times within {seconds:.0f} s"
            raise type(error)(text, reply_code=error.reply_code) from error
        pause = min(self._backoff.next(), self._retry_for - seconds)
        self._batch_limit = max(self._batch_limit // 4, 1)
        log.warning("retrying in %.1f s: %s", pause, error)
        await asyncio.sleep(pause)  # the backoff, within the time for retries
