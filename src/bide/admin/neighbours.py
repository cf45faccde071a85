"""Detection of NServiceBus on a virtual host."""

from __future__ import annotations

from bide.admin.apply import exists
from bide.amqp.connection import Connection
from bide.delay.nservicebus import DELIVERY_EXCHANGES
from bide.topology import Exchange, Topology


async def uses_nservicebus(connection: Connection) -> bool:
    """Whether endpoints of NServiceBus use the virtual host.

    AMQP does not show which queues belong to them: a client can neither list bindings nor query one.

    Raises:
        BrokerError: the connection was lost.
    """
    for name in DELIVERY_EXCHANGES:
        if await exists(connection, Topology([Exchange(name)])):
            return True
    return False
