"""A timeout manager for an NServiceBus endpoint and its legacy senders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from bide.amqp.url import BrokerUrl
from bide.client.client import Client, connect
from bide.client.consumer import Consumer
from bide.client.message import Message
from bide.client.received_message import KEPT_PROPERTIES
from bide.client.set_aside import send_aside
from bide.delay.allowed_targets import AllowedTargets
from bide.delay.forwarding import set_aside_values
from bide.delay.nservicebus import NATIVE_MESSAGE_ID, format_timestamp, is_blank
from bide.delay.protocol import DelayInfrastructure, QueueTarget
from bide.delay.waiting import native_time
from bide.errors import BideError, InvalidInputError, PublishRefusedError, TargetNotFoundError, UnroutableError
from bide.messages.checker import MessageChecker
from bide.messages.outgoing import OutgoingMessage
from bide.messages.prepared import PreparedMessage, new_message_id
from bide.runtime.logs import logger
from bide.timeouts.database import Database
from bide.timeouts.due_rows import DueRows
from bide.timeouts.messages import DELIVER_AT, timeout_message
from bide.timeouts.tables import StoredTimeout, TimeoutTable, check_transactions, choose_tables, find_tables
from bide.timeouts.worker_thread import WorkerThread
from bide.topology import Queue, Topology

log = logger(__name__)

BATCH: Final = 100
"""Rows that are locked at a time. After a kill, at most this many can be sent twice."""

_EXPIRE: Final = "NServiceBus.Timeout.Expire"
_ROUTE_TO: Final = "NServiceBus.Timeout.RouteExpiredTimeoutTo"
_CLEAR: Final = "NServiceBus.ClearTimeouts"
_SAGA: Final = "NServiceBus.SagaId"

_RETRY_LEFT: Final = 60.0
"""Seconds after which rows that could not be sent are tried again."""


@dataclass(slots=True, kw_only=True)
class Dispatched:
    """The counts of a dispatcher.

    Attributes:
        sent: stored timeouts that were sent.
        delayed: timeouts from the queue whose publish into the delay infrastructure, or to their target, was confirmed.
        cleared: requests to delete the timeouts of a saga.
        set_aside: messages of the queue that could not be sent.
        left: failed attempts to send a stored timeout. The timeout stays in its table, and each retry counts again.
    """

    sent: int = 0
    delayed: int = 0
    cleared: int = 0
    set_aside: int = 0
    left: int = 0


class TimeoutDispatcher:
    """Does the work of an endpoint's timeout manager, until it is stopped.

    It sends the timeouts of the endpoint's tables when they are due. It receives the messages that legacy senders
    publish to the queue ``<endpoint>.Timeouts``, and publishes them with their delay, without storing them in the
    database. Several processes can do this for one endpoint.

    A row is deleted, or a received message acknowledged, only after the broker has confirmed the message that was sent
    for it. A kill in between repeats at most 100 rows and 100 messages. MariaDB and MySQL can end a deadlock between
    this deletion and that of a saga's timeouts by unlocking the rows. They are deleted again at once; in between,
    another process can send up to 100 of them a second time.

    Args:
        database_url: see :class:`bide.timeouts.TimeoutMigration`.
        url: the URL of the broker.
        infrastructure: the delay infrastructure; it is declared if it is missing.
        endpoint: the name of the endpoint, with its dots.
        allow: patterns of the targets that timeouts may have; see :class:`bide.Relay`. The dispatcher sends with its
            own permissions, and legacy senders name the target in a header.
        poll: how often to look for due timeouts.

    Attributes:
        done: the counts so far.
        set_aside: the queue for messages that cannot be sent, with the reason in the header ``bide-set-aside``.
    """

    def __init__(
        self,
        database_url: str,
        url: str | BrokerUrl,
        infrastructure: DelayInfrastructure,
        endpoint: str,
        *,
        allow: Iterable[str],
        poll: timedelta = timedelta(seconds=1),
    ) -> None:
        self.done = Dispatched()
        self.queue = f"{endpoint}.Timeouts"
        self.set_aside = f"bide.set-aside.{self.queue}"
        self._database_url = database_url
        self._url = url
        self._infrastructure = infrastructure
        self._endpoint = endpoint
        self._allowed = AllowedTargets.of(allow)
        self._poll = poll.total_seconds()
        self._stopping = asyncio.Event()
        self._consumer: Consumer | None = None
        self._checker = MessageChecker()
        self._logged = set[str]()
        self._failure: BaseException | None = None
        self._declaring_aside = asyncio.Lock()

    def stop(self) -> None:
        """Take no more timeouts, and end when the timeouts that were taken are finished."""
        self._stopping.set()
        if self._consumer is not None:
            self._consumer.stop()

    async def run(self) -> Dispatched:
        """Dispatch until :meth:`stop`.

        Raises:
            InvalidInputError: a URL cannot be read, the driver is not installed, or the name of the endpoint has
                underscores where its queue has dots.
            TimeoutStoreError: the database cannot be reached, refuses, or has no table of the endpoint.
            BrokerError: the broker cannot be reached, or refuses.
        """
        async with WorkerThread() as thread, connect(self._url, infrastructure=self._infrastructure) as client:
            database = await thread.run(Database, self._database_url)
            try:
                await self._check_name(client)
                tables = await thread.run(lambda: choose_tables(find_tables(database), [self._endpoint]))
                for table in tables:
                    await thread.run(check_transactions, database, table)
                due = [DueRows(database, table) for table in tables]
                work = [asyncio.create_task(self._send_due(client, thread, due))]
                if await client.exists(self.queue):
                    work.append(asyncio.create_task(self._receive(client, tables)))
                try:
                    await asyncio.wait(work, return_when=asyncio.FIRST_EXCEPTION)
                finally:
                    self.stop()
                    ends = await asyncio.gather(*work, return_exceptions=True)
                for end in ends:
                    if isinstance(end, BaseException):
                        raise end
            finally:
                await thread.run(database.close)
        return self.done

    async def _check_name(self, client: Client) -> None:
        """Refuse the name of a table, which has underscores where the name of the endpoint has dots.

        Raises:
            InvalidInputError: only a queue with dots in its name exists.
        """
        dotted = f"{self._endpoint.replace('_', '.')}.Timeouts"
        if dotted != self.queue and not await client.exists(self.queue) and await client.exists(dotted):
            raise InvalidInputError(f"the queue {dotted!r} exists: give the name of the endpoint with its dots")

    # -- stored timeouts

    async def _send_due(self, client: Client, thread: WorkerThread, tables: list[DueRows]) -> None:
        try_again = time.monotonic() + _RETRY_LEFT
        while not self._stopping.is_set():
            if max([await self._send_batch(client, thread, one) for one in tables]) == BATCH:
                continue
            # Only when no more rows are due, so that rows that cannot be sent do not hold up later ones.
            if time.monotonic() > try_again:
                for one in tables:
                    one.restart()
                self._logged.clear()
                try_again = time.monotonic() + _RETRY_LEFT
            try:
                await asyncio.wait_for(self._stopping.wait(), self._poll)
            except TimeoutError:
                pass

    async def _send_batch(self, client: Client, thread: WorkerThread, rows: DueRows) -> int:
        """Send due rows of a table, and return the number that was locked."""
        locked = await thread.run(rows.lock, BATCH)
        if locked:
            sent: list[Any] = []
            try:
                await self._send(client, locked, sent)
            finally:
                # Also after an error, so that confirmed timeouts are not sent again.
                await thread.run(rows.delete, sent)
                self.done.sent += len(sent)
        return len(locked)

    async def _send(self, client: Client, locked: list[StoredTimeout], sent: list[Any]) -> None:
        messages: list[OutgoingMessage] = []
        ids: list[Any] = []
        now, max_delay = datetime.now(UTC), self._infrastructure.max_delay
        for row in locked:
            try:
                messages.append(timeout_message(row, now=now, max_delay=max_delay, allowed=self._allowed))
                ids.append(row.id)
            except InvalidInputError as error:
                self._leave(row.id, error)
        async for result in client.publish_many(messages):
            identity = ids[result.position]
            if result.error is None:
                sent.append(identity)
            else:
                self._leave(identity, result.error)

    def _leave(self, identity: Any, error: BideError) -> None:
        reason = str(error)
        if reason not in self._logged:
            self._logged.add(reason)
            log.warning(
                "the timeout %s of %s stays in its table, like all others that fail for this reason: %s",
                identity,
                self._endpoint,
                reason,
            )
        self.done.left += 1

    # -- messages of legacy senders

    async def _receive(self, client: Client, tables: list[TimeoutTable]) -> None:
        async with (
            # Without the infrastructure, because that one would add the headers of a new message.
            connect(self._url) as self._aside,
            client.consume(self.queue, prefetch=BATCH) as messages,
        ):
            self._consumer = messages
            if self._stopping.is_set():
                return
            tasks = set[asyncio.Task[None]]()
            try:
                async for message in messages:
                    task = asyncio.create_task(self._accept(client, tables, message))
                    tasks.add(task)
                    task.add_done_callback(lambda done: self._on_accepted(tasks, done))
            finally:
                ends = await asyncio.gather(*tasks, return_exceptions=True)
            for end in ends:
                if isinstance(end, BaseException):
                    raise end
            if self._failure is not None:
                raise self._failure

    def _on_accepted(self, tasks: set[asyncio.Task[None]], done: asyncio.Task[None]) -> None:
        tasks.discard(done)
        if not done.cancelled() and (error := done.exception()) is not None:
            self._failure = self._failure or error
            self.stop()

    async def _accept(self, client: Client, tables: list[TimeoutTable], message: Message) -> None:
        headers, timeout = message.headers, None
        try:
            if str(headers.get(_CLEAR, "")).lower() == "true":
                await asyncio.to_thread(self._clear, tables, _saga_of(headers))
                self.done.cleared += 1
            else:
                timeout = self._checker.check(_delayed(message))
                self._allowed.check_delivery(timeout.target)
                await client.forward(timeout)
                self.done.delayed += 1
        except (InvalidInputError, TargetNotFoundError, UnroutableError, PublishRefusedError) as error:
            refused = isinstance(error, PublishRefusedError)
            if refused and timeout is not None and timeout.due is not None and timeout.due > client.now():
                # A delay queue refuses the message, not its target. It would refuse all others too, so they stay here.
                raise
            try:
                await self._put_aside(message, str(error))
            except InvalidInputError as second:
                # It has a value that bide can read and not write.
                log.warning(
                    "a message of %s stays there: %s; it cannot be set aside either: %s", self.queue, error, second
                )
                return
        await message.ack()

    def _clear(self, tables: list[TimeoutTable], saga: str) -> None:
        # Another connection, because a transaction of the first one may be open.
        with Database(self._database_url) as database:
            for table in tables:
                DueRows(database, table).clear_saga(saga)

    async def _put_aside(self, message: Message, reason: str) -> None:
        async with self._declaring_aside:
            await self._aside.declare(Topology(queues=[Queue.quorum(self.set_aside, {"x-overflow": "reject-publish"})]))
        received = {**message.raw.values, "headers": message.headers}

        def copy(text: str | None) -> PreparedMessage:
            return PreparedMessage(
                target=QueueTarget(self.set_aside),
                body=message.body,
                message_id=message.message_id or "",
                values=set_aside_values(received, text, user=self._aside.url.user),
                is_copy=True,
            )

        await send_aside(self._aside, reason, copy)
        log.warning("a message of %s was set aside in %s: %s", self.queue, self.set_aside, reason)
        self.done.set_aside += 1


def _delayed(message: Message) -> OutgoingMessage:
    """The timeout in a message of a legacy sender.

    Raises:
        InvalidInputError: the headers do not name a target and a due time.
    """
    headers = dict(message.headers)
    destination = headers.pop(_ROUTE_TO, None)
    if not isinstance(destination, str) or not destination:
        raise InvalidInputError(f"the message has no header {_ROUTE_TO}")
    due = native_time(_EXPIRE, headers.pop(_EXPIRE, None))
    headers.setdefault(DELIVER_AT, format_timestamp(due))
    properties = {name: getattr(message, name) for name in KEPT_PROPERTIES}
    properties["persistent"] = True
    if is_blank(headers.get(NATIVE_MESSAGE_ID)):
        # NServiceBus's headers are added to a message without this one.
        headers.pop(NATIVE_MESSAGE_ID, None)
    if is_blank(message.message_id):
        properties["message_id"] = headers.get(NATIVE_MESSAGE_ID) or new_message_id()
    return OutgoingMessage(message.body, to=destination, deliver_at=due, headers=headers, **properties)


def _saga_of(headers: Mapping[str, Any]) -> str:
    """The saga whose timeouts are to be deleted.

    Raises:
        InvalidInputError: the header is missing, or is not an id.
    """
    saga = headers.get(_SAGA)
    try:
        return str(UUID(saga))
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidInputError(f"the header {_SAGA} is {saga!r}: it must be the id of a saga") from error
