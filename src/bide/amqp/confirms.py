"""Publisher confirms: the unconfirmed messages of a channel, and the result of each."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from typing import Any

from bide.amqp.delivery import Return
from bide.errors import BideError, PublishRefusedError, UnroutableError
from bide.runtime.logs import logger

log = logger(__name__)


class Unconfirmed(ABC):
    """A message that was sent and is not yet confirmed.

    Attributes:
        returned: reply code and text, once the broker has returned the message.
    """

    __slots__ = ("body", "exchange", "message_id", "returned", "routing_key")

    def __init__(self, exchange: str, routing_key: str, message_id: str | None, body: bytes) -> None:
        self.exchange = exchange
        self.routing_key = routing_key
        self.message_id = message_id
        self.body = body
        self.returned: tuple[int, str] | None = None

    @abstractmethod
    def settle(self, error: BideError | None) -> None:
        """Report the result. Called once.

        Args:
            error: None for a confirm, ``PublishRefusedError`` for a negative confirm, ``UnroutableError`` for a
                returned message, and the channel's error if the channel closed before any of these.
        """


class Awaited(Unconfirmed):
    """An unconfirmed message whose result is set on a future."""

    __slots__ = ("future",)

    def __init__(
        self,
        exchange: str,
        routing_key: str,
        message_id: str | None,
        body: bytes,
        *,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(exchange, routing_key, message_id, body)
        self.future: asyncio.Future[None] = loop.create_future()

    def settle(self, error: BideError | None) -> None:
        """Set the result of the future."""
        if error is not None:
            fail(self.future, error)
        elif not self.future.done():
            self.future.set_result(None)


class Confirms:
    """The publisher confirms of one channel. The broker numbers its messages from 1, in the order of sending.

    Attributes:
        failed: the number of unconfirmed messages when the channel closed, by exchange.
    """

    def __init__(self) -> None:
        self._unconfirmed: dict[int, Unconfirmed] = {}
        self._sent_count = 0
        self._oldest_tag = 1
        self._last_returned_tag = 0
        self.failed = Counter[str]()

    def __len__(self) -> int:
        return len(self._unconfirmed)

    @property
    def waiting(self) -> Iterable[Unconfirmed]:
        """The unconfirmed messages, in the order of sending."""
        return self._unconfirmed.values()

    def add(self, message: Unconfirmed) -> None:
        """Register a message that is being sent."""
        self._sent_count += 1
        self._unconfirmed[self._sent_count] = message

    def settle(self, delivery_tag: int, *, multiple: bool, refused: bool) -> None:
        """Handle the broker's confirm of one message, or of all up to this one."""
        delivery_tag = min(delivery_tag, self._sent_count)
        waiting = self._unconfirmed
        for tag in range(self._oldest_tag if multiple else delivery_tag, delivery_tag + 1):
            entry = waiting.pop(tag, None)
            if entry is not None:
                entry.settle(
                    _refused_error(entry)
                    if refused
                    else _unroutable_error(entry)
                    if entry.returned is not None
                    else None
                )
        if multiple or delivery_tag == self._oldest_tag:
            self._oldest_tag = delivery_tag + 1

    def returned(self, message: Return) -> None:
        """Handle a returned message.

        A return has no delivery tag. But the broker returns messages in the order of sending, and each before its
        confirm. The return therefore belongs to the first message that equals it after the previously returned one. If
        several messages equal the return, bodies included, it does not matter which of them is marked.
        """
        message_id = message.values.get("message_id")
        for tag in range(max(self._last_returned_tag + 1, self._oldest_tag), self._sent_count + 1):
            entry = self._unconfirmed.get(tag)
            if (
                entry is not None
                and entry.message_id == message_id
                and entry.exchange == message.exchange
                and entry.routing_key == message.routing_key
                and entry.body == message.body
            ):
                entry.returned = (message.reply_code, message.reply_text)
                self._last_returned_tag = tag
                return
        log.warning("the broker returned a message that is not waiting for a confirm")

    def fail(self, error: BideError) -> None:
        """Fail the unconfirmed messages: the channel is closed. Messages already returned fail as unroutable."""
        waiting, self._unconfirmed = self._unconfirmed, {}
        self.failed.update(entry.exchange for entry in waiting.values())
        for entry in waiting.values():
            entry.settle(error if entry.returned is None else _unroutable_error(entry))


def _refused_error(entry: Unconfirmed) -> PublishRefusedError:
    return PublishRefusedError(
        f"no queue stored {_describe(entry)}: a queue is full, or has no leader because the majority of its nodes is "
        "lost; send it again later",
        message_id=entry.message_id,
    )


def _unroutable_error(entry: Unconfirmed) -> UnroutableError:
    assert entry.returned is not None
    code, text = entry.returned
    return UnroutableError(
        f"no queue takes {_describe(entry)} ({text.lower()}): bind a queue for it",
        message_id=entry.message_id,
        reply_code=code,
    )


def _describe(entry: Unconfirmed) -> str:
    return (
        f"the message {entry.message_id!r} sent to the exchange {entry.exchange!r} with the routing key "
        f"{entry.routing_key!r}"
    )


def fail(future: asyncio.Future[Any], error: BideError) -> None:
    """Set an error on a future, without a warning if the future is never awaited."""
    if not future.done():
        future.set_exception(error)
        # Retrieve the exception: callers do not await each of hundreds of futures that fail together.
        future.exception()
