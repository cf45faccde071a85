"""Endpoint: handlers for the messages of a queue, with retries and an error queue."""

from __future__ import annotations

from bide.endpoint.endpoint import Endpoint
from bide.endpoint.event import Event
from bide.endpoint.events import EventStream
from bide.endpoint.observer import Observer

__all__ = ["Endpoint", "Event", "EventStream", "Observer"]
