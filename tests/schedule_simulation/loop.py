"""An event loop in virtual time, for processes that can be frozen."""

from __future__ import annotations

import asyncio
import math
import random
import selectors
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from bide.testing.rules.clock import VirtualClock

_MICROSECONDS = 1_000_000

REAL_DISK = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where simulated gates have their indexes: in memory, if possible."""


@dataclass(slots=True, eq=False)
class FrozenCalls:
    """A process that stands still while it is frozen, as after SIGSTOP. All callbacks of its context wait then."""

    is_frozen: bool = False
    waiting: deque[Callable[[], object]] = field(default_factory=deque)


PROCESS: ContextVar[FrozenCalls | None] = ContextVar("PROCESS", default=None)


class _NoSelector(selectors.SelectSelector):
    """Lets virtual time pass instead of waiting. There is no input or output to wait for."""

    def __init__(self, wait: Callable[[float | None], None]) -> None:
        super().__init__()
        self._wait = wait

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._wait(timeout)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is that of a broker in memory. It never waits, and jumps to what is due next.

    What runs in threads elsewhere runs at once, so that a run depends on its seed alone. Its result comes later.

    Args:
        clock: of the broker.
        on_turn: called after each turn of the loop, between any two awaits: the place for kills.
    """

    def __init__(self, clock: VirtualClock, rng: random.Random, on_turn: Callable[[], None]) -> None:
        self._clock_of_broker = clock
        self._rng = rng
        self._on_turn = on_turn
        self._start = clock.microseconds
        super().__init__(_NoSelector(self._pass_time))

    def time(self) -> float:
        """Seconds since the loop was made."""
        return (self._clock_of_broker.microseconds - self._start) / _MICROSECONDS

    def _pass_time(self, timeout: float | None) -> None:
        self._on_turn()
        if timeout == 0:
            return
        clock = self._clock_of_broker
        due = clock.next_due
        if timeout is None and due is None:
            raise RuntimeError("nothing is left that could happen")
        microseconds = math.inf if timeout is None else max(math.ceil(timeout * _MICROSECONDS), 1)
        wait = timedelta.max if timeout is None else timedelta(microseconds=microseconds)
        clock.advance(wait if due is None else max(min(wait, due - clock.now()), timedelta(0)))

    def call_soon(  # type: ignore[override] # without the types of the arguments
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """See :class:`asyncio.AbstractEventLoop`."""
        process = _process(context)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        if process.is_frozen:
            handle = asyncio.Handle(callback, args, self, context)
            process.waiting.append(lambda: handle.cancelled() or super(SimulatedLoop, self).call_soon(handle._run))
            return handle
        return super().call_soon(callback, *args, context=context)

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # without the types of the arguments

    def call_at(  # type: ignore[override]  # without the types of the arguments
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See :class:`asyncio.AbstractEventLoop`."""
        process = _process(context)
        if process is None:
            return super().call_at(when, callback, *args, context=context)

        def call() -> None:
            if process.is_frozen:
                process.waiting.append(lambda: self.call_soon(call_unless_cancelled, context=context))
            else:
                callback(*args)

        def call_unless_cancelled() -> None:
            if not timer.cancelled():
                callback(*args)

        timer = super().call_at(when, call, context=context)
        return timer

    def thaw(self, process: FrozenCalls) -> None:
        """Let a process go on."""
        process.is_frozen = False
        while process.waiting:
            process.waiting.popleft()()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]  # without the types of the arguments
        """See :class:`asyncio.AbstractEventLoop`."""
        future = self.create_future()
        try:
            result, error = func(*args), None
        except Exception as raised:  # noqa: BLE001 (it is raised where the result is awaited)
            result, error = None, raised

        def settle() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self.call_later(self._rng.choice((0.0, 0.0, 0.0002, 0.002)), settle)
        return future


def _process(context: Context | None) -> FrozenCalls | None:
    if context is None:
        return PROCESS.get()
    values: Mapping[ContextVar[Any], Any] = context
    return values.get(PROCESS)
