"""Acknowledgements of one channel, gathered for a turn of the event loop and sent in as few frames as possible."""

from __future__ import annotations

from bide.amqp import codec


class Acks:
    """Which deliveries are settled, and which acknowledgements are still to be sent.

    One frame acknowledges many messages where every delivery before the last of them is settled too. The broker
    numbers the deliveries of a channel from 1 on.
    """

    def __init__(self) -> None:
        self._all_to = 0
        """Up to here every delivery is settled."""
        self._ends: dict[int, int] = {}
        """Runs of settled deliveries after that: the last of each by its first. A message that somebody keeps for long
        must not cost more with every one that is settled after it."""
        self._starts: dict[int, int] = {}
        """The first of each run by its last."""
        self._unsent: list[int] = []
        self._repeated: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._unsent or self._repeated)

    def add(self, delivery_tag: int) -> None:
        """Acknowledge a delivery with the next :meth:`take`."""
        if delivery_tag <= self._all_to:
            # The broker shall have its say about a second settlement.
            self._repeated.append(delivery_tag)
            return
        self._unsent.append(delivery_tag)
        self.settled(delivery_tag)

    def settled(self, delivery_tag: int, *, multiple: bool = False) -> None:
        """A delivery, or all up to it, was settled in another way."""
        if multiple:
            self._all_to = max(self._all_to, delivery_tag)
            for first, last in sorted(self._ends.items()):
                if first <= self._all_to + 1:
                    self._all_to = max(self._all_to, last)
                    del self._ends[first], self._starts[last]
        elif delivery_tag == self._all_to + 1:
            self._all_to = delivery_tag
            if delivery_tag + 1 in self._ends:
                self._all_to = self._ends.pop(delivery_tag + 1)
                del self._starts[self._all_to]
        elif delivery_tag > self._all_to:
            first, last = (
                self._starts.pop(delivery_tag - 1, delivery_tag),
                self._ends.pop(delivery_tag + 1, delivery_tag),
            )
            self._ends[first] = last
            self._starts[last] = first

    def take(self) -> list[bytes]:
        """The payloads of the method frames that say all that is to be said."""
        together = [tag for tag in self._unsent if tag <= self._all_to]
        alone = [tag for tag in self._unsent if tag > self._all_to]
        # The broker takes a tag that it waits for only; of those together, the last is one.
        payloads = [_ack(max(together), multiple=len(together) > 1)] if together else []
        payloads += [_ack(tag) for tag in (*alone, *self._repeated)]
        self._unsent, self._repeated = [], []
        return payloads


def _ack(delivery_tag: int, *, multiple: bool = False) -> bytes:
    return codec.method(codec.BASIC_CLASS, 80, codec.long_long(delivery_tag), codec.bits(multiple))
