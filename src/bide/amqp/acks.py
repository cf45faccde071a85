"""Acknowledgements of one channel, batched into as few frames as possible."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

from bide.amqp import codec

_MOST_PREFETCH: Final = 65_535

ACK_DELAY: Final = 0.01
"""Seconds that an acknowledgement waits for others: each that comes alone costs a quorum queue a log entry."""


class Acks:
    """Which deliveries are settled, and which acknowledgements are still to be sent.

    One frame acknowledges many messages where every delivery before the last of them is settled too. The broker
    numbers the deliveries of a channel from 1 on.
    """

    def __init__(self) -> None:
        self._all_to = 0
        """Up to here every delivery is settled."""
        self._ends: dict[int, int] = {}
        """Runs of settled deliveries after that: the last of each by its first. A message that stays unsettled for long
        must not cost more with every one that is settled after it."""
        self._starts: dict[int, int] = {}
        """The first of each run by its last."""
        self._unsent: list[int] = []
        self._repeated: list[int] = []

    def __len__(self) -> int:
        return len(self._unsent) + len(self._repeated)

    def add(self, delivery_tag: int) -> None:
        """Acknowledge a delivery with the next :meth:`take`."""
        if delivery_tag <= self._all_to:
            # Send a duplicate acknowledgement at once, so that the broker rejects it.
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


class AckSender:
    """Sends acknowledgements, together with those that come within :data:`ACK_DELAY` of the first.

    Args:
        send: takes the payload of a method frame.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[bytes], None]) -> None:
        self.acks = Acks()
        self.sent_at = -math.inf
        """When the last was sent, by the clock of the loop."""
        self._loop = loop
        self._send = send
        self._at_once = 1
        self._handle: asyncio.Handle | None = None

    def expect(self, prefetch: int) -> None:
        """Set the prefetch, 0 for no limit: acknowledgements of a quarter of it are sent at once."""
        self._at_once = max(1, (prefetch or _MOST_PREFETCH) // 4)

    def add(self, delivery_tag: int) -> None:
        """Acknowledge a delivery."""
        self.acks.add(delivery_tag)
        if len(self.acks) == self._at_once:
            # Those that this turn of the loop still brings go with them.
            self._loop.call_soon(self.flush)
        elif self._handle is None:
            self._handle = self._loop.call_later(ACK_DELAY, self.flush)

    def settled(self, delivery_tag: int, *, multiple: bool = False) -> None:
        """A delivery, or all up to it, was just settled by a frame that was not sent from here."""
        self.acks.settled(delivery_tag, multiple=multiple)
        self.sent_at = self._loop.time()

    def flush(self) -> None:
        """Send what waits."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        for payload in self.acks.take():
            self._send(payload)
            self.sent_at = self._loop.time()

    def drop(self) -> None:
        """Send nothing more: the channel is gone."""
        self.acks.take()
        self.flush()


def _ack(delivery_tag: int, *, multiple: bool = False) -> bytes:
    return codec.method(codec.BASIC_CLASS, 80, codec.long_long(delivery_tag), codec.bits(multiple))
