"""Observers of an endpoint: they see everything, and change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

import pytest

import bide
from bide.amqp.connection import Connection
from bide.endpoint import Event, Observer
from tests.broker.endpoints import Recorder, running
from tests.broker.receiving import fresh, ready, stack_of


class Entering(Observer):
    """Fails before the handler is called."""

    def handling(self, message: bide.Message, *, endpoint: str, queue: str) -> AbstractContextManager[None]:
        """Never entered."""
        raise LookupError("entering")


class Leaving(Observer):
    """Fails after the handler."""

    @contextmanager
    def handling(self, message: bide.Message, *, endpoint: str, queue: str) -> Iterator[None]:
        """Never left in good order."""
        try:
            yield
        finally:
            raise LookupError("leaving")


class Closing(Observer):
    """The same, without seeing what the handler raises."""

    def handling(self, message: bide.Message, *, endpoint: str, queue: str) -> AbstractContextManager[None]:
        """Entered, and not left in good order."""
        return self

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise LookupError("closing")


class Swallowing(Observer):
    """Holds back what the handler raises."""

    @contextmanager
    def handling(self, message: bide.Message, *, endpoint: str, queue: str) -> Iterator[None]:
        """The exception ends here."""
        try:
            yield
        except ValueError:
            return


class Deaf(Observer):
    """Cannot be told anything."""

    async def happened(self, event: Event) -> None:
        """Not now."""
        raise LookupError("deaf")


class Abandoned(Observer):
    """Waits, at every step, for what somebody else has cancelled."""

    def handling(self, message: bide.Message, *, endpoint: str, queue: str) -> AbstractContextManager[None]:
        """Not entered."""
        raise asyncio.CancelledError

    async def happened(self, event: Event) -> None:
        """Nobody will ever tell."""
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        told.cancel()
        await told


async def observed(client: bide.Client, observer: Observer) -> tuple[str, Recorder, list[str | None]]:
    """A message that is handled and one that is parked: the queue, what else was told of them, and who was handled."""
    queue, recorder, handled = fresh("observed"), Recorder(), list[str | None]()
    app = bide.Endpoint(
        queue, error_queue=f"{queue}.error", retry=bide.Retry(immediate=0, delays=()), observers=[observer, recorder]
    )

    @app.handler
    async def handle(message: bide.Message) -> None:
        handled.append(message.message_id)
        if message.message_id == "bad":
            raise ValueError("no good")

    async with running(app, client, recorder):
        await client.publish(b"", to=queue, message_id="good")
        await recorder.until("processed")
        await client.publish(b"", to=queue, message_id="bad")
        await recorder.until("parked")
    return queue, recorder, handled


async def test_an_observer_cancelled_from_within_fails_alone(
    client: bide.Client, caplog: pytest.LogCaptureFixture, connection: Connection
) -> None:
    """That is a failure of the observer: it neither stops the endpoint nor gives it a message twice."""
    queue, _, handled = await observed(client, Abandoned())
    assert handled == ["good", "bad"]
    assert (await ready(connection, queue), await ready(connection, f"{queue}.error")) == (0, 1)
    complaints = [one.getMessage() for one in caplog.records if "Abandoned " in one.getMessage()]
    assert len(complaints) >= 4
    assert all("RuntimeError: the observer was cancelled from within" in one for one in complaints)


@pytest.mark.parametrize("kind", [Entering, Leaving, Closing, Swallowing, Deaf])
async def test_a_failing_observer_does_not_change_the_outcome_of_a_message(
    client: bide.Client, caplog: pytest.LogCaptureFixture, kind: type[Observer], connection: Connection
) -> None:
    queue, recorder, _ = await observed(client, kind())
    assert recorder.kinds("good") == ["processed"]
    assert [one.exception for one in recorder.events if one.message_id == "bad"] == ["ValueError"]
    assert await ready(connection, queue) == 0
    complaints = [one for one in caplog.records if f"{kind.__name__} " in one.getMessage()]
    assert len(complaints) == (0 if kind is Swallowing else 2)
    for one in complaints:
        assert "LookupError: " in one.getMessage()
        assert "raise LookupError(" in stack_of(one)
        # What the handler raised is another story, unless the observer itself made it a part of this one.
        assert ("no good" in stack_of(one)) <= (kind is Leaving)
