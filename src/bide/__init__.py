"""Delayed delivery, retries and error queues on RabbitMQ, without a plugin or a scheduler."""

from __future__ import annotations

# Importing typing would delay the command line, which handles Ctrl-C only after it has imported this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

    from bide import errors as errors
    from bide.amqp.url import BrokerUrl
    from bide.client.bulk.publish import BulkPublish
    from bide.client.bulk.sync import BulkPublisher
    from bide.client.client import Client, connect
    from bide.client.consumer import Consumer
    from bide.client.message import Message
    from bide.client.message_sync import SyncMessage
    from bide.client.publish_result import PublishResult, PublishSummary
    from bide.client.publisher import Receipt
    from bide.client.schedule_result import FilterResult, Scheduled, ScheduleOutcome, ScheduleResult, ScheduleView
    from bide.client.sync import SyncClient, connect_sync
    from bide.delay.celery import Celery
    from bide.delay.clock import Clock
    from bide.delay.message_type import MessageType
    from bide.delay.nservicebus import NServiceBus
    from bide.delay.protocol import DelayInfrastructure, ExchangeTarget, QueueTarget
    from bide.delay.routes import DelayRoute
    from bide.delay.waiting_hall import WaitingHall
    from bide.endpoint import Endpoint, EventStream, Observer
    from bide.errors import BideError
    from bide.gate import Gate
    from bide.messages.outgoing import OutgoingMessage
    from bide.recoverability.decision import Discard, Park, RetryLater, RetryNow
    from bide.recoverability.failure import Failure
    from bide.recoverability.retry_delays import exponential, linear
    from bide.recoverability.retry_policy import BrokerRetry, Retry
    from bide.relay import Relay
    from bide.schedules.outgoing import OutgoingSchedule
    from bide.topology import Binding, Exchange, Queue, Topology

# Modules are imported on first use. The command line can therefore handle Ctrl-C before most imports begin, and a
# script that only publishes does not import endpoints.
_MODULES: Final = {
    "BrokerUrl": "bide.amqp.url",
    "BulkPublish": "bide.client.bulk.publish",
    "BulkPublisher": "bide.client.bulk.sync",
    "Client": "bide.client.client",
    "connect": "bide.client.client",
    "Consumer": "bide.client.consumer",
    "Message": "bide.client.message",
    "SyncMessage": "bide.client.message_sync",
    "PublishResult": "bide.client.publish_result",
    "PublishSummary": "bide.client.publish_result",
    "Receipt": "bide.client.publisher",
    **dict.fromkeys(
        ("FilterResult", "Scheduled", "ScheduleOutcome", "ScheduleResult", "ScheduleView"),
        "bide.client.schedule_result",
    ),
    "SyncClient": "bide.client.sync",
    "connect_sync": "bide.client.sync",
    "Celery": "bide.delay.celery",
    "Clock": "bide.delay.clock",
    "MessageType": "bide.delay.message_type",
    "NServiceBus": "bide.delay.nservicebus",
    "DelayInfrastructure": "bide.delay.protocol",
    "DelayRoute": "bide.delay.routes",
    "ExchangeTarget": "bide.delay.protocol",
    "QueueTarget": "bide.delay.protocol",
    "WaitingHall": "bide.delay.waiting_hall",
    "Endpoint": "bide.endpoint",
    "EventStream": "bide.endpoint",
    "Observer": "bide.endpoint",
    "BideError": "bide.errors",
    "Gate": "bide.gate",
    "OutgoingMessage": "bide.messages.outgoing",
    "Discard": "bide.recoverability.decision",
    "Park": "bide.recoverability.decision",
    "RetryLater": "bide.recoverability.decision",
    "RetryNow": "bide.recoverability.decision",
    "Failure": "bide.recoverability.failure",
    "BrokerRetry": "bide.recoverability.retry_policy",
    "Retry": "bide.recoverability.retry_policy",
    "exponential": "bide.recoverability.retry_delays",
    "linear": "bide.recoverability.retry_delays",
    "Relay": "bide.relay",
    "OutgoingSchedule": "bide.schedules.outgoing",
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
    "FilterResult",
    "Gate",
    "Message",
    "MessageType",
    "NServiceBus",
    "Observer",
    "OutgoingMessage",
    "OutgoingSchedule",
    "Park",
    "PublishResult",
    "PublishSummary",
    "Queue",
    "QueueTarget",
    "Receipt",
    "Relay",
    "Retry",
    "RetryLater",
    "RetryNow",
    "ScheduleOutcome",
    "ScheduleResult",
    "ScheduleView",
    "Scheduled",
    "SyncClient",
    "SyncMessage",
    "Topology",
    "WaitingHall",
    "connect",
    "connect_sync",
    "exponential",
    "linear",
]


if not TYPE_CHECKING:
    # Type checkers would take any name for a name of this module.

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
