"""An endpoint: handlers for the messages of one queue, with retries, and an error queue for what fails for good."""

from __future__ import annotations

from bide.endpoint.endpoint import Endpoint
from bide.endpoint.event import Event
from bide.endpoint.events import EventStream
from bide.endpoint.observer import Observer

__all__ = ["Endpoint", "Event", "EventStream", "Observer"]
