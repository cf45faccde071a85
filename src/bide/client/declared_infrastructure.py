"""The delay infrastructure of one connection: declared at first use, checked again later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from bide.admin.apply import apply, check_streams, counts_of, exists, is_into, names_in
from bide.admin.settling import settle
from bide.amqp.connection import Connection
from bide.client.addresses import REBIND_AFTER
from bide.client.growth import Growth
from bide.delay.protocol import DelayInfrastructure
from bide.errors import AccessRefusedError, NotAppliedError
from bide.runtime.logs import logger
from bide.runtime.shared_tasks import SharedTasks
from bide.topology import Binding, Exchange, Topology

log = logger(__name__)


class DeclaredInfrastructure:
    """Declares or checks the exchanges and queues that every delay needs.

    Args:
        infrastructure: the infrastructure in its variant for this broker's release.
        growth: declares the queues of digits; None if the infrastructure does not grow.
        declare: whether to declare missing items; if not, they are an error.
        tasks: shared tasks, so that concurrent callers share a declaration.
        on_core_declared: called when bindings of targets may be missing, because an exchange may be a new one.

    Attributes:
        is_ensured: whether :meth:`ensure` has nothing to do, according to the known state.
        recheck_at: when to call :meth:`require_recheck`, by the clock of the event loop.
    """

    def __init__(
        self,
        connection: Connection,
        infrastructure: DelayInfrastructure,
        growth: Growth | None,
        *,
        declare: bool,
        tasks: SharedTasks,
        on_core_declared: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._infrastructure = infrastructure
        self._growth = growth
        self._declare = declare
        self._tasks = tasks
        self._on_core_declared = on_core_declared
        self._core_declared = False
        self.is_ensured = False
        self.recheck_at = inf

    async def ensure(self) -> None:
        """Declare what is missing.

        Raises:
            NotAppliedError: the infrastructure is missing and may not be declared.
            UnsupportedBrokerError: the broker lacks a required feature.
            BrokerError: the broker refuses, or the connection was lost.
        """
        await self._tasks.run((self, "infrastructure"), self._ensure)

    def forget(self) -> None:
        """Declare the infrastructure again at its next use: it was deleted."""
        self.is_ensured = self._core_declared = False
        if self._growth is not None:
            self._growth.forget()

    def require_recheck(self, now: float) -> None:
        """Check the queues and bindings of a growing infrastructure again at their next use.

        Args:
            now: the time by the clock of the event loop.
        """
        if self._growth is not None:
            self._growth.ready.reset()
            self.is_ensured = False
        self.recheck_at = now + REBIND_AFTER.total_seconds()

    async def _ensure(self) -> None:
        probes = self._infrastructure.probes()
        is_complete = await exists(self._connection, probes)
        if self._growth is not None:
            await self._ensure_core(self._growth, is_complete=is_complete)
            self._growth.is_complete = is_complete
            self.recheck_at = self._connection.loop.time() + REBIND_AFTER.total_seconds()
        elif is_complete:
            await self._redeclare_probe_bindings(probes)
        elif self._declare:
            await check_streams(self._connection, prefix=self._infrastructure.delivery_exchange)
            topology = self._infrastructure.topology()
            log.info("declaring the delay infrastructure %s: %s", self._infrastructure.name, counts_of(topology))
            await apply(self._connection, topology, last=probes, can_move=False)
            await settle(self._connection, prefix=self._infrastructure.delivery_exchange, can_move=False)
        else:
            raise NotAppliedError(
                f"the delay infrastructure {self._infrastructure.name!r} is not on the virtual host "
                f"{self._connection.url.vhost!r} of {self._connection.address}: call "
                "bide.admin.infrastructure.install(...), or connect with declare=True"
            )
        self.is_ensured = True

    async def _ensure_core(self, growth: Growth, *, is_complete: bool) -> None:
        """Declare the core topology, or only its bindings if its exchanges and queues exist."""
        was_there = is_complete or self._core_declared
        is_there = was_there and await exists(self._connection, Topology(growth.core.exchanges, growth.core.queues))
        if is_there and self._core_declared:
            return
        if not is_there:
            reason = "exchanges or queues that every delay needs are missing" if was_there else ""
            await self._declare_core(growth, reason)
        elif self._declare:
            await self._redeclare_bindings(growth.core.bindings)
        self._core_declared = True
        # Deleting an exchange also deletes the bindings of targets.
        self._on_core_declared()

    async def _declare_core(self, growth: Growth, reason: str) -> None:
        if not self._declare:
            raise growth.not_applied(reason)
        delivery = self._infrastructure.delivery_exchange
        try:
            if not await exists(self._connection, Topology([Exchange(delivery)])):
                await check_streams(self._connection, prefix=delivery)
            log.info("declaring the delay infrastructure %s: %s", self._infrastructure.name, counts_of(growth.core))
            await apply(self._connection, growth.core, can_move=False)
        except AccessRefusedError as error:
            raise growth.not_applied(reason or str(error)) from error

    async def _redeclare_probe_bindings(self, probes: Topology) -> None:
        """Declare the bindings of the probes: the probes are declared last, so nothing else can be missing."""
        if not self._declare:
            return
        queues = {one.name for one in probes.queues}
        await self._redeclare_bindings(one for one in self._infrastructure.topology().bindings if is_into(one, queues))

    async def _redeclare_bindings(self, bindings: Iterable[Binding]) -> None:
        """Declare bindings of the infrastructure again, if this user has the permission."""
        topology = Topology(bindings=bindings)
        try:
            await apply(self._connection, topology, external=names_in(topology), can_move=False)
        except AccessRefusedError as error:
            log.debug("the existing delay infrastructure is used unchanged: %s", error)
