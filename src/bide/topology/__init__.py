"""Exchanges, queues and bindings as values: check, draw and route without a broker.

The values themselves are here; :mod:`~bide.topology.validation` finds what RabbitMQ would refuse,
:mod:`~bide.topology.routing` where a message goes, :mod:`~bide.topology.rendering` draws.
"""

from __future__ import annotations

from bide.topology.model import (
    DEFAULT_EXCHANGE,
    PREDECLARED_EXCHANGES,
    Argument,
    Arguments,
    Binding,
    Change,
    DestinationType,
    Exchange,
    Queue,
    Topology,
    TopologyDiff,
)

__all__ = [
    "DEFAULT_EXCHANGE",
    "PREDECLARED_EXCHANGES",
    "Argument",
    "Arguments",
    "Binding",
    "Change",
    "DestinationType",
    "Exchange",
    "Queue",
    "Topology",
    "TopologyDiff",
]
