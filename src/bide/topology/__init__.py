"""Topologies: exchanges, queues and bindings as values, without a broker.

This package has the values. :mod:`~bide.topology.validation` finds what RabbitMQ would refuse,
:mod:`~bide.topology.routing` computes where a message goes, and :mod:`~bide.topology.rendering` draws topologies.
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
