"""Numbers without a unit are refused as delays everywhere, with the text to give instead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

import bide
import bide.testing
from bide.cli.app import run
from bide.errors import InvalidInputError
from bide.messages.prepared import check_message
from bide.schedules.recurrence import Recurrence
from tests.timeouts import TIMEOUT

Call = Callable[[Any], object]

CALLS: dict[str, Call] = {
    "publish(delay=)": lambda value: check_message(bide.OutgoingMessage(b"", to="q", delay=value)),
    "publish(expiration=)": lambda value: check_message(bide.OutgoingMessage(b"", to="q", expiration=value)),
    "Clock(max_delay=)": lambda value: bide.Clock(max_delay=value),
    "Clock(resolution=)": lambda value: bide.Clock(resolution=value),
    "WaitingHall(resolution=)": lambda value: bide.WaitingHall(resolution=value),
    "connect(timeout=)": lambda value: bide.connect("amqp://h", timeout=value),
    "connect(wait=)": lambda value: bide.connect("amqp://h", wait=value),
    "schedule(every=)": lambda value: Recurrence.of(value, now=datetime.now(UTC)),
    "Retry(delays=)": lambda value: bide.Retry(delays=[value]),
    "Retry(give_up_after=)": lambda value: bide.Retry(give_up_after=value),
    "RetryLater": bide.RetryLater,
    "linear": lambda value: bide.linear(value, times=2),
    "exponential": lambda value: bide.exponential(value, times=2),
    "Endpoint(deduplicate=)": lambda value: bide.Endpoint("q", deduplicate=value),
    "Endpoint(drain=)": lambda value: bide.Endpoint("q", drain=value),
}


@pytest.mark.parametrize("value", [5, 2.5, "5"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_number_is_refused_with_the_text_in_seconds(call: Call, value: object) -> None:
    with pytest.raises(InvalidInputError, match=f"has no unit: give '{value}s' if it is in seconds"):
        call(value)


async def test_consumers_refuse_numbers_too() -> None:
    async with bide.testing.broker() as broker, broker.connect() as client:
        with pytest.raises(InvalidInputError, match="give '5s'"):
            client.consume("q", timeout=5)  # type: ignore[arg-type]  # wrong on purpose


def test_the_thread_of_a_synchronous_client_refuses_them_too() -> None:
    with bide.testing.MemoryBroker() as broker, broker.connect_sync() as client:
        with pytest.raises(InvalidInputError, match="give '5s'"):
            client.wait_for(client.client.release(), timeout=5)  # type: ignore[arg-type]  # wrong on purpose
        with pytest.raises(TimeoutError):
            client.wait_for(asyncio.sleep(TIMEOUT), timeout="10ms")  # never ends in time


def test_the_command_line_refuses_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["delay", "explain", "5", "--to", "q"]) == 2
    assert "give '5s'" in capsys.readouterr().err
