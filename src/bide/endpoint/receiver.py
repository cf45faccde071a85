"""Receiving of the messages of an endpoint."""

from __future__ import annotations

import asyncio
from typing import Final

from bide.client.consumer import Consumer
from bide.client.message import Message
from bide.endpoint.limiter import Limiter
from bide.endpoint.worker import Worker
from bide.errors import ClosedError
from bide.runtime.logs import logger

log = logger(__name__)

_MAX_DEAD_CONSUMERS: Final = 20
"""How many dead processes may have left prefetched messages at the head of the queue."""


class MessageReceiver:
    """Starts a task for each message: first for one at a time, then for as many as the limiter admits.

    Args:
        name: the endpoint's name, for log lines.
        worker: processes each message.
        limiter: limits how many are processed at the same time.
        prefetch: the prefetch of the endpoint's processes.
        stopping: set when the endpoint stops.
    """

    def __init__(self, name: str, worker: Worker, limiter: Limiter, *, prefetch: int, stopping: asyncio.Event) -> None:
        self._name = name
        self._worker = worker
        self._limiter = limiter
        self._prefetch = prefetch
        self._stopping = stopping
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        """Number of messages that are being handled."""
        return len(self._tasks)

    async def receive(self, single: Consumer, messages: Consumer) -> None:
        """Hand messages to the worker until the client is closed or this call is cancelled.

        Args:
            single: a consumer with a prefetch of one, for the messages that were delivered before.
            messages: the consumer for all others.

        Raises:
            ClosedError: the client was closed.
            BideError: an error of a consumer.
        """
        # A stopped consumer requeues messages that it has not yielded yet; yielded ones can still be settled.
        try:
            first = await self._one_by_one(single)
        finally:
            single.stop()
        await self._limiter.enter()
        self._start(first)
        try:
            while True:
                # Wait for a free slot before taking a message: messages not taken yet are requeued at once on a stop.
                await self._limiter.enter()
                try:
                    message = await anext(messages, None)
                except BaseException:
                    self._limiter.leave()
                    raise
                if message is None:
                    raise ClosedError("the client was closed")
                self._start(message)
        finally:
            messages.stop()

    async def _one_by_one(self, messages: Consumer) -> Message:
        """Handle redelivered messages alone, and return the first message that was never delivered before.

        Messages that dead processes left behind stand at the head of the queue. If far more are redelivered than dead
        processes can have prefetched, an operator has browsed the queue, and the rest are handled concurrently.
        """
        returned = 0
        async for message in messages:
            if not message.redelivered or returned == self._prefetch * _MAX_DEAD_CONSUMERS:
                return message
            returned += 1
            await self._limiter.enter()
            await asyncio.wait({self._start(message)})
        raise ClosedError("the client was closed")

    def _start(self, message: Message) -> asyncio.Task[None]:
        async def process() -> None:
            try:
                await self._worker.process(message)
            except asyncio.CancelledError:
                if not self._stopping.is_set() and not message.settled:
                    # The handler cancelled its own task: an unsettled message would never be delivered again.
                    await message.requeue()
                raise
            finally:
                self._limiter.leave()

        task = asyncio.create_task(process())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: cannot settle a message, it will be redelivered: %s", self._name, error, exc_info=error)

    async def drain(self, seconds: float) -> None:
        """Wait for running handlers, and cancel those that take longer."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(set(self._tasks), timeout=seconds)
        for task in late:
            log.warning("%s: a handler did not finish within %g s: requeuing its message", self._name, seconds)
            task.cancel()
        if late:
            await asyncio.wait(late)
