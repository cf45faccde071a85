"""Error queue of a replay: the keys of its messages, and the sending of chosen ones."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from bide.admin.locate import endpoints
from bide.amqp.url import BrokerUrl
from bide.client.sync import SyncClient, connect_sync
from bide.delay.allowed_targets import AllowedTargets
from bide.delay.protocol import QueueTarget
from bide.durations import from_microseconds, to_microseconds
from bide.error_queues import ErrorQueue, OperationResult
from bide.error_queues.operation import Progress
from bide.errors import TargetNotAllowedError, TargetNotFoundError
from bide.recoverability.failed import FailedMessage

KEY_DIGITS: Final = 32
"""Hexadecimal digits of the key of a message."""

_CLEANUP_TIMEOUT: Final = 30.0
"""Seconds for an interrupted replay to wait for confirms and record its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedIn:
    """An error queue or dead-letter queue, and the options of sending its messages.

    Attributes:
        url: the URL of the broker, with the password.
        queue: the name of the error queue.
        to: a queue to send all messages to; None for the queues on which they failed.
        management_url: see :class:`bide.error_queues.ErrorQueue`.
        record: write a record to the stream ``bide.audit``.
    """

    url: str = field(repr=False)
    queue: str
    to: str | None = None
    management_url: str | None = None
    record: bool = True

    def check(self, *, sends: bool = True) -> None:
        """Check the queues before the slow steps.

        Args:
            sends: whether the queue ``to`` has to exist.

        Raises:
            InvalidUrlError: the management URL is invalid.
            TargetNotFoundError: a queue does not exist.
            BrokerError: the broker cannot be reached, or refuses.
        """
        endpoints(BrokerUrl.parse(self.url), self.management_url, os.environ)
        missing = missing_queues(self.url, {self.queue, self.to or self.queue} if sends else [self.queue])
        if self.queue in missing:
            raise TargetNotFoundError(f"there is no queue {self.queue!r}: name another with queue=...")
        if missing:
            raise TargetNotFoundError(f"there is no queue {self.to!r} to send messages to: name another with to=...")


class ReplayCount(NamedTuple):
    """Messages with the same outcome.

    Attributes:
        outcome: ``sent`` to the queue, ``kept`` in the error queue for the reason, or ``gone`` from the error queue
            since they were chosen.
        queue: the target queue of sent messages.
        reason: why messages were kept.
        messages: the number of messages.
    """

    outcome: str
    queue: str | None
    reason: str | None
    messages: int


def missing_queues(url: str, queues: Iterable[str]) -> list[str]:
    """The queues that do not exist.

    Raises:
        BrokerError: the broker cannot be reached, or refuses.
    """
    with connect_sync(url, declare=False) as client:
        return [name for name in queues if not client.wait_for(client.client.exists(name))]


def refuse_disallowed_targets(queues: Iterable[str], allow: Iterable[str]) -> None:
    """Refuse to send messages to queues that no pattern allows.

    The check is needed because each client that may publish to an error queue chooses the header with the target.

    Args:
        allow: patterns of allowed queues; see :class:`bide.delay.allowed_targets.AllowedTargets`.

    Raises:
        TargetNotAllowedError: a queue is not allowed; nothing was sent.
        InvalidInputError: a pattern is empty.
    """
    allowed = AllowedTargets.of(allow)
    refused = [name for name in queues if not allowed.allow(QueueTarget(name))]
    if refused:
        raise TargetNotAllowedError(
            f"messages would go to queues that are not allowed ({', '.join(refused)}), and nothing was sent: allow "
            "these queues with allow=[...], or leave out their messages with where=..."
        )


def send_chosen(
    chosen: Sequence[tuple[str, int]],
    source: FailedIn,
    *,
    details: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    interrupted: Callable[[OperationResult], None] | None = None,
) -> list[ReplayCount]:
    """Send messages back when they are due; see :func:`bide.pipelines.replay.run.send`.

    Args:
        chosen: the keys of the messages, with due times in microseconds since the Unix epoch, in the order of the
            queue.
    """
    times_by_key: defaultdict[str, deque[int]] = defaultdict(deque)
    for key, due in chosen:
        times_by_key[key].append(due)
    if not times_by_key:
        return []
    total = len(chosen)
    first = from_microseconds(min(times[0] for times in times_by_key.values()))
    late = max(datetime.now(UTC) - first, timedelta(0))
    with connect_sync(source.url) as client:
        queue = ErrorQueue(client.client, source.queue, management_url=source.management_url, audit=source.record)
        times = _DueTimes(times_by_key, late)
        work = queue.replay(times.due, taken=times.take, to=source.to, total=total, details=details, progress=progress)
        try:
            result = _run_to_end(client, work)
        finally:
            if queue.interrupted is not None and interrupted is not None:
                interrupted(queue.interrupted)
    found = [
        *(ReplayCount("sent", name, None, count) for name, count in sorted(result.queues.items())),
        *(ReplayCount("kept", None, reason, count) for reason, count in sorted(result.kept.items())),
    ]
    if gone := total - result.done - sum(result.kept.values()):
        found.append(ReplayCount("gone", None, None, gone))
    return found


def key_of(message: FailedMessage) -> str:
    """The key of a message. It has the time of the failure, because a message may fail twice."""
    at = message.failed_at
    if at is not None and at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    failed_at = "-" if at is None else str(to_microseconds(at))
    parts = (message.id, failed_at, hashlib.sha256(message.body).hexdigest())
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:KEY_DIGITS]


def _run_to_end(client: SyncClient, work: Coroutine[Any, Any, OperationResult]) -> OperationResult:
    """Run a coroutine. On an interruption, cancel it, and wait until it has recorded its result."""
    ended = threading.Event()

    async def run() -> OperationResult:
        try:
            return await work
        finally:
            ended.set()

    future = client.submit(run())
    try:
        return future.result()
    except (KeyboardInterrupt, SystemExit):
        future.cancel()
        ended.wait(_CLEANUP_TIMEOUT)
        raise


class _DueTimes:
    """The due times of chosen messages, by key. Equal messages have the same key, with one due time for each."""

    def __init__(self, chosen: Mapping[str, deque[int]], late: timedelta) -> None:
        self._chosen = chosen
        self._late = late

    def due(self, message: FailedMessage) -> datetime | None:
        """The due time of a message; None if the message is not chosen."""
        times = self._chosen.get(key_of(message))
        return from_microseconds(times[0]) + self._late if times else None

    def take(self, message: FailedMessage) -> None:
        """Use up a due time: the next message with the same key has the next one."""
        self._chosen[key_of(message)].popleft()
