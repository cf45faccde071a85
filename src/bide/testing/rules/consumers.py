"""Consumers of a queue, and the order in which they get messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bide.testing.rules.entry import Entry


class BrokerConsumer:
    """A consumer on the broker's side.

    Args:
        tag: the consumer tag.
        channel: identifies its channel.
        prefetch: maximum number of unsettled messages; 0 means no limit.
        no_ack: messages are settled when they are sent.
        exclusive: whether it has exclusive use of the queue.
        priority: its consumer priority.
        deliver: sends a message to it.
        cancelled: called when the queue is deleted.

    Attributes:
        unsettled: number of unsettled messages.
    """

    __slots__ = ("cancelled", "channel", "deliver", "exclusive", "no_ack", "prefetch", "priority", "tag", "unsettled")

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
        self.unsettled = 0

    @property
    def can_receive(self) -> bool:
        """Whether its prefetch allows another message."""
        return not self.prefetch or self.unsettled < self.prefetch

    def raise_prefetch(self) -> None:
        """Allow one more unsettled message from now on."""
        if self.prefetch:
            self.prefetch += 1


class Consumers:
    """The consumers of a queue, which take turns; those with a higher priority come first.

    Args:
        single_active: only one consumer gets messages. When it ends, the one that has waited longest takes over.
        largest_prefetch_first: instead, the consumer with the largest prefetch takes over, and of several the one that
            has waited longest (quorum queues from 4.0 on).
        keeps_turn: a consumer whose prefetch is used up keeps its turn until the queue tries it (classic queues).
            Otherwise it goes to the end when it can receive again.
    """

    def __init__(self, *, single_active: bool, largest_prefetch_first: bool, keeps_turn: bool) -> None:
        self._all: list[BrokerConsumer] = []
        self._turn: list[BrokerConsumer] = []
        self._single_active = single_active
        self._largest_prefetch_first = largest_prefetch_first
        self._keeps_turn = keeps_turn
        self._active: BrokerConsumer | None = None

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[BrokerConsumer]:
        return iter(list(self._all))

    @property
    def is_exclusive(self) -> bool:
        """Whether a consumer has exclusive use of the queue."""
        return any(one.exclusive for one in self._all)

    def add(self, consumer: BrokerConsumer) -> None:
        """Add a consumer, whose turn is last."""
        self._all.append(consumer)
        self._turn.append(consumer)
        if self._single_active and self._active is None:
            self._active = consumer

    def remove(self, consumer: BrokerConsumer) -> None:
        """Remove a consumer; if it was the single active one, the next takes over."""
        self._all.remove(consumer)
        if consumer in self._turn:
            self._turn.remove(consumer)
        if consumer is self._active:
            self._active = self._next_active()

    def _next_active(self) -> BrokerConsumer | None:
        if self._largest_prefetch_first:
            return max(self._all, key=lambda one: one.prefetch, default=None)
        return self._all[0] if self._all else None

    def on_settled(self, consumer: BrokerConsumer) -> None:
        """Give a consumer a turn again after some of its messages were settled."""
        if consumer in self._all and consumer not in self._turn and consumer.can_receive:
            self._turn.append(consumer)

    def next(self) -> BrokerConsumer | None:
        """The consumer that gets the next message, or None."""
        if self._single_active:
            return self._active if self._active is not None and self._active.can_receive else None
        self._turn = [one for one in self._turn if one.can_receive or self._outranked(one)]
        return min(self._turn, key=lambda one: -one.priority, default=None)

    def _outranked(self, consumer: BrokerConsumer) -> bool:
        """Whether others are tried before it, so that the queue does not see that its prefetch is used up."""
        return self._keeps_turn and any(
            one.can_receive
            and (one.priority, -self._turn.index(one)) > (consumer.priority, -self._turn.index(consumer))
            for one in self._turn
        )

    def on_delivered(self, consumer: BrokerConsumer) -> None:
        """Move a consumer to the end after it got a message."""
        if consumer in self._turn:
            self._turn.remove(consumer)
            if consumer.can_receive or self._keeps_turn:
                self._turn.append(consumer)
