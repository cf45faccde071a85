"""Matching of topic patterns, as in the routing model."""

from __future__ import annotations

from bide.topology import Binding, Exchange
from bide.topology.exchange_types import RoutedMessage, binding_table


def topic_matches(pattern: str, routing_key: str) -> bool:
    """Whether a topic exchange sends ``routing_key`` along a binding with key ``pattern``."""
    table = binding_table(Exchange("", "topic"), [Binding("", "", pattern)])
    return bool(table.matches(RoutedMessage((routing_key,), {})))
