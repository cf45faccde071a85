"""The consumer of Celery workers, without Celery's native delayed delivery."""

from __future__ import annotations

from typing import Any, ClassVar

from celery.worker import consumer

# Celery has no type annotations.
_Consumer: Any = vars(consumer)["Consumer"]


class ConsumerWithoutNativeDelay(_Consumer):  # type: ignore[misc]  # its package has no types
    """Celery's consumer, which does not declare the exchanges and queues of native delayed delivery."""

    class Blueprint(_Consumer.Blueprint):  # type: ignore[misc]  # its package has no types
        """Celery's startup steps, without ``DelayedDelivery``."""

        default_steps: ClassVar[list[str]] = [
            step for step in _Consumer.Blueprint.default_steps if not step.endswith(":DelayedDelivery")
        ]
