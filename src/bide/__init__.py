"""Delayed delivery, retries and the whole life of a message on RabbitMQ, with nothing but what the broker has."""

from __future__ import annotations

import importlib
import typing

from bide.amqp.url import BrokerUrl
from bide.client.client import Client, connect
from bide.client.consumer import Consumer
from bide.client.message import Message
from bide.client.publisher import Receipt
from bide.client.sync import SyncClient, connect_sync
from bide.delay.celery import Celery
from bide.delay.clock import Clock
from bide.delay.nservicebus import NServiceBus
from bide.delay.protocol import DelayInfrastructure, DelayRoute, ExchangeTarget, QueueTarget
from bide.delay.waiting_hall import WaitingHall
from bide.errors import BideError
from bide.topology import Binding, Exchange, Queue, Topology

if typing.TYPE_CHECKING:
    from bide.client.bulk.publish import BulkPublish
    from bide.client.bulk.sync import BulkPublisher
    from bide.client.publish_result import Outcome, Report
    from bide.endpoint import Endpoint, EventStream, Observer
    from bide.messages.outgoing import Letter
    from bide.recoverability.decision import Discard, Park, RetryLater, RetryNow
    from bide.recoverability.failure import Failure
    from bide.recoverability.policy import BrokerRetry, Retry
    from bide.recoverability.schedule import exponential, linear
    from bide.relay import Relay

# What a script that only sends has no use for is imported when it is asked for.
_LATER: typing.Final = {
    "BulkPublish": "bide.client.bulk.publish",
    "BulkPublisher": "bide.client.bulk.sync",
    "Endpoint": "bide.endpoint",
    "EventStream": "bide.endpoint",
    "Observer": "bide.endpoint",
    "Letter": "bide.messages.outgoing",
    "Relay": "bide.relay",
    "Outcome": "bide.client.publish_result",
    "Report": "bide.client.publish_result",
    "Discard": "bide.recoverability.decision",
    "Park": "bide.recoverability.decision",
    "RetryLater": "bide.recoverability.decision",
    "RetryNow": "bide.recoverability.decision",
    "Failure": "bide.recoverability.failure",
    "BrokerRetry": "bide.recoverability.policy",
    "Retry": "bide.recoverability.policy",
    "exponential": "bide.recoverability.schedule",
    "linear": "bide.recoverability.schedule",
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


def __getattr__(name: str) -> typing.Any:
    if (module := _LATER.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
