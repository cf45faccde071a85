"""Observers of an endpoint, which see every event and change no outcome."""

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


class FailsBeforeHandler(Observer):
    """Raises before the handler is called."""

    def handling(self, message: bide.Message, *, endpoint: str, queue: str) -> AbstractContextManager[None]:
        """Never entered."""
        raise LookupError("entering")


class FailsAfterHandler(Observer):
    """Fails after the handler."""

    @contextmanager
    def handling(self, message: bide.Message, *, endpoint: str, queue: str) -> Iterator[None]:
        """Raises on the way out."""
        try:
            yield
        finally:
            raise LookupError("leaving")


class FailsInExit(Observer):
    """The same, without seeing what the handler raises."""

    def handling(self, message: bide.Message, *, endpoint: str, queue: str) -> AbstractContextManager[None]:
        """Its exit raises."""
        return self

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise LookupError("closing")


class SwallowsExceptions(Observer):
    """Suppresses exceptions of the handler."""

    @contextmanager
    def handling(self, message: bide.Message, *, endpoint: str, queue: str) -> Iterator[None]:
        """The exception ends here."""
        try:
            yield
        except ValueError:
            return


class FailsOnEvents(Observer):
    """Fails on every event."""

    async def happened(self, event: Event) -> None:
        """Raises."""
        raise LookupError("deaf")


class AwaitsCancelled(Observer):
    """Awaits a cancelled future at every step."""

    def handling(self, message: bide.Message, *, endpoint: str, queue: str) -> AbstractContextManager[None]:
        """Not entered."""
        raise asyncio.CancelledError

    async def happened(self, event: Event) -> None:
        """Raises CancelledError."""
        cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        cancelled.cancel()
        await cancelled


async def observed(client: bide.Client, observer: Observer) -> tuple[str, Recorder, list[str | None]]:
    """Handle one message and park another; return the queue, the recorded events and the handled ids."""
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
    queue, _, handled = await observed(client, AwaitsCancelled())
    assert handled == ["good", "bad"]
    assert (await ready(connection, queue), await ready(connection, f"{queue}.error")) == (0, 1)
    logged = [one.getMessage() for one in caplog.records if "AwaitsCancelled " in one.getMessage()]
    assert len(logged) >= 4
    assert all("RuntimeError: the observer was cancelled from within" in one for one in logged)


@pytest.mark.parametrize(
    "kind", [FailsBeforeHandler, FailsAfterHandler, FailsInExit, SwallowsExceptions, FailsOnEvents]
)
async def test_a_failing_observer_does_not_change_the_outcome_of_a_message(
    client: bide.Client, caplog: pytest.LogCaptureFixture, kind: type[Observer], connection: Connection
) -> None:
    queue, recorder, _ = await observed(client, kind())
    assert recorder.kinds("good") == ["processed"]
    assert [one.exception for one in recorder.events if one.message_id == "bad"] == ["ValueError"]
    assert await ready(connection, queue) == 0
    logged = [one for one in caplog.records if f"{kind.__name__} " in one.getMessage()]
    assert len(logged) == (0 if kind is SwallowsExceptions else 2)
    for one in logged:
        assert "LookupError: " in one.getMessage()
        assert "raise LookupError(" in stack_of(one)
        # What the handler raised is another story, unless the observer itself made it a part of this one.
        assert ("no good" in stack_of(one)) <= (kind is FailsAfterHandler)
