"""The consumers of one queue, and whose turn it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bide.testing.rules.entry import Entry


class BrokerConsumer:
    """A consumer as the broker knows it.

    Args:
        prefetch: at most this many unsettled messages; 0 is no limit.
        no_ack: messages are settled as they are sent.
        deliver: hands over a message.
        cancelled: called when the queue is gone.

    Attributes:
        in_hand: unsettled messages.
    """

    __slots__ = ("cancelled", "channel", "deliver", "exclusive", "in_hand", "no_ack", "prefetch", "priority", "tag")

    def __init__(
        self,
        tag: str,
        channel: object,
        *,
        prefetch: int = 0,
        no_ack: bool = False,
        exclusive: bool = False,
        priority: int = 0,
        deliver: Callable[[BrokerConsumer, Entry], None],
        cancelled: Callable[[BrokerConsumer], None],
    ) -> None:
        self.tag = tag
        self.channel = channel
        self.prefetch = prefetch
        self.no_ack = no_ack
        self.exclusive = exclusive
        self.priority = priority
        self.deliver = deliver
        self.cancelled = cancelled
        self.in_hand = 0

    @property
    def has_room(self) -> bool:
        """Whether it takes another message."""
        return not self.prefetch or self.in_hand < self.prefetch

    def grow(self) -> None:
        """It has room for one more from now on."""
        if self.prefetch:
            self.prefetch += 1


class Consumers:
    """Consumers in turn, those of a higher priority first.

    Args:
        single_active: only one gets messages; when it ends, the one that has waited longest.
        widest_first: after a single active one comes the one that has room for most messages, of these the one that has
            waited longest (quorum queues from 4.0 on).
        keeps_place: one that has no room keeps its place in the turn until it is asked (classic queues); otherwise it
            goes to the end when it has room again.
    """

    def __init__(self, *, single_active: bool, widest_first: bool, keeps_place: bool) -> None:
        self._all: list[BrokerConsumer] = []
        self._turn: list[BrokerConsumer] = []
        self._single_active = single_active
        self._widest_first = widest_first
        self._keeps_place = keeps_place
        self._active: BrokerConsumer | None = None

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[BrokerConsumer]:
        return iter(list(self._all))

    @property
    def is_exclusive(self) -> bool:
        """Whether one has the queue for itself."""
        return any(one.exclusive for one in self._all)

    def add(self, consumer: BrokerConsumer) -> None:
        """A new one, the last in turn."""
        self._all.append(consumer)
        self._turn.append(consumer)
        if self._single_active and self._active is None:
            self._active = consumer

    def remove(self, consumer: BrokerConsumer) -> None:
        """One ended; with a single active consumer the next takes over."""
        self._all.remove(consumer)
        if consumer in self._turn:
            self._turn.remove(consumer)
        if consumer is self._active:
            self._active = self._next_active()

    def _next_active(self) -> BrokerConsumer | None:
        if self._widest_first:
            return max(self._all, key=lambda one: one.prefetch, default=None)
        return self._all[0] if self._all else None

    def has_room_again(self, consumer: BrokerConsumer) -> None:
        """Some of its messages are settled."""
        if consumer in self._all and consumer not in self._turn and consumer.has_room:
            self._turn.append(consumer)

    def next(self) -> BrokerConsumer | None:
        """Who gets the next message, or None."""
        if self._single_active:
            return self._active if self._active is not None and self._active.has_room else None
        self._turn = [one for one in self._turn if one.has_room or self._outranked(one)]
        return min(self._turn, key=lambda one: -one.priority, default=None)

    def _outranked(self, consumer: BrokerConsumer) -> bool:
        """Whether others are asked before it, so that nobody notices that it has no room."""
        return self._keeps_place and any(
            one.has_room and (one.priority, -self._turn.index(one)) > (consumer.priority, -self._turn.index(consumer))
            for one in self._turn
        )

    def served(self, consumer: BrokerConsumer) -> None:
        """It got a message, and is the last in turn now."""
        if consumer in self._turn:
            self._turn.remove(consumer)
            if consumer.has_room or self._keeps_place:
                self._turn.append(consumer)
