"""Acknowledgements of one channel, batched into as few frames as possible."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

from bide.amqp import codec

_MOST_PREFETCH: Final = 65_535

ACK_DELAY: Final = 0.01
"""Seconds that an acknowledgement waits for others. A quorum queue writes a log entry for each frame it receives."""


class Acks:
    """The settled deliveries of a channel, and the acknowledgements still to send.

    One frame can acknowledge many messages if every earlier delivery is settled too. The broker numbers the deliveries
    of a channel from 1.
    """

    def __init__(self) -> None:
        self._all_to = 0
        """The delivery tag up to which all deliveries are settled."""
        self._ends: dict[int, int] = {}
        """Later ranges of settled deliveries: the last tag of each by its first. Ranges keep the cost constant when one
        message stays unsettled while many after it are settled."""
        self._starts: dict[int, int] = {}
        """The first tag of each range by its last."""
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
        """Note that a delivery, or all up to it, were settled."""
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
        """Remove the acknowledgements that wait, and return the payloads of their method frames."""
        together = [tag for tag in self._unsent if tag <= self._all_to]
        alone = [tag for tag in self._unsent if tag > self._all_to]
        # The broker rejects a tag that is already settled. The last unsent tag is still unsettled on the broker.
        payloads = [_ack(max(together), multiple=len(together) > 1)] if together else []
        payloads += [_ack(tag) for tag in (*alone, *self._repeated)]
        self._unsent, self._repeated = [], []
        return payloads


class AckSender:
    """Sends acknowledgements in batches: those that come within :data:`ACK_DELAY` of the first go with it.

    Args:
        send: sends the payload of a method frame.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[bytes], None]) -> None:
        self.acks = Acks()
        self.sent_at = -math.inf
        """When the last acknowledgement was sent, by the loop's clock."""
        self._loop = loop
        self._send = send
        self._at_once = 1
        self._handle: asyncio.Handle | None = None

    def expect(self, prefetch: int) -> None:
        """Set the prefetch (0 for no limit): acknowledgements are sent early once a quarter of it is waiting."""
        self._at_once = max(1, (prefetch or _MOST_PREFETCH) // 4)

    def add(self, delivery_tag: int) -> None:
        """Acknowledge a delivery."""
        self.acks.add(delivery_tag)
        if len(self.acks) == self._at_once:
            # Acknowledgements added in this iteration of the event loop go with them.
            self._loop.call_soon(self.flush)
        elif self._handle is None:
            self._handle = self._loop.call_later(ACK_DELAY, self.flush)

    def settled(self, delivery_tag: int, *, multiple: bool = False) -> None:
        """Note that a delivery, or all up to it, were just settled by a frame of another sender."""
        self.acks.settled(delivery_tag, multiple=multiple)
        self.sent_at = self._loop.time()

    def flush(self) -> None:
        """Send the acknowledgements that wait."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        for payload in self.acks.take():
            self._send(payload)
            self.sent_at = self._loop.time()

    def drop(self) -> None:
        """Discard the acknowledgements that wait: the channel is closed."""
        self.acks.take()
        self.flush()


def _ack(delivery_tag: int, *, multiple: bool = False) -> bytes:
    return codec.method(codec.BASIC_CLASS, 80, codec.long_long(delivery_tag), codec.bits(multiple))
