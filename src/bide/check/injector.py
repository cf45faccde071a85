"""Injection of planned faults, with a record of their beginnings and repairs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from bide.check.faults.fault import FaultSite
from bide.check.history import HistoryWriter, InjectedFault
from bide.check.plan import CheckPlan, PlannedFault
from bide.check.reference_clock import ReferenceClock
from bide.check.repair import make_whole
from bide.local_broker import LocalBroker

SETTLE_SECONDS: Final = 40
"""Seconds after a repair in which messages may still be late: a private broker resends an unconfirmed dead letter after
20 s, and may need a second attempt."""

_SECOND: Final = 1_000_000


class Injector:
    """The injector of a run's faults.

    Args:
        on_fault: called after each repair with a line of text.
    """

    def __init__(
        self,
        plan: CheckPlan,
        site: FaultSite,
        run: str,
        clock: ReferenceClock,
        writer: HistoryWriter,
        on_fault: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._site = site
        self._run = run
        self._clock = clock
        self._writer = writer
        self._on_fault = on_fault
        self._slots = asyncio.Semaphore(plan.at_once)
        self._last: LocalBroker | None = None
        self.count = 0

    async def inject_all(self, ending: asyncio.Event) -> None:
        """Inject faults until the run is ending; return when all of them are repaired."""
        async with asyncio.TaskGroup() as tasks:
            for planned in self._plan.planned_faults():
                try:
                    async with asyncio.timeout(planned.pause):
                        await ending.wait()
                    return
                except TimeoutError:
                    pass
                await self._slots.acquire()
                if ending.is_set():
                    return
                self.count += 1
                tasks.create_task(self._inject(self.count, planned)).add_done_callback(lambda _: self._slots.release())

    async def _inject(self, number: int, planned: PlannedFault) -> None:
        fault, site = planned.fault, self._site
        nodes = site.healthy_nodes() or list(enumerate(site.cluster.nodes, 1))
        chosen, node = nodes[int(planned.choice * len(nodes))]
        if fault.hits_node:
            # In a cluster one node stays without a fault, so that the others can be repaired.
            if len(site.cluster.nodes) - len(site.busy) <= (len(site.cluster.nodes) > 1):
                return
            site.busy.add(chosen)
        began = self._clock.now()
        manager = fault.inject(site, node)
        try:
            what = await asyncio.to_thread(manager.__enter__)
            try:
                await asyncio.sleep(planned.length)  # while the fault lasts
            finally:
                await asyncio.shield(asyncio.to_thread(manager.__exit__, None, None, None))
            if fault.hits_node:
                # While another node has a fault, the cluster cannot be whole. The last repair waits for all nodes.
                await asyncio.to_thread(make_whole, site.cluster, give_up=lambda: len(site.busy) > 1)
        finally:
            if fault.hits_node:
                site.busy.discard(chosen)
        ended = self._clock.now()
        length = (ended - began) / _SECOND
        step = fault.clock_step + fault.clock_rate * length
        # A node whose clock has drifted takes as long to correct it.
        settle = SETTLE_SECONDS + step + (length if fault.clock_rate else 0)
        self._writer.add(
            InjectedFault(
                run=self._run,
                number=number,
                kind=fault.name,
                what=what,
                began=began,
                ended=ended,
                # If the clock of the leader that stored a message is fast, the message is late under another leader.
                settled=ended + round(settle * _SECOND),
                late=fault.late,
                twice=fault.twice,
                clock_step=round(step * _SECOND),
            )
        )
        self._on_fault(f"{began / _SECOND:.1f} s: {fault.name} of {what}, repaired at {ended / _SECOND:.1f} s")
