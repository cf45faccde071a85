"""Odd exceptions, policies and settings of an endpoint, which hold up no message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest

import bide
import bide.testing
from bide.errors import InvalidDelayError, InvalidInputError
from bide.recoverability.failed import FailedMessage
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.endpoints import Recorder, running
from tests.broker.receiving import eventually, fresh, receive

ONCE = bide.Retry(immediate=0, delays=())


@pytest.fixture
async def client() -> AsyncIterator[bide.Client]:
    """A client of a broker in memory: no fault of a real one is tested here."""
    async with bide.testing.broker() as b, b.connect(infrastructure=SMALL_CLOCK) as client:
        yield client


async def parked(client: bide.Client, queue: str) -> FailedMessage:
    """The one message of an error queue."""
    (one,) = await receive(client, queue, 1)
    return FailedMessage.read(one.raw.exchange, one.raw.routing_key, one.raw.values, one.body)


class NotAnException(BaseException):
    """As the outcome of test frameworks and the cancellation of others are."""


class UnprintableError(Exception):
    """Neither ``str`` nor ``repr`` works."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


@dataclass(frozen=True)
class FrozenError(Exception):
    """Refuses to be changed, its traceback included."""

    code: int = 7


class NotedError(Exception):
    """Its notes, which a stack trace shows, cannot be read."""

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]  # an attribute of the base class
        raise RuntimeError("no")


class CausedError(Exception):
    """Its cause cannot be read."""

    @property
    def __cause__(self) -> BaseException | None:  # type: ignore[override]  # an attribute of the base class
        raise RuntimeError("no cause")


def circle() -> Exception:
    """Two exceptions that caused each other."""
    one, other = ValueError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    return one


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("error", "exception"),
    [
        (lambda: NotAnException("a"), "NotAnException"),
        (lambda: BaseExceptionGroup("many", [KeyboardInterrupt()]), "BaseExceptionGroup"),
        (lambda: ExceptionGroup("many", [ValueError(str(number)) for number in range(5000)]), "ExceptionGroup"),
        (UnprintableError, "UnprintableError"),
        (lambda: ValueError("\ud800" + "long " * 1_000_000), "ValueError"),
        (FrozenError, "FrozenError"),
        (NotedError, "NotedError"),
        (CausedError, "CausedError"),
        (circle, "ValueError"),
        (lambda: StopIteration("a"), "RuntimeError"),
        (asyncio.CancelledError, "RuntimeError"),
    ],
)
async def test_any_exception_of_a_handler_is_a_failure(
    client: bide.Client, error: Callable[[], BaseException], exception: str, plain: bool
) -> None:
    queue, recorder = fresh("raises"), Recorder()
    app = bide.Endpoint(queue, error_queue=f"{queue}.error", observers=[recorder], retry=ONCE)

    def fail(message: bide.Message) -> None:
        raise error()

    async def fail_too(message: bide.Message) -> None:
        fail(message)

    app.handler(fail if plain else fail_too)
    async with running(app, client, recorder):
        await client.publish(b"x", to=queue, message_id="one")
        await recorder.until("parked")
    message = await parked(client, f"{queue}.error")
    assert message.message_id == "one"
    assert message.exception is not None
    assert message.exception.rpartition(".")[2] == exception
    assert message.stack


async def test_an_unprintable_exception_is_parked_when_logging_fails(client: bide.Client) -> None:
    """Python prints what is wrong with a log's handler together with the exception that is being handled then."""
    queue, recorder = fresh("unlogged"), Recorder()
    app = bide.Endpoint(queue, error_queue=f"{queue}.error", observers=[recorder], retry=ONCE)

    @app.handler
    def fail(message: bide.Message) -> None:
        raise NotedError

    closed = StringIO()
    closed.close()
    broken, logger = logging.StreamHandler(closed), logging.getLogger("bide")
    logger.addHandler(broken)
    try:
        async with running(app, client, recorder):
            await client.publish(b"x", to=queue, message_id="one")
            await recorder.until("parked")
    finally:
        logger.removeHandler(broken)
    message = await parked(client, f"{queue}.error")
    assert message.exception is not None
    assert message.exception.rpartition(".")[2] == "NotedError"


async def test_a_handler_that_cancels_its_own_task_is_retried(client: bide.Client) -> None:
    queue, recorder = fresh("cancels"), Recorder()
    app = bide.Endpoint(queue, error_queue=f"{queue}.error", observers=[recorder], retry=ONCE)
    tries = 0

    @app.handler
    async def cancel(message: bide.Message) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(1)  # raises CancelledError

    async with running(app, client, recorder):
        await client.publish(b"x", to=queue)
        await recorder.until("processed")
    assert tries == 3


async def test_endless_immediate_retries_are_parked_with_the_exception(client: bide.Client) -> None:
    queue, recorder = fresh("now"), Recorder()
    app = bide.Endpoint(
        queue, error_queue=f"{queue}.error", observers=[recorder], retry=lambda failure: bide.RetryNow(), poison_after=4
    )

    @app.handler
    async def fail(message: bide.Message) -> None:
        raise ValueError("mine")

    async with running(app, client, recorder):
        await client.publish(b"x", to=queue)
        await recorder.until("parked")
    assert recorder.kinds() == ["failed"] * 3 + ["parked"]
    message = await parked(client, f"{queue}.error")
    assert (message.exception, message.text) == ("ValueError", "mine")


@pytest.mark.parametrize(
    "decision",
    [
        lambda: None,
        lambda: 1 / 0,
        lambda: bide.RetryLater("a while"),
        lambda: bide.RetryLater(timedelta(seconds=-1)),
        lambda: bide.RetryLater("400d"),
        lambda: bide.RetryLater(timedelta.max),
        lambda: bide.RetryLater(timedelta(days=999_999_999)),
        lambda: bide.Park(""),
        lambda: bide.Park(7),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
async def test_an_invalid_decision_parks_the_message(client: bide.Client, decision: Callable[[], Any]) -> None:
    queue, recorder = fresh("nonsense"), Recorder()
    app = bide.Endpoint(queue, error_queue=f"{queue}.error", observers=[recorder], retry=lambda failure: decision())

    @app.handler
    async def fail(message: bide.Message) -> None:
        raise ValueError("mine")

    async with running(app, client, recorder):
        await client.publish(b"x", to=queue)
        await recorder.until("parked")
    message = await parked(client, f"{queue}.error")
    assert (message.exception, message.text) == ("ValueError", "mine")


async def test_a_retry_after_the_expiration_is_not_sent(client: bide.Client) -> None:
    queue, recorder = fresh("late"), Recorder()
    longest = timedelta(days=999_999_999)
    app = bide.Endpoint(
        queue, error_queue=f"{queue}.error", observers=[recorder], retry=lambda _: bide.RetryLater(longest)
    )

    @app.handler
    async def fail(message: bide.Message) -> None:
        raise ValueError("mine")

    async with running(app, client, recorder):
        await client.publish(b"x", to=queue, expiration="1h")
        await recorder.until("expired")
    assert recorder.kinds() == ["expired"]


async def test_invalid_policies_observers_and_handlers_are_refused(client: bide.Client) -> None:
    async def decide(failure: bide.Failure) -> bide.Park:
        return bide.Park()

    for options, what in [
        ({"retry": bide.Retry}, "failure to a decision"),
        ({"retry": decide}, "async"),
        ({"observers": bide.EventStream()}, "list of observers"),
        ({"observers": [bide.EventStream]}, "list of observers"),
        ({"name": ""}, "endpoint"),
    ]:
        with pytest.raises(InvalidInputError, match=what):
            bide.Endpoint("q", **options)  # type: ignore[arg-type]  # wrong on purpose

    def lazy(message: bide.Message) -> Any:
        yield message

    async def lazy_too(message: bide.Message) -> Any:
        yield message

    app = bide.Endpoint("q")
    refused: list[tuple[Any, str]] = [(lazy, "generator"), (lazy_too, "generator"), (Recorder, "not a function")]
    for handler, what in refused:
        with pytest.raises(InvalidInputError, match=what):
            app.handler(handler)


async def test_delays_longer_than_the_infrastructure_allows_fail_at_the_start(client: bide.Client) -> None:
    app = bide.Endpoint(fresh("long"), retry=bide.Retry(delays=["1s", "19s"], jitter=0.1))
    app.handler(lambda message: None)
    with pytest.raises(InvalidDelayError, match=r"0:00:20\.9, .* holds at most 0:00:20"):
        await app.run(client)


async def test_in_flight_counts_messages_being_handled(client: bide.Client) -> None:
    queue, recorder, free = fresh("idle"), Recorder(), asyncio.Event()
    app = bide.Endpoint(queue, error_queue=f"{queue}.error", observers=[recorder], retry=ONCE)

    @app.handler
    async def wait(message: bide.Message) -> None:
        await free.wait()

    async with running(app, client, recorder):
        for _ in range(2):
            await client.publish(b"x", to=queue)

        async def number(expected: int) -> bool:
            return app.in_flight == expected

        await eventually(lambda: number(2))
        assert recorder.kinds() == []
        free.set()
        await recorder.until("processed", count=2)
        await eventually(lambda: number(0))
    assert app.in_flight == 0
