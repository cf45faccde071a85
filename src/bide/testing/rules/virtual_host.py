"""A virtual host: exchanges and queues by name, and routing between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from bide.errors import InvalidInputError
from bide.testing.rules.classic import ClassicQueue
from bide.testing.rules.clock import Timer, VirtualClock
from bide.testing.rules.declarations import check_exchange, check_queue, compare_exchange, compare_queue
from bide.testing.rules.errors import access_refused, locked, not_found, precondition_failed
from bide.testing.rules.exchange import BrokerExchange
from bide.testing.rules.message import Reason, StoredMessage
from bide.testing.rules.queue import BrokerQueue, Release
from bide.testing.rules.quorum import QuorumQueue
from bide.testing.rules.stream import StreamQueue
from bide.topology import DEFAULT_EXCHANGE, Binding, Exchange, Queue
from bide.topology.routing import PREDECLARED

DEFAULT_PREFETCH: Final = 32
"""The maximum number of unconfirmed dead letters of a queue that dead-letters at least once; RabbitMQ's default."""


REPLY_TO: Final = "amq.rabbitmq.reply-to"
"""The pseudo-queue of direct reply-to: its consumer receives replies without declaring a queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The result of publishing a message.

    Attributes:
        routed: whether it was routed to a queue.
        stored: whether every queue accepted it.
    """

    routed: bool
    stored: bool


class VirtualHost:
    """A virtual host.

    Args:
        name: its name.
        clock: the virtual clock.
        release: the release of RabbitMQ whose rules apply.
        dead_letter_prefetch: see ``DEFAULT_PREFETCH``.
    """

    def __init__(
        self, name: str, clock: VirtualClock, *, release: Release, dead_letter_prefetch: int = DEFAULT_PREFETCH
    ) -> None:
        self.name = name
        self.clock = clock
        self.release = release
        self._prefetch = dead_letter_prefetch
        self._exchanges = {one.name: BrokerExchange(one) for one in PREDECLARED}
        self._queues: dict[str, BrokerQueue] = {}
        self._pending: deque[Callable[[], None]] = deque()
        self._is_busy = False
        self._reply_numbers = count(1)

    # -- exchanges and queues

    def declare_exchange(self, exchange: Exchange, *, passive: bool = False) -> None:
        """Declare an exchange, or check that it exists if *passive*.

        Raises:
            BrokerError: the exchange is missing, differs, or is invalid.
        """
        found = self._exchanges.get(exchange.name)
        if exchange.name == DEFAULT_EXCHANGE or (found is None and exchange.name.startswith("amq.") and not passive):
            raise access_refused(f"exchange name '{exchange.name}' contains reserved prefix 'amq.*'")
        if found is None:
            if passive:
                raise not_found("exchange", exchange.name, self.name)
            check_exchange(exchange)
            self._exchanges[exchange.name] = BrokerExchange(exchange)
        elif not passive:
            compare_exchange(exchange, found.definition, self.name)

    def declare_queue(self, queue: Queue, *, owner: object, passive: bool = False) -> BrokerQueue:
        """Declare a queue, or check that it exists if *passive*.

        Args:
            owner: the connection that declares it.

        Raises:
            BrokerError: the queue is missing, differs, is exclusive to another connection, or is invalid.
        """
        found = self._queues.get(queue.name)
        if found is not None:
            self._check_owner(found, owner)
            if not passive:
                compare_queue(queue, found.definition, self.name, release=self.release)
            found.mark_used()
            return found
        if passive:
            raise not_found("queue", queue.name, self.name)
        if queue.name.startswith("amq."):
            raise access_refused(f"queue name '{queue.name}' contains reserved prefix 'amq.*'")
        check_queue(queue, release=self.release)
        made: BrokerQueue
        if queue.type == "quorum":
            made = QuorumQueue(queue, self, prefetch=self._prefetch)
        elif queue.type == "stream":
            made = StreamQueue(queue, self)
        else:
            made = ClassicQueue(queue, self, owner=owner if queue.exclusive else None)
        self._queues[queue.name] = made
        return made

    def make_reply_queue(self) -> str:
        """Create the queue for direct replies to one channel, deleted with its consumer. Returns its name."""
        name = f"{REPLY_TO}.{next(self._reply_numbers)}"
        self._queues[name] = ClassicQueue(Queue(name, durable=False, auto_delete=True), self, owner=None)
        return name

    def queue(self, name: str, *, owner: object | None = None) -> BrokerQueue:
        """A queue by name.

        Args:
            owner: the connection that uses it; None may use every queue.

        Raises:
            BrokerError: the queue does not exist, or is exclusive to another connection.
        """
        found = self._queues.get(name)
        if found is None:
            raise not_found("queue", name, self.name)
        if owner is not None:
            self._check_owner(found, owner)
        return found

    @property
    def queues(self) -> Sequence[BrokerQueue]:
        """All queues."""
        return list(self._queues.values())

    def delete_queue(self, name: str, *, owner: object, if_unused: bool = False, if_empty: bool = False) -> int:
        """Delete a queue, if it exists; returns the number of deleted messages.

        Raises:
            BrokerError: the queue is in use or not empty, and *if_unused* or *if_empty* is set.
        """
        found = self._queues.get(name)
        if found is None:
            return 0
        self._check_owner(found, owner)
        if if_unused and len(found.consumers):
            raise precondition_failed(f"queue '{name}' in vhost '{self.name}' in use")
        if if_empty and found.message_count:
            raise precondition_failed(f"queue '{name}' in vhost '{self.name}' is not empty")
        return self._remove(found)

    def delete_exchange(self, name: str, *, if_unused: bool = False) -> None:
        """Delete an exchange with its bindings, if it exists.

        Raises:
            BrokerError: the exchange is predeclared, or has bindings and *if_unused* is set.
        """
        if name == DEFAULT_EXCHANGE or name.startswith("amq."):
            raise access_refused(f"deletion of system exchange '{name}' in vhost '{self.name}' not allowed")
        found = self._exchanges.get(name)
        if found is None:
            return
        if if_unused and found.bindings:
            raise precondition_failed(f"exchange '{name}' in vhost '{self.name}' in use")
        del self._exchanges[name]
        self._unbind_all("exchange", name)

    def remove_queue(self, queue: BrokerQueue) -> None:
        """See :class:`bide.testing.rules.queue.Surroundings`."""
        self._remove(queue)

    def remove_owned(self, owner: object) -> None:
        """Delete the exclusive queues of a lost connection."""
        for queue in self.queues:
            if queue.owner is owner:
                self._remove(queue)

    # -- bindings

    def bind(self, binding: Binding, *, owner: object) -> None:
        """Create a binding.

        Raises:
            BrokerError: its source or destination is missing, or it is invalid.
        """
        self._ends(binding, owner).bind(binding)

    def unbind(self, binding: Binding, *, owner: object) -> None:
        """Delete a binding, if it exists.

        Raises:
            BrokerError: its source is the default exchange, or its queue is exclusive to another connection.
        """
        if binding.source not in self._exchanges or (
            binding.destination not in (self._queues if binding.destination_type == "queue" else self._exchanges)
        ):
            return
        source = self._ends(binding, owner)
        source.unbind(binding)
        self._delete_if_unbound(source)

    def _ends(self, binding: Binding, owner: object) -> BrokerExchange:
        if binding.source == DEFAULT_EXCHANGE:
            raise access_refused("operation not permitted on the default exchange")
        source = self._exchanges.get(binding.source)
        if source is None:
            raise not_found("exchange", binding.source, self.name)
        if binding.destination_type == "queue":
            self.queue(binding.destination, owner=owner)
        elif binding.destination == DEFAULT_EXCHANGE:
            raise access_refused("operation not permitted on the default exchange")
        elif binding.destination not in self._exchanges:
            raise not_found("exchange", binding.destination, self.name)
        return source

    def _unbind_all(self, kind: str, name: str) -> None:
        for exchange in list(self._exchanges.values()):
            gone = [one for one in exchange.bindings if (one.destination_type, one.destination) == (kind, name)]
            for binding in gone:
                exchange.unbind(binding)
            if gone:
                self._delete_if_unbound(exchange)

    def _delete_if_unbound(self, exchange: BrokerExchange) -> None:
        if exchange.definition.auto_delete and exchange.was_bound and not exchange.bindings:
            self._exchanges.pop(exchange.definition.name, None)
            self._unbind_all("exchange", exchange.definition.name)

    # -- messages

    def publish(
        self, exchange: str, routing_key: str, properties: Mapping[str, Any], body: bytes, *, publisher: object
    ) -> Published:
        """Publish a message.

        Args:
            publisher: identifies the channel, which quorum queues remember.

        Raises:
            BrokerError: the exchange does not exist, or refuses the message.
        """
        if exchange != DEFAULT_EXCHANGE:
            found = self._exchanges.get(exchange)
            if found is None:
                raise not_found("exchange", exchange, self.name)
            if found.definition.internal:
                raise access_refused(f"cannot publish to internal exchange '{exchange}' in vhost '{self.name}'")
        expiration = properties.get("expiration")
        if expiration is not None and not (expiration.isascii() and expiration.isdigit()):
            raise precondition_failed(f"invalid expiration '{expiration}': not a number of milliseconds")
        try:
            message = StoredMessage.published(exchange, routing_key, properties, body)
        except InvalidInputError as error:
            raise precondition_failed(str(error)) from error
        queues = self._route(exchange, message)
        stored = [queue.publish(message, publisher) for queue in queues]
        return Published(routed=bool(queues), stored=all(stored))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Perform an operation on queues; its consequences in other queues follow after it, in order.

        So a message that is published to two queues is in both of them before the dead letter of one reaches the other.
        """
        if self._is_busy:
            yield
            return
        self._is_busy = True
        try:
            yield
        finally:
            try:
                while self._pending:
                    self._pending.popleft()()
            finally:
                self._is_busy = False

    def run_later(self, work: Callable[[], None]) -> None:
        """See :class:`bide.testing.rules.queue.Surroundings`."""
        self._pending.append(work)

    def call_at(self, microseconds: int, callback: Callable[[], None]) -> Timer:
        """See :class:`bide.testing.rules.queue.Surroundings`."""

        def call() -> None:
            with self.turn():
                callback()

        return self.clock.call_at(microseconds, call)

    def dead_letter(self, queue: BrokerQueue, message: StoredMessage, reason: Reason) -> None:
        """See :class:`bide.testing.rules.queue.Surroundings`."""
        dead_letter = self.dead_letter_of(queue, message, reason)

        def publish() -> None:
            for target in self.queues_for(queue, dead_letter, reason):
                target.publish(dead_letter, None)

        self.run_later(publish)

    def dead_letter_of(self, queue: BrokerQueue, message: StoredMessage, reason: Reason) -> StoredMessage:
        """See :class:`bide.testing.rules.queue.Surroundings`."""
        return message.dead_lettered(
            reason,
            queue.name,
            exchange=queue.dead_letter_exchange or DEFAULT_EXCHANGE,
            routing_key=queue.dead_letter_key,
            at=self.clock.milliseconds // 1000,
            release=self.release,
        )

    def queues_for(self, queue: BrokerQueue, dead_letter: StoredMessage, reason: Reason) -> Sequence[BrokerQueue]:
        """See :class:`bide.testing.rules.queue.Surroundings`."""
        if dead_letter.exchange != DEFAULT_EXCHANGE and dead_letter.exchange not in self._exchanges:
            return []
        targets = self._route(dead_letter.exchange, dead_letter)
        if reason == "rejected":
            return targets
        return [one for one in targets if not dead_letter.is_cycle(one.name, release=self.release)]

    def _route(self, exchange: str, message: StoredMessage) -> list[BrokerQueue]:
        """The queues that a message is routed to; an exchange without a match uses its alternate exchange."""
        names: dict[str, None] = {}
        if exchange == DEFAULT_EXCHANGE:
            names = dict.fromkeys(message.routed.keys)
        seen = {exchange}
        pending = deque([exchange])
        while pending:
            here = self._exchanges.get(pending.popleft())
            if here is None:
                continue
            destinations = here.matches(message)
            if not destinations and here.alternate is not None:
                destinations = [("exchange", here.alternate)]
            for kind, destination in sorted(destinations):
                if kind == "queue":
                    names[destination] = None
                elif destination not in seen:
                    seen.add(destination)
                    pending.append(destination)
        return [self._queues[name] for name in names if name in self._queues]

    def _remove(self, queue: BrokerQueue) -> int:
        if self._queues.get(queue.name) is not queue:
            return 0
        del self._queues[queue.name]
        self._unbind_all("queue", queue.name)
        return queue.remove()

    def _check_owner(self, queue: BrokerQueue, owner: object) -> None:
        if queue.owner is not None and queue.owner is not owner:
            raise locked(queue.name, self.name)
