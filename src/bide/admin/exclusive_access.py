"""Temporary exclusive access to a virtual host: other connections are closed and refused.

If a classic queue is deleted while a message is on its way to it, RabbitMQ confirms the message and drops it. So a
queue that publishers reach through the default exchange can be replaced without loss only while no publisher is
connected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from bide.amqp.connection import Connection
from bide.amqp.reply_codes import RESOURCE_LOCKED
from bide.errors import AccessRefusedError, BrokerError, InvalidInputError
from bide.management.api import ManagementApi
from bide.runtime.logs import logger
from bide.topology import Queue

log = logger(__name__)

_LIMIT: Final = "max-connections"
_PAUSE: Final = 0.1
"""Seconds between two checks whether other connections are closed, or another process has ended."""

_ROUNDS: Final = 200
_LOCK: Final = Queue("bide.exclusive-access", exclusive=True, durable=False)
"""The lock of the process that refuses connections. The broker deletes it with the connection, also after a kill."""

_LOCK_SECONDS: Final = 60.0
"""Seconds to wait for that process. It works for a second, or 30 s if publishers keep filling the queue."""


@asynccontextmanager
async def without_other_connections(connection: Connection, api: ManagementApi) -> AsyncIterator[None]:
    """Close all other connections to the virtual host, and refuse new ones in the block.

    When the block begins, messages that the broker has read from these connections are in their queues.

    Args:
        connection: the connection that stays.
        api: the management API, with a user who is an administrator.

    Raises:
        InvalidInputError: the virtual host has a limit on connections already, which would be lost; or another process
            closes its connections.
        BrokerError: other connections do not close.
    """
    vhost = connection.url.vhost
    if await _connection_limit(api, vhost) is not None:
        raise InvalidInputError(
            f"the virtual host {vhost!r} has a limit on connections, which would be lost: remove it for now with "
            "'rabbitmqctl clear_vhost_limits'"
        )
    async with _locked(connection):
        await api.call("PUT", "vhost-limits", vhost, _LIMIT, body={"value": 0})
        log.info("the virtual host %s refuses new connections", vhost)
        try:
            await _close_others(connection, api)
            yield
        finally:
            await asyncio.shield(_allow_connections(api, vhost))


@asynccontextmanager
async def _locked(connection: Connection) -> AsyncIterator[None]:
    try:
        async with await connection.channel() as channel:
            await channel.declare_queue(_LOCK)
    except AccessRefusedError as error:
        if error.reply_code != RESOURCE_LOCKED:
            raise
        raise InvalidInputError(
            f"another process is closing the connections to {connection.url.vhost!r}: wait for its end"
        ) from error
    try:
        yield
    finally:
        with suppress(BrokerError):  # the connection was lost, and the lock with it
            async with await connection.channel() as channel:
                await channel.delete_queue(_LOCK.name)


async def end_abandoned_access(api: ManagementApi, vhost: str) -> None:
    """Accept connections again if a process was killed in :func:`without_other_connections`.

    If that process still works, wait for its end.

    Raises:
        BrokerError: it does not end in time.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    is_reported = False
    while await _connection_limit(api, vhost) == 0:
        if await api.queue(vhost, _LOCK.name) is None:
            await _allow_connections(api, vhost)
            return
        if time.monotonic() > deadline:
            raise BrokerError(
                f"another process has been refusing the connections to {vhost!r} for {_LOCK_SECONDS:g} s: wait for its "
                "end, or stop it"
            )
        if not is_reported:
            log.info("the virtual host %s refuses connections: waiting for the end of the pause", vhost)
            is_reported = True
        await asyncio.sleep(_PAUSE)  # the broker reports no event when the lock is gone


async def _allow_connections(api: ManagementApi, vhost: str) -> None:
    if await _connection_limit(api, vhost) == 0:
        await api.call("DELETE", "vhost-limits", vhost, _LIMIT)
        log.info("the virtual host %s accepts connections again", vhost)


async def _connection_limit(api: ManagementApi, vhost: str) -> int | None:
    found = await api.call("GET", "vhost-limits", vhost)
    limits = [one["value"].get(_LIMIT) for one in found or [] if one.get("vhost") == vhost]
    return next((one for one in limits if one is not None), None)


async def _close_others(connection: Connection, api: ManagementApi) -> None:
    own = f":{connection.local_port} -> "
    if not any(own in name for name in await _connection_names(api, connection.url.vhost)):
        raise BrokerError(
            f"the broker does not list a connection from port {connection.local_port}, so bide cannot tell the others "
            "from its own: run this where no proxy is in between"
        )
    for _ in range(_ROUNDS):
        others = [name for name in await _connection_names(api, connection.url.vhost) if own not in name]
        if not others:
            return
        for name in others:
            await api.call("DELETE", "connections", name)
        await asyncio.sleep(_PAUSE)  # the broker reports no event when they are closed
    raise BrokerError(f"other connections to {connection.url.vhost!r} do not close: close them, and try again")


async def _connection_names(api: ManagementApi, vhost: str) -> list[str]:
    """The connections of all users of a virtual host. The broker lists connections by user without a delay."""
    users = {one["user"] for one in await api.call("GET", "vhosts", vhost, "permissions") or []}
    names = []
    for user in sorted(users):
        found = await api.connections_of(user)
        names += [one["name"] for one in found if one["vhost"] == vhost]
    return names
