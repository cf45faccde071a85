"""RabbitMQ's rules in memory: exchanges, queues, dead letters, on a clock that moves when it is told to.

Nothing here does input or output, and nothing is random. :mod:`bide.testing` puts AMQP in front of it.
"""

from __future__ import annotations
