"""Delayed delivery, retries and the whole life of a message on RabbitMQ, with nothing but what the broker has."""

from __future__ import annotations

# Not imported from typing: the command line handles Ctrl-C only after this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

    from bide import errors as errors
    from bide.amqp.url import BrokerUrl
    from bide.bulk.publish import BulkPublish
    from bide.bulk.sync import BulkPublisher
    from bide.client import Client, connect
    from bide.consumer import Consumer
    from bide.delay.celery import Celery
    from bide.delay.clock import Clock
    from bide.delay.infrastructure import DelayInfrastructure, DelayRoute, ExchangeTarget, QueueTarget
    from bide.delay.nservicebus import NServiceBus
    from bide.delay.waiting_hall import WaitingHall
    from bide.endpoint import Endpoint, EventStream, Observer
    from bide.errors import BideError
    from bide.letter import Letter
    from bide.message import Message
    from bide.outcome import Outcome, Report
    from bide.publisher import Receipt
    from bide.recoverability.decision import Discard, Park, RetryLater, RetryNow
    from bide.recoverability.failure import Failure
    from bide.recoverability.policy import BrokerRetry, Retry
    from bide.recoverability.schedule import exponential, linear
    from bide.relay import Relay
    from bide.sync import SyncClient, connect_sync
    from bide.topology import Binding, Exchange, Queue, Topology

# Imported when it is first used. So the command line can handle Ctrl-C before the bulk of the imports begins, and a
# script that only sends does not import endpoints.
_MODULES: Final = {
    "BrokerUrl": "bide.amqp.url",
    "BulkPublish": "bide.bulk.publish",
    "BulkPublisher": "bide.bulk.sync",
    "Client": "bide.client",
    "connect": "bide.client",
    "Consumer": "bide.consumer",
    "Celery": "bide.delay.celery",
    "Clock": "bide.delay.clock",
    "DelayInfrastructure": "bide.delay.infrastructure",
    "DelayRoute": "bide.delay.infrastructure",
    "ExchangeTarget": "bide.delay.infrastructure",
    "QueueTarget": "bide.delay.infrastructure",
    "NServiceBus": "bide.delay.nservicebus",
    "WaitingHall": "bide.delay.waiting_hall",
    "Endpoint": "bide.endpoint",
    "EventStream": "bide.endpoint",
    "Observer": "bide.endpoint",
    "BideError": "bide.errors",
    "Letter": "bide.letter",
    "Message": "bide.message",
    "Outcome": "bide.outcome",
    "Report": "bide.outcome",
    "Receipt": "bide.publisher",
    "Discard": "bide.recoverability.decision",
    "Park": "bide.recoverability.decision",
    "RetryLater": "bide.recoverability.decision",
    "RetryNow": "bide.recoverability.decision",
    "Failure": "bide.recoverability.failure",
    "BrokerRetry": "bide.recoverability.policy",
    "Retry": "bide.recoverability.policy",
    "exponential": "bide.recoverability.schedule",
    "linear": "bide.recoverability.schedule",
    "Relay": "bide.relay",
    "SyncClient": "bide.sync",
    "connect_sync": "bide.sync",
    "Binding": "bide.topology",
    "Exchange": "bide.topology",
    "Queue": "bide.topology",
    "Topology": "bide.topology",
}

__all__ = [
    "BideError",
    "Binding",
    "BrokerRetry",
    "BrokerUrl",
    "BulkPublish",
    "BulkPublisher",
    "Celery",
    "Client",
    "Clock",
    "Consumer",
    "DelayInfrastructure",
    "DelayRoute",
    "Discard",
    "Endpoint",
    "EventStream",
    "Exchange",
    "ExchangeTarget",
    "Failure",
    "Letter",
    "Message",
    "NServiceBus",
    "Observer",
    "Outcome",
    "Park",
    "Queue",
    "QueueTarget",
    "Receipt",
    "Relay",
    "Report",
    "Retry",
    "RetryLater",
    "RetryNow",
    "SyncClient",
    "Topology",
    "WaitingHall",
    "connect",
    "connect_sync",
    "exponential",
    "linear",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "errors":
        return importlib.import_module("bide.errors")
    if (module := _MODULES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
