"""The dramatiq actors of the worker process."""

from __future__ import annotations

import os
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.middleware import Middleware

from benchmarks.suite.arrivals import URL_VARIABLE, Arrivals
from benchmarks.suite.clients.dramatiq import ACTOR
from benchmarks.suite.setup import TARGET

_arrivals = Arrivals.of_environment()


class _Ready(Middleware):
    """Records that the worker is ready for tasks."""

    def after_worker_boot(self, broker: Any, worker: Any) -> None:
        _arrivals.tell_ready()


broker = RabbitmqBroker(url=os.environ[URL_VARIABLE], confirm_delivery=True)
broker.add_middleware(_Ready())
dramatiq.set_broker(broker)


@dramatiq.actor(actor_name=ACTOR, queue_name=TARGET)
def begin(due: float, body: str) -> None:
    """The task: write down that it begins."""
    _arrivals.add(due)
