"""A run of ``bide check``, from preparing the cluster to writing the history."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Final

from bide.admin.infrastructure import install
from bide.admin.schedule_log import ensure_schedule_log
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.check.faults.fault import Cluster, FaultSite
from bide.check.foreign import ForeignCluster
from bide.check.history import UNDELIVERABLE, HistoryWriter, RunRecord, next_run
from bide.check.injector import Injector
from bide.check.plan import FAULTS, WORKLOADS, CheckPlan
from bide.check.recorder import Recorder
from bide.check.repair import replace_dead_letter_workers
from bide.check.site import VHOST
from bide.check.workloads.base import PREFETCH, CheckWorkload, Stage
from bide.client.client import Client, connect
from bide.delay.clock import Clock
from bide.errors import DeliveryLostError, InvalidInputError
from bide.runtime.logs import logger
from bide.schedules.names import ScheduleNames

_RESOLUTION: Final = "50ms"
_LEAST: Final = timedelta(seconds=5)
"""The least ``max_delay`` of the run's ``Clock``: longer than the delays of the workload ``retries``."""

_STUCK_SECONDS: Final = 90.0
"""Seconds after which messages that have not arrived are stuck. A node that was killed last starts meanwhile, and a
private broker resends an unconfirmed dead letter after 20 s."""

_STRAY_SECONDS: Final = 3.0
"""Seconds to wait for unwanted copies, in addition to the longest delay, after everything has arrived."""


async def run_check(
    plan: CheckPlan,
    cluster: Cluster | ForeignCluster,
    folder: Path,
    working: Path,
    *,
    again: bool = False,
    on_event: Callable[[str], None] = lambda text: None,
) -> RunRecord:
    """Run the plan on a cluster, and write the history into a new subfolder.

    Args:
        folder: the folder of the history.
        working: the folder for logs and state of gates and relays.
        again: whether *folder* may have runs already.
        on_event: called with a line of text after each repair and at the end of sending.

    Raises:
        InvalidInputError: *folder* has other files or unexpected runs, or the plan needs network namespaces that the
            cluster does not have, or has faults although bide did not start the cluster.
        BideError: the cluster failed in a way that was not planned.
    """
    if isinstance(cluster, ForeignCluster):
        plan.check_no_faults()
    elif plan.needs("namespaces") and not cluster.has_namespaces:
        raise InvalidInputError("partitions need a cluster in network namespaces: start it with --namespaces")
    name = next_run(folder, again=again)
    if isinstance(cluster, ForeignCluster):
        url = cluster.url
    else:
        url = cluster.nodes[0].add_vhost(VHOST) and cluster.vhost_url(VHOST)
    record = RunRecord(
        run=name,
        seed=plan.seed,
        release=cluster.release,
        nodes=len(cluster.nodes),
        seconds=plan.duration.total_seconds(),
        settings={key: _text(value) for key, value in asdict(plan).items()},
    )
    with HistoryWriter(folder / name) as writer:
        record.save(folder / name)
        recorder = Recorder(name, writer)
        with _log_file(folder / name / "log.txt"), _first_error():
            await _CheckRun(plan, cluster, url, recorder, writer, working, on_event).execute()
    record = replace(record, finished=True, clock_drift=recorder.clock.drift, clock_change=recorder.clock_change)
    record.save(folder / name)
    return record


@contextmanager
def _first_error() -> Iterator[None]:
    """Raise the first error of an exception group in place of the group."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Write bide's log to a file only, because faults and planned errors fill it with warnings."""
    ours = logger("bide")
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours.addHandler(handler)
    ours.propagate = False
    try:
        yield
    finally:
        ours.propagate = True
        ours.removeHandler(handler)
        handler.close()


class _CheckRun:
    def __init__(
        self,
        plan: CheckPlan,
        cluster: Cluster | ForeignCluster,
        url: str,
        recorder: Recorder,
        writer: HistoryWriter,
        working: Path,
        on_event: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._cluster = cluster
        self._url = url
        self._recorder = recorder
        self._writer = writer
        self._working = working
        self._on_event = on_event
        self._clock = Clock(max_delay=max(plan.longest, _LEAST), resolution=_RESOLUTION)
        self._ending = asyncio.Event()

    async def execute(self) -> None:
        """Run the plan."""
        await self._install()
        async with connect(self._url, infrastructure=self._clock) as client, AsyncExitStack() as closing:
            workloads = [self._make(name, client) for name in self._plan.workloads]
            for one in workloads:
                closing.push_async_callback(one.close)
                await client.declare(one.topology())
                for queue in one.queues:
                    await client.bind(queue)
                await one.prepare()
            async with asyncio.TaskGroup() as tasks:
                background = [
                    *(tasks.create_task(one.receive()) for one in workloads),
                    *(tasks.create_task(self._receive_undeliverable(client, name)) for name in self._undeliverable()),
                    *(tasks.create_task(process.run()) for one in workloads for process in one.processes),
                ]
                for one in workloads:
                    await one.warm_up()
                await self._send(workloads)
                for one in workloads:
                    await one.finish()
                await self._drain()
                for task in background:
                    task.cancel()

    def _make(self, name: str, client: Client) -> CheckWorkload:
        stage = Stage(
            url=self._url,
            management_url=self._cluster.management_url,
            client=client,
            infrastructure=self._clock,
            recorder=self._recorder,
            rng=random.Random(f"{self._plan.seed} {name}"),  # noqa: S311 (repeatable, not secret)
            rate=self._plan.rate / len(self._plan.workloads),
            longest=self._plan.longest,
            ending=self._ending,
            folder=self._working,
        )
        return WORKLOADS[name](stage)

    async def _install(self) -> None:
        connection = await Connection.open(BrokerUrl.parse(self._url))
        try:
            await install(connection, self._clock)
            if "gate" in self._plan.workloads:
                await ensure_schedule_log(connection, ScheduleNames())
        finally:
            await connection.close()

    def _undeliverable(self) -> Sequence[str]:
        return [self._clock.undeliverable, *([ScheduleNames().undeliverable] if "gate" in self._plan.workloads else [])]

    async def _send(self, workloads: Sequence[CheckWorkload]) -> None:
        """Send messages and inject faults for the duration of the plan."""
        async with asyncio.TaskGroup() as tasks:
            for one in workloads:
                tasks.create_task(one.send())
            if not isinstance(self._cluster, ForeignCluster):
                tasks.create_task(self._injector(self._cluster, workloads).inject_all(self._ending))
            await asyncio.sleep(self._plan.duration.total_seconds())  # the workloads send meanwhile
            self._ending.set()
        self._on_event(f"sent to {self._recorder.sent:,} queues; {self._recorder.missing:,} messages have to arrive")

    def _injector(self, cluster: Cluster, workloads: Sequence[CheckWorkload]) -> Injector:
        site = FaultSite(
            cluster=cluster,
            vhost=VHOST,
            rng=random.Random(f"{self._plan.seed} faults"),  # noqa: S311 (repeatable, not secret)
            processes=[process for one in workloads for process in one.processes],
        )
        return Injector(self._plan, site, self._recorder.run, self._recorder.clock, self._writer, self._on_event)

    async def _drain(self) -> None:
        """Wait for messages that have to arrive, and then for unwanted copies."""
        step = max((FAULTS[name].clock_step for name in self._plan.faults), default=0.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._plan.patience.total_seconds() + step):
                try:
                    async with asyncio.timeout(_STUCK_SECONDS + step):
                        await self._recorder.until_complete()
                except TimeoutError:
                    await self._release_stuck()
                    await self._recorder.until_complete()
        await asyncio.sleep(self._plan.longest.total_seconds() + _STRAY_SECONDS)  # unwanted copies arrive meanwhile

    async def _release_stuck(self) -> None:
        """Do what docs/clusters.md advises for messages that stay in a delay queue."""
        if not isinstance(self._cluster, ForeignCluster):
            await asyncio.to_thread(replace_dead_letter_workers, self._cluster)
            self._on_event(
                f"replaced the dead-letter workers, because {self._recorder.missing:,} messages did not arrive"
            )

    async def _receive_undeliverable(self, client: Client, queue: str) -> None:
        async with client.consume(queue, prefetch=PREFETCH) as messages:
            async for message in messages:
                self._recorder.add_delivered(message, UNDELIVERABLE)
                with suppress(DeliveryLostError):
                    await message.ack()


def _text(value: object) -> object:
    return str(value) if not isinstance(value, (int, float, str, tuple)) else value
