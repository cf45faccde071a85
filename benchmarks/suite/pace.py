"""Sending at an even rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator


def paced(rate: float, seconds: float) -> Iterator[int]:
    """Numbers from 0 on, each when its turn comes; a sender that has fallen behind gets the next ones at once."""
    start = time.perf_counter()
    for number in range(round(rate * seconds)):
        pause = start + number / rate - time.perf_counter()
        if pause > 0:
            time.sleep(pause)
        yield number


async def paced_async(rate: float, seconds: float) -> AsyncIterator[int]:
    """The same in an event loop."""
    start = time.perf_counter()
    for number in range(round(rate * seconds)):
        pause = start + number / rate - time.perf_counter()
        if pause > 0:
            await asyncio.sleep(pause)
        yield number
