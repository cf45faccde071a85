"""Delayed messages to queues, published one by one or in bulk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import ClassVar, Final

from bide.check.recorder import Draft
from bide.check.workloads.base import CheckWorkload, SingleMessageWorkload, expected_after
from bide.errors import BideError, BulkInDoubtError
from bide.messages.outgoing import OutgoingMessage

_UNDELAYED: Final = 20
"""One message in this many has no delay."""


class QueuesWorkload(SingleMessageWorkload):
    """Messages to three queues with ``publish``. One in twenty has no delay."""

    name: ClassVar = "queues"

    async def send_one(self, number: int) -> None:
        """Send a message."""
        queue = self.stage.rng.choice(self.queues)
        delay = self.random_delay() if number % _UNDELAYED else None
        await self.publish(self.draft(number, routing_key=queue), [queue], to=queue, delay=delay)


class BulkWorkload(CheckWorkload):
    """Messages to three queues with ``publish_many``."""

    name: ClassVar = "bulk"

    async def send(self) -> None:
        """Publish in bulk until the stage is ending. After an error, start another bulk."""
        while not self.stage.ending.is_set():
            drafts: dict[str, tuple[Draft, str]] = {}
            try:
                async for result in self.stage.client.publish_many(self._messages(drafts), window=1_000):
                    assert result.message_id is not None
                    draft, queue = drafts.pop(result.message_id)
                    self.stage.recorder.add_sent(
                        draft,
                        [queue],
                        outcome=result.status,
                        expected="delivered" if result.error is None else expected_after(result.error),
                        due=result.due if result.error is None else None,
                        attempts=result.attempts,
                        is_call=True,
                    )
            except BulkInDoubtError as error:
                for one in error.unsent:
                    draft, queue = drafts.pop(one.message_id or "")
                    self.stage.recorder.add_sent(draft, [queue], outcome="unsent", expected="nothing")
                self._in_doubt(drafts)
            except BideError:
                self._in_doubt(drafts)

    def _in_doubt(self, drafts: dict[str, tuple[Draft, str]]) -> None:
        for draft, queue in drafts.values():
            self.stage.recorder.add_sent(draft, [queue], outcome="in doubt", expected="unknown")

    async def _messages(self, drafts: dict[str, tuple[Draft, str]]) -> AsyncIterator[OutgoingMessage]:
        async for number in self.pace():
            queue = self.stage.rng.choice(self.queues)
            draft = self.draft(number, routing_key=queue)
            drafts[draft.id] = (draft, queue)
            yield OutgoingMessage(
                draft.body, to=queue, delay=self.random_delay(), headers=draft.headers, message_id=draft.id
            )
