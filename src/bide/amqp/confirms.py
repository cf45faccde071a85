"""Which messages of a channel are not confirmed yet, and what became of the others."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from bide.amqp.content import Return
from bide.errors import BideError, PublishRefusedError, UnroutableError

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Unconfirmed:
    """A message that was sent and not yet confirmed.

    Attributes:
        returned: reply code and text, once the broker returned it.
    """

    exchange: str
    routing_key: str
    message_id: str | None
    body: bytes
    future: asyncio.Future[None]
    returned: tuple[int, str] | None = None


class Confirms:
    """The publisher confirms of one channel. The broker numbers its messages from 1 on, in the order of sending.

    Attributes:
        failed: messages that waited when the channel closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[int, Unconfirmed] = {}
        self._sent = 0
        self._oldest = 1
        self._looked_at = 0
        self.failed = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, exchange: str, routing_key: str, message_id: str | None, body: bytes) -> asyncio.Future[None]:
        """Count a message that is being sent, and return a future of its confirm."""
        self._sent += 1
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting[self._sent] = Unconfirmed(
            exchange=exchange, routing_key=routing_key, message_id=message_id, body=body, future=future
        )
        return future

    def settle(self, delivery_tag: int, *, multiple: bool, refused: bool) -> None:
        """The broker's answer to one message, or to all up to this one."""
        delivery_tag = min(delivery_tag, self._sent)
        for tag in range(self._oldest if multiple else delivery_tag, delivery_tag + 1):
            entry = self._waiting.pop(tag, None)
            if entry is not None and not entry.future.done():
                _resolve(entry, refused=refused)
        if multiple:
            self._oldest = delivery_tag + 1

    def returned(self, message: Return) -> None:
        """A message came back.

        A return names no delivery tag, but the broker returns in the order of sending and before it confirms. So it
        belongs to the first message after the last returned one that it is equal to; of equal ones, bodies included,
        it does not matter to anybody which was meant.
        """
        message_id = message.values.get("message_id")
        for tag in range(max(self._looked_at + 1, self._oldest), self._sent + 1):
            entry = self._waiting.get(tag)
            if (
                entry is not None
                and entry.message_id == message_id
                and entry.exchange == message.exchange
                and entry.routing_key == message.routing_key
                and entry.body == message.body
            ):
                entry.returned = (message.reply_code, message.reply_text)
                self._looked_at = tag
                return
        log.warning("the broker returned a message that is not waiting for a confirm")

    def fail(self, error: BideError) -> None:
        """No more answers will come. What was returned is known to be unroutable all the same."""
        waiting, self._waiting = self._waiting, {}
        self.failed = len(waiting)
        for entry in waiting.values():
            if entry.returned is not None and not entry.future.done():
                _resolve(entry, refused=False)
                entry.future.exception()
            else:
                fail(entry.future, error)


def _resolve(entry: Unconfirmed, *, refused: bool) -> None:
    where = (
        f"the message {entry.message_id!r} sent to the exchange {entry.exchange!r} with the routing key "
        f"{entry.routing_key!r}"
    )
    if refused:
        entry.future.set_exception(
            PublishRefusedError(
                f"no queue stored {where}: a queue is full, or has no leader; send it again later",
                message_id=entry.message_id,
            )
        )
    elif entry.returned is not None:
        code, text = entry.returned
        entry.future.set_exception(
            UnroutableError(
                f"no queue takes {where} ({text.lower()}): bind a queue for it",
                message_id=entry.message_id,
                reply_code=code,
            )
        )
    else:
        entry.future.set_result(None)


def fail(future: asyncio.Future[Any], error: BideError) -> None:
    """Let a future fail whether or not somebody waits for it."""
    if not future.done():
        future.set_exception(error)
        # Read once, because not every caller awaits a future that fails together with hundreds of others.
        future.exception()
