"""Acknowledgements of one channel, batched into as few frames as possible."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Final

from bide.amqp import codec

_MAX_PREFETCH: Final = 65_535

ACK_DELAY: Final = 0.01
"""Seconds that an acknowledgement waits for others. A quorum queue writes a log entry for each frame it receives."""

_UNANSWERED: Final = 32
"""Commands that the broker's side of a channel sends before a quorum queue answers (``rabbit_fifo_client.erl``)."""
_ANSWERED_AFTER: Final = 10.0
"""Seconds after which a quorum queue is assumed to have answered a command."""


class Acks:
    """The settled deliveries of a channel, and the acknowledgements still to send.

    One frame can acknowledge many messages if every earlier delivery is settled too. The broker numbers the deliveries
    of a channel from 1.
    """

    def __init__(self) -> None:
        self._settled_up_to = 0
        """The delivery tag up to which all deliveries are settled."""
        self._range_ends: dict[int, int] = {}
        """Later ranges of settled deliveries: the last tag of each by its first. Ranges keep the cost constant when one
        message stays unsettled while many after it are settled."""
        self._range_starts: dict[int, int] = {}
        """The first tag of each range by its last."""
        self._unsent: list[int] = []
        self._duplicates: list[int] = []

    def __len__(self) -> int:
        return len(self._unsent) + len(self._duplicates)

    @property
    def settled_count(self) -> int:
        """The number of settled deliveries."""
        return self._settled_up_to + sum(last - first + 1 for first, last in self._range_ends.items())

    def add(self, delivery_tag: int) -> None:
        """Acknowledge a delivery with the next :meth:`take`."""
        if delivery_tag <= self._settled_up_to:
            # Send a duplicate acknowledgement at once, so that the broker rejects it.
            self._duplicates.append(delivery_tag)
            return
        self._unsent.append(delivery_tag)
        self.settled(delivery_tag)

    def settled(self, delivery_tag: int, *, multiple: bool = False) -> None:
        """Record that a delivery, or every delivery up to it, was settled."""
        if multiple:
            self._settled_up_to = max(self._settled_up_to, delivery_tag)
            for first, last in sorted(self._range_ends.items()):
                if first <= self._settled_up_to + 1:
                    self._settled_up_to = max(self._settled_up_to, last)
                    del self._range_ends[first], self._range_starts[last]
        elif delivery_tag == self._settled_up_to + 1:
            self._settled_up_to = delivery_tag
            if delivery_tag + 1 in self._range_ends:
                self._settled_up_to = self._range_ends.pop(delivery_tag + 1)
                del self._range_starts[self._settled_up_to]
        elif delivery_tag > self._settled_up_to:
            first, last = (
                self._range_starts.pop(delivery_tag - 1, delivery_tag),
                self._range_ends.pop(delivery_tag + 1, delivery_tag),
            )
            self._range_ends[first] = last
            self._range_starts[last] = first

    def take(self) -> list[bytes]:
        """Remove the acknowledgements that wait, and return the payloads of their method frames."""
        together = [tag for tag in self._unsent if tag <= self._settled_up_to]
        alone = [tag for tag in self._unsent if tag > self._settled_up_to]
        # The broker rejects a tag that is already settled. The last unsent tag is still unsettled on the broker.
        payloads = [_ack(max(together), multiple=len(together) > 1)] if together else []
        payloads += [_ack(tag) for tag in (*alone, *self._duplicates)]
        self._unsent, self._duplicates = [], []
        return payloads


class AckSender:
    """Sends acknowledgements in batches: the first one of a batch waits :data:`ACK_DELAY` for others.

    Args:
        send: sends the payload of a method frame.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[bytes], None]) -> None:
        self.acks = Acks()
        self._commands: deque[float] = deque(maxlen=_UNANSWERED)
        """When the last commands were sent that the queue may not have answered, by the loop's clock."""
        self._held_back_at = -math.inf
        """When an acknowledgement was last sent after that many commands."""
        self._is_grouped = True
        self._loop = loop
        self._send = send
        self.prefetch = _MAX_PREFETCH
        self._flush_threshold = 1
        self._flush_handle: asyncio.Handle | None = None

    def expect(self, prefetch: int) -> None:
        """Set the prefetch (0 for no limit): acknowledgements are sent early once a quarter of it is waiting."""
        self.prefetch = prefetch or _MAX_PREFETCH
        self._flush_threshold = max(1, self.prefetch // 4)

    def add(self, delivery_tag: int) -> None:
        """Acknowledge a delivery."""
        self.acks.add(delivery_tag)
        if len(self.acks) == self._flush_threshold:
            # Acknowledgements added in this iteration of the event loop go with them.
            self._loop.call_soon(self.flush)
        elif self._flush_handle is None:
            self._flush_handle = self._loop.call_later(ACK_DELAY, self.flush)

    def settled(self, delivery_tag: int, *, multiple: bool = False, requeued: bool = False) -> None:
        """Record that a frame of another sender has just settled a delivery, or every delivery up to it."""
        self.acks.settled(delivery_tag, multiple=multiple)
        self._sent(1, requeued=requeued)

    def got(self) -> None:
        """Record a message of ``basic.get``. The broker passes its acknowledgement on in a command of its own."""
        self._is_grouped = False

    def add_barrier(self) -> None:
        """Record that a method was sent which the queue answers only after it has received everything sent before."""
        self._commands.clear()
        self._held_back_at = -math.inf

    @property
    def may_be_held_back(self) -> bool:
        """Whether the broker may have read acknowledgements that it has not passed on to a quorum queue."""
        return self._loop.time() - self._held_back_at < _ANSWERED_AFTER

    def flush(self) -> None:
        """Send the acknowledgements that wait."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        number = len(self.acks)
        payloads = self.acks.take()
        for payload in payloads:
            self._send(payload)
        self._sent(len(payloads) if self._is_grouped else number)

    def _sent(self, commands: int, *, requeued: bool = False) -> None:
        now = self._loop.time()
        for _ in range(min(commands, _UNANSWERED + 1)):
            # A requeue that is lost makes no difference: the queue requeues the message when the channel closes.
            if not requeued and len(self._commands) == _UNANSWERED and now - self._commands[0] < _ANSWERED_AFTER:
                self._held_back_at = now
            self._commands.append(now)

    def drop(self) -> None:
        """Discard the acknowledgements that wait: the channel is closed."""
        self.acks.take()
        self.flush()


def _ack(delivery_tag: int, *, multiple: bool = False) -> bytes:
    return codec.method(codec.BASIC_CLASS, 80, codec.long_long(delivery_tag), codec.bits(multiple))
