"""Delayed Celery tasks that can be cancelled: schedules whose key is the task id."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from celery.app import control
from kombu import compression, entity, serialization

from bide.client.client import Client
from bide.client.sync import SyncClient, connect_sync
from bide.delay.protocol import ExchangeTarget, Target
from bide.errors import InvalidInputError, NoGateAnswerError

# Celery and kombu have no type annotations.
_Control: Any = vars(control)["Control"]
_dumps: Any = serialization.dumps
_compress: Any = compression.compress
_delivery_mode: Any = entity.maybe_delivery_mode


class KeyedTasks:
    """Stores and cancels tasks in the schedule log, through a client of bide with a connection of its own.

    Args:
        app: the application. Its setting ``bide_keyed`` allows keyed tasks.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._client: tuple[int, SyncClient] | None = None

    @property
    def allowed(self) -> bool:
        """Whether the application may have keyed tasks."""
        return bool(self._app.conf.get("bide_keyed"))

    def add(
        self,
        body: Any,
        *,
        key: str,
        due: datetime,
        target: Target,
        headers: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Store a task.

        Args:
            options: the options of :meth:`kombu.Producer.publish`.

        Raises:
            InvalidInputError: the application may not have keyed tasks.
            BideError: as :meth:`bide.Client.schedule`.
        """
        if not self.allowed:
            raise InvalidInputError(
                f"the task {key} is keyed, but keyed tasks are off: set app.conf.bide_keyed = True, and run a gate"
            )
        content_type, content_encoding, data = _dumps(body, options.get("serializer"))
        sent = dict(headers)
        if options.get("compression"):
            data, sent["compression"] = _compress(data, options["compression"])
        expiration = options.get("expiration")
        exchange, queue = (target, None) if isinstance(target, ExchangeTarget) else (None, target.queue)
        self.client.schedule(
            data,
            key=key,
            deliver_at=due,
            headers=sent,
            content_type=content_type,
            content_encoding=content_encoding,
            correlation_id=options.get("correlation_id"),
            reply_to=options.get("reply_to") or None,
            persistent=_delivery_mode(options.get("delivery_mode")) == entity.PERSISTENT_DELIVERY_MODE,
            priority=options.get("priority"),
            expiration=None if expiration is None else timedelta(seconds=expiration),
            to=queue,
            exchange=exchange.exchange if exchange else None,
            routing_key=exchange.routing_key if exchange else "",
        )

    def cancel(self, keys: Iterable[str]) -> None:
        """Cancel tasks that wait. Those that do not wait, and those without a key, are left alone.

        Raises:
            NoGateAnswerError: no gate answered in time; the tasks are cancelled when a gate runs again.
            BideError: as :meth:`bide.Client.cancel`, for at least one of the tasks; the others were tried too.
        """
        client = self.client
        client.wait_for(_cancel_all(client.client, keys))

    @property
    def client(self) -> SyncClient:
        """The client of this process."""
        with self._lock:
            if self._client is None or self._client[0] != os.getpid():
                self._client = os.getpid(), connect_sync(_url_of(self._app.conf.broker_write_url))
            return self._client[1]


class CancellingControl(_Control):  # type: ignore[misc]  # its package has no types
    """Celery's remote control, whose ``revoke`` also cancels keyed tasks."""

    def revoke(self, task_id: Any, *args: Any, **options: Any) -> Any:
        """See :meth:`celery.app.control.Control.revoke`.

        Raises:
            NoGateAnswerError: keyed tasks are on, and no gate answered in time; workers were notified.
        """
        replies = super().revoke(task_id, *args, **options)
        keyed = self.app.amqp.keyed
        if keyed.allowed:
            keyed.cancel([task_id] if isinstance(task_id, str) else task_id)
        return replies


async def _cancel_all(client: Client, keys: Iterable[str]) -> None:
    """Cancel schedules concurrently. Raises one of the errors after all have ended."""
    results = await asyncio.gather(*map(client.cancel, keys), return_exceptions=True)
    errors = [one for one in results if isinstance(one, BaseException)]
    if errors:
        # Prefer any other error to a missing answer, because it names a cause.
        raise next((one for one in errors if not isinstance(one, NoGateAnswerError)), errors[0])


def _url_of(urls: Any) -> str:
    """The URL for a client of bide; Celery's own default is the broker on this machine."""
    return urls if isinstance(urls, str) else ";".join(urls or ["amqp://"])
