"""Delayed delivery, retries and the whole life of a message on RabbitMQ, with nothing but what the broker has."""

from __future__ import annotations

from bide.amqp.url import BrokerUrl
from bide.client import Client, connect
from bide.consumer import Consumer
from bide.delay.celery import Celery
from bide.delay.clock import Clock
from bide.delay.infrastructure import DelayInfrastructure, DelayRoute, ExchangeTarget, QueueTarget
from bide.delay.nservicebus import NServiceBus
from bide.errors import BideError
from bide.message import Message
from bide.publisher import Receipt
from bide.sync import SyncClient, connect_sync
from bide.topology import Binding, Exchange, Queue, Topology

__all__ = [
    "BideError",
    "Binding",
    "BrokerUrl",
    "Celery",
    "Client",
    "Clock",
    "Consumer",
    "DelayInfrastructure",
    "DelayRoute",
    "Exchange",
    "ExchangeTarget",
    "Message",
    "NServiceBus",
    "Queue",
    "QueueTarget",
    "Receipt",
    "SyncClient",
    "Topology",
    "connect",
    "connect_sync",
]
