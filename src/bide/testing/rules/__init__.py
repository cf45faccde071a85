"""RabbitMQ's rules in memory: exchanges, queues and dead letters, on a virtual clock.

This package does no input or output and uses no random numbers. :mod:`bide.testing` adds AMQP to it.
"""

from __future__ import annotations
