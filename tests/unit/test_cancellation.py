"""Cancellation of a handler that runs in its own task."""

from __future__ import annotations

import asyncio
import gc
import sys

import pytest

from bide.runtime.cancellation import outcome_apart


async def test_a_cancelled_caller_still_waits_for_the_handler_to_clean_up() -> None:
    """However often the one who waits for it is cancelled while it cleans up."""
    begun, cleaning = asyncio.Event(), asyncio.Event()
    steps: list[str] = []

    async def handler(_: object) -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)  # an await after the cancellation
                steps.append("ended")

    waiting = asyncio.create_task(outcome_apart(handler, None))
    await begun.wait()
    waiting.cancel()
    await cleaning.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert steps == ["ended"]


@pytest.mark.parametrize("when", ["at once", "when it is cancelled"])
def test_a_handler_that_calls_exit_leaves_no_unretrieved_exception(caplog: pytest.LogCaptureFixture, when: str) -> None:
    async def main() -> None:
        begun = asyncio.Event()

        async def handler(_: object) -> None:
            try:
                begun.set()
                await asyncio.sleep(0 if when == "at once" else 60)  # until it is cancelled
            finally:
                sys.exit(3)

        waiting = asyncio.create_task(outcome_apart(handler, None))
        await begun.wait()
        if when == "when it is cancelled":
            waiting.cancel()
        await waiting

    # What tests before this one have left may log when it is collected.
    gc.collect()
    caplog.clear()
    with pytest.raises(SystemExit):
        asyncio.run(main())
    gc.collect()
    assert [one.getMessage() for one in caplog.records] == []
