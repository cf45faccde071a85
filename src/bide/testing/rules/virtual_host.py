"""A virtual host: exchanges and queues by name, and the way of a message between them."""

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
"""Dead letters that an at-least-once queue has under way at a time; RabbitMQ's default."""


REPLY_TO: Final = "amq.rabbitmq.reply-to"
"""The pseudo-queue of direct reply-to: who consumes from it gets answers without declaring a queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What became of a published message.

    Attributes:
        routed: whether there was a queue for it.
        stored: whether every queue took it.
    """

    routed: bool
    stored: bool


class VirtualHost:
    """A virtual host.

    Args:
        release: the release of RabbitMQ whose rules count.
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
        self._later: deque[Callable[[], None]] = deque()
        self._is_busy = False
        self._reply_numbers = count(1)

    # -- exchanges and queues

    def declare_exchange(self, exchange: Exchange, *, passive: bool = False) -> None:
        """Declare an exchange, or only ask for it.

        Raises:
            BrokerError: it is not there, exists otherwise, or cannot be.
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
        """Declare a queue, or only ask for it.

        Args:
            owner: the connection that asks.

        Raises:
            BrokerError: it is not there, exists otherwise, is another's, or cannot be.
        """
        found = self._queues.get(queue.name)
        if found is not None:
            self._check_owner(found, owner)
            if not passive:
                compare_queue(queue, found.definition, self.name, release=self.release)
            found.touch()
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
        """What the answers to one channel go to: gone with its consumer. Returns its name."""
        name = f"{REPLY_TO}.{next(self._reply_numbers)}"
        self._queues[name] = ClassicQueue(Queue(name, durable=False, auto_delete=True), self, owner=None)
        return name

    def queue(self, name: str, *, owner: object | None = None) -> BrokerQueue:
        """The queue of that name.

        Args:
            owner: the connection that asks; None may use every queue.

        Raises:
            BrokerError: there is none, or it is another connection's.
        """
        found = self._queues.get(name)
        if found is None:
            raise not_found("queue", name, self.name)
        if owner is not None:
            self._check_owner(found, owner)
        return found

    @property
    def queues(self) -> Sequence[BrokerQueue]:
        """All of them."""
        return list(self._queues.values())

    def delete_queue(self, name: str, *, owner: object, if_unused: bool = False, if_empty: bool = False) -> int:
        """Delete a queue, and tell how many messages went with it; that there is none is no error.

        Raises:
            BrokerError: it is used, or not empty, where this is asked for.
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
        """Delete an exchange with its bindings; that there is none is no error.

        Raises:
            BrokerError: it is predeclared, or has bindings where this is asked for.
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
        """A connection is gone, and its exclusive queues with it."""
        for queue in self.queues:
            if queue.owner is owner:
                self._remove(queue)

    # -- bindings

    def bind(self, binding: Binding, *, owner: object) -> None:
        """Make a binding.

        Raises:
            BrokerError: an end of it is missing, or it cannot be.
        """
        self._ends(binding, owner).bind(binding)

    def unbind(self, binding: Binding, *, owner: object) -> None:
        """Remove a binding, if there is one.

        Raises:
            BrokerError: an end of it is reserved or another's.
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
        if exchange.definition.auto_delete and exchange.had_any and not exchange.bindings:
            self._exchanges.pop(exchange.definition.name, None)
            self._unbind_all("exchange", exchange.definition.name)

    # -- messages

    def publish(
        self, exchange: str, routing_key: str, properties: Mapping[str, Any], body: bytes, *, publisher: object
    ) -> Published:
        """Publish a message.

        Args:
            publisher: the channel; quorum queues remember it.

        Raises:
            BrokerError: there is no such exchange, or it takes no such message.
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
        """Do something to queues; what it entails in other queues comes after it, in order.

        So a message that is published to two queues is in both before the dead letter of one gets to the other.
        """
        if self._is_busy:
            yield
            return
        self._is_busy = True
        try:
            yield
        finally:
            try:
                while self._later:
                    self._later.popleft()()
            finally:
                self._is_busy = False

    def later(self, work: Callable[[], None]) -> None:
        """See :class:`bide.testing.rules.queue.Surroundings`."""
        self._later.append(work)

    def call_at(self, microseconds: int, callback: Callable[[], None]) -> Timer:
        """See :class:`bide.testing.rules.queue.Surroundings`."""

        def call() -> None:
            with self.turn():
                callback()

        return self.clock.call_at(microseconds, call)

    def dead_letter(self, queue: BrokerQueue, message: StoredMessage, reason: Reason) -> None:
        """See :class:`bide.testing.rules.queue.Surroundings`."""
        letter = self.dead_letter_of(queue, message, reason)

        def publish() -> None:
            for target in self.queues_for(queue, letter, reason):
                target.publish(letter, None)

        self.later(publish)

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

    def queues_for(self, queue: BrokerQueue, letter: StoredMessage, reason: Reason) -> Sequence[BrokerQueue]:
        """See :class:`bide.testing.rules.queue.Surroundings`."""
        if letter.exchange != DEFAULT_EXCHANGE and letter.exchange not in self._exchanges:
            return []
        targets = self._route(letter.exchange, letter)
        if reason == "rejected":
            return targets
        return [one for one in targets if not letter.is_cycle(one.name, release=self.release)]

    def _route(self, exchange: str, message: StoredMessage) -> list[BrokerQueue]:
        """The queues that a message goes to; what an exchange has no match for goes to its alternate exchange."""
        names: dict[str, None] = {}
        if exchange == DEFAULT_EXCHANGE:
            names = dict.fromkeys(message.routed.keys)
        seen = {exchange}
        ahead = deque([exchange])
        while ahead:
            here = self._exchanges.get(ahead.popleft())
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
                    ahead.append(destination)
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
