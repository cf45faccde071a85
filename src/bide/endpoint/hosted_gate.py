"""The gate of the schedule log that an endpoint hosts."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bide.client.client import Client
from bide.delay.allowed_targets import AllowedTargets
from bide.endpoint.observer import Observer
from bide.errors import InvalidInputError
from bide.gate.observer import GateObserver

if TYPE_CHECKING:
    from bide.gate.worker import Gate


class HostedGate:
    """A gate that runs as long as its endpoint.

    Args:
        allow: patterns of the targets that schedules may name.
        state: the folder for the index; None uses a temporary one.

    Attributes:
        gate: the gate while it runs, or None.

    Raises:
        InvalidInputError: a pattern is invalid, or there are none.
    """

    def __init__(self, allow: Iterable[str], state: Path | str | None) -> None:
        self.gate: Gate | None = None
        self._allow = AllowedTargets.of((allow,) if isinstance(allow, str) else allow).patterns
        if not self._allow:
            raise InvalidInputError(
                "gate=True needs gate_allow=[...], patterns of the queues and exchanges that schedules may name; '*' "
                "allows any"
            )
        self._state = state

    @asynccontextmanager
    async def running(
        self, client: Client, *, declare: bool, observers: Sequence[Observer]
    ) -> AsyncIterator[asyncio.Task[object]]:
        """Run the gate on a connection of its own. At the end of the block it releases its partitions.

        The task ends early, with an error, if the gate cannot work.
        """
        # Imported here, so that endpoints without a gate start fast.
        from bide.gate.worker import Gate

        with ExitStack() as stack:
            state = self._state
            if state is None:
                state = stack.enter_context(tempfile.TemporaryDirectory(prefix="bide-gate-"))
            gate = self.gate = Gate(
                client.url,
                allow=self._allow,
                state=state,
                declare=declare,
                # The others, such as EventStream, observe only handlers: docs/schedules.md says so.
                observers=[one for one in observers if isinstance(one, GateObserver)],
            )
            task = asyncio.create_task(gate.run())
            try:
                yield task
            finally:
                gate.stop()
                await asyncio.wait({task})
                self.gate = None
                if not task.cancelled():
                    task.exception()
