"""Messages to an endpoint whose handler fails, with delayed retries."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar, Final

from bide.check.recorder import Draft
from bide.check.workloads.base import SingleMessageWorkload
from bide.client.message import Message
from bide.durations import MICROSECOND
from bide.endpoint import Endpoint
from bide.errors import DeliveryLostError
from bide.recoverability.retry_policy import Retry
from bide.topology import Queue, Topology

_QUEUE: Final = "check.retries"
_ERROR_QUEUE: Final = "check.retries.error"
_DELAYS: Final = (timedelta(seconds=1), timedelta(seconds=3))


class _PlannedError(Exception):
    """The handler fails as planned."""


class RetriesWorkload(SingleMessageWorkload):
    """Messages whose handler fails 0 to 3 times. The third failure parks a message.

    In the history each attempt is a separate message, whose id ends with the number of the attempt. An attempt is due
    when the delay after the previous failure is over.
    """

    name: ClassVar = "retries"

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]  # the same parameters
        self._drafts: dict[str, Draft] = {}

    @property
    def queues(self) -> Sequence[str]:
        """The queue and the error queue of the endpoint."""
        return [_QUEUE, _ERROR_QUEUE]

    def topology(self) -> Topology:
        """Both queues."""
        return Topology(queues=[Queue.quorum(name) for name in self.queues])

    async def send_one(self, number: int) -> None:
        """Send a message."""
        draft = self.draft(number, routing_key=_QUEUE, suffix="/0")
        self._drafts[_message_id(draft)] = draft
        await self.publish(draft, [_QUEUE], to=_QUEUE)

    async def receive_from(self, queue: str) -> None:
        """Handle the messages of the endpoint's queue, or receive parked messages from its error queue."""
        if queue == _ERROR_QUEUE:
            await self._receive_parked()
            return
        app = Endpoint(
            _QUEUE,
            retry=Retry(immediate=0, delays=_DELAYS),
            error_queue=_ERROR_QUEUE,
            slow_down_after=None,
            management_url=self.stage.management_url,
        )
        app.handler(self._handle)
        await app.run(self.stage.client)

    async def _handle(self, message: Message) -> None:
        recorder, attempt = self.stage.recorder, message.history.retries
        assert message.message_id is not None
        first = message.message_id.rpartition("/")[0]
        recorder.add_delivered(message, _QUEUE, message_id=f"{first}/{attempt}")
        draft = self._drafts[first]
        if attempt >= int(first.rpartition("-")[2]) % (len(_DELAYS) + 2):
            return
        is_last = attempt == len(_DELAYS)
        after = recorder.draft(f"{first}/{attempt + 1}", self.name, draft.body, draft.headers, routing_key=_QUEUE)
        recorder.add_sent(
            after,
            [_ERROR_QUEUE if is_last else _QUEUE],
            outcome="parked" if is_last else "failed",
            expected="delivered",
            due=after.at if is_last else after.at + _DELAYS[attempt] // MICROSECOND,
        )
        raise _PlannedError

    async def _receive_parked(self) -> None:
        async with self.stage.client.consume(_ERROR_QUEUE) as messages:
            async for message in messages:
                assert message.message_id is not None
                first = message.message_id.rpartition("/")[0]
                self.stage.recorder.add_delivered(message, _ERROR_QUEUE, message_id=f"{first}/{len(_DELAYS) + 1}")
                try:
                    await message.ack()
                except DeliveryLostError:
                    continue


def _message_id(draft: Draft) -> str:
    return draft.id.rpartition("/")[0]
