"""Preparation of the topology that a worker process needs."""

from __future__ import annotations

from bide.admin.apply import apply, check_release, check_streams, exists
from bide.admin.settling import settle
from bide.amqp.connection import Connection
from bide.errors import AccessRefusedError, NotAppliedError
from bide.runtime.logs import logger
from bide.topology import Topology

log = logger(__name__)


async def prepare_topology(
    connection: Connection,
    topology: Topology,
    *,
    last: Topology,
    probes: Topology,
    prefix: str,
    declare: bool,
    missing: NotAppliedError,
) -> None:
    """Declare a topology, or use the existing one if the user may not declare it.

    Args:
        last: the part to declare last; see :func:`bide.admin.apply.apply`.
        probes: exchanges and queues of the topology. If they exist, the rest exists too.
        prefix: the start of the names of temporary queues.
        declare: whether to declare the topology; if not, missing items are an error.
        missing: the error to raise if something is missing and cannot be declared.

    Raises:
        NotAppliedError: *missing*.
        DeclarationMismatchError: an exchange or queue exists with other properties.
        UnsupportedBrokerError: the broker is too old, or streams are disabled.
        BrokerError: the broker refuses, or the connection was lost.
    """
    check_release(connection)
    if not declare:
        if not await exists(connection, probes):
            raise missing
        return
    try:
        await check_streams(connection, prefix=prefix)
        await apply(connection, topology, last=last)
        await settle(connection, prefix=prefix)
    except AccessRefusedError as error:
        if not await exists(connection, probes):
            raise missing from error
        log.info("using the existing %s unchanged: %s", prefix, error)
