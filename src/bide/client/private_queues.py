"""Queues that belong to one client, declared again on each of its connections."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from bide.admin.apply import apply, names_in
from bide.amqp.connection import Connection
from bide.amqp.reply_codes import RESOURCE_LOCKED
from bide.errors import AccessRefusedError
from bide.topology import Binding, Queue, Topology

_DECLARATION: Final = "x-bide-declaration"
"""The argument that distinguishes a binding from that of an earlier connection."""
_PAUSE: Final = 0.1
"""Seconds until a queue that the previous connection still locks is declared again."""


class PrivateQueues:
    """The exclusive queues of a client, and their bindings.

    The broker deletes an exclusive queue with its connection, and lets no other connection use it. So they belong to
    the receiving connection, and are declared before each use of a new one.
    """

    def __init__(self) -> None:
        self._topologies: dict[str, Topology] = {}
        self._declared: dict[str, Connection] = {}

    def __contains__(self, queue: str) -> bool:
        return queue in self._topologies

    def add(self, bindings: Iterable[tuple[str, str]]) -> str:
        """Choose the name of a new queue, which :meth:`ensure` declares."""
        # A queue whose name the broker chose ("amq.gen-...") cannot be declared again with that name.
        name = f"bide.private.{os.urandom(16).hex()}"
        self._topologies[name] = Topology(
            queues=[Queue(name, durable=False, exclusive=True)],
            bindings=[Binding(exchange, name, routing_key) for exchange, routing_key in bindings],
        )
        return name

    def forget(self, queue: str) -> None:
        """Forget a queue that could not be declared."""
        self._topologies.pop(queue, None)

    async def ensure(self, connection: Connection, queue: str) -> None:
        """Declare the queue on this connection, if it is private and was not declared there.

        Raises:
            BrokerError: the broker refuses, or the connection was lost.
        """
        topology = self._topologies.get(queue)
        if topology is None or self._declared.get(queue) is connection:
            return
        # The routes of a topic exchange to the queue of the previous connection may be deleted after the bindings of
        # this one were made (rabbit_exchange_type_topic.erl of 4.0), and would take equal bindings with them.
        own = {_DECLARATION: os.urandom(8).hex()}
        topology = replace(topology, bindings=tuple(replace(one, arguments=own) for one in topology.bindings))
        while True:
            try:
                await apply(connection, topology, external=names_in(topology), can_move=False)
            except AccessRefusedError as error:
                if error.reply_code != RESOURCE_LOCKED:
                    raise
                # The broker has not noticed yet that the previous connection is lost.
                await asyncio.sleep(_PAUSE)
            else:
                self._declared[queue] = connection
                return
