"""The lock of a migration: an exclusive queue on the virtual host that is emptied."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.reply_codes import RESOURCE_LOCKED
from bide.amqp.url import BrokerUrl
from bide.errors import AccessRefusedError, BrokerError, InvalidInputError, MigrationRunningError, TargetNotFoundError
from bide.topology import Queue

_PREFIX: Final = "bide.migration."


class MigrationLock:
    """Prevents a second migration from emptying the same queues.

    Args:
        name: the name of the exchange that identifies the infrastructure or log that is emptied.
        what: a description of it, for errors.
    """

    def __init__(self, name: str, what: str) -> None:
        self._queue = Queue(f"{_PREFIX}{name}", exclusive=True, durable=False)
        self._what = what

    async def take(self, channel: Channel) -> None:
        """Declare the queue. The broker deletes it when the connection ends, also if the process is killed.

        Raises:
            MigrationRunningError: another connection holds the lock.
        """
        try:
            await channel.declare_queue(self._queue)
        except AccessRefusedError as error:
            if error.reply_code != RESOURCE_LOCKED:
                raise
            raise MigrationRunningError(
                f"a migration of {self._what} runs on this virtual host already: wait for its end, or stop it"
            ) from error

    async def release(self, connection: Connection) -> None:
        """Delete the queue now. The broker would do it a moment after the connection is closed."""
        with suppress(BrokerError):  # the connection was lost, and the lock with it
            async with await connection.channel() as channel:
                await channel.delete_queue(self._queue.name)

    async def refuse_same(self, url: BrokerUrl) -> None:
        """Refuse a second URL that leads to the virtual host on which the lock was taken.

        Raises:
            InvalidInputError: the lock exists on that virtual host too.
        """
        connection = await Connection.open(url)
        try:
            channel = await connection.channel()
            await channel.declare_queue(self._queue, passive=True)
        except TargetNotFoundError:
            return
        except AccessRefusedError as error:
            if error.reply_code != RESOURCE_LOCKED:
                raise
            raise InvalidInputError(
                f"messages cannot go from {self._what} into the same names on {url}: either both URLs lead to the same "
                "virtual host, or another migration empties the second one. Give another URL, or wait for that "
                "migration"
            ) from error
        finally:
            await connection.close()
