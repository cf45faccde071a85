"""Declaring the queues of a delay infrastructure that grows with use, on one connection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from bide.admin.apply import apply, exists, names_in
from bide.admin.settling import settle
from bide.amqp import codec
from bide.amqp.connection import Connection
from bide.delay.clock_digits import Digit
from bide.delay.growing import Growing, ReadyDigits
from bide.delay.protocol import DelayInfrastructure
from bide.errors import AccessRefusedError, BideError, BrokerError, NotAppliedError
from bide.runtime.logs import logger
from bide.runtime.shared_tasks import SharedTasks
from bide.topology import Topology

log = logger(__name__)


class Growth:
    """Declares the queue and the binding of a digit before the first message that needs them.

    Digits that are needed while a declaration runs are declared together after it.

    Args:
        infrastructure: an infrastructure that grows, in its variant for this broker's release.
        tasks: shared tasks, so that a declaration serves all callers that wait for it.
        declare: whether to declare missing items; if not, they are an error.

    Attributes:
        ready: the digits whose queues and bindings exist.
        is_complete: whether the broker has the mark of ``bide delay apply``. If so, every existing queue is bound, and
            keeps its messages when its node is killed.
    """

    def __init__(
        self, connection: Connection, infrastructure: DelayInfrastructure, tasks: SharedTasks, *, declare: bool
    ) -> None:
        growing = infrastructure.growing()
        assert growing is not None
        self.is_complete = False
        self._connection = connection
        self._infrastructure = infrastructure
        self._growing = growing
        self.ready = ReadyDigits(growing, codec.field_value)
        self._declare = declare
        self._settled: set[Digit] = set()
        self._wanted_digits: set[Digit] = set()
        self._tasks = tasks

    @property
    def core(self) -> Topology:
        """The topology that is declared before any digit."""
        return self._growing.core_topology()

    def forget(self) -> None:
        """Declare everything again before its next use."""
        self.is_complete = False
        self._settled.clear()
        self.ready.reset()

    async def ensure(self, digits: Iterable[Digit]) -> None:
        """Wait until the queues and bindings of these digits exist.

        Raises:
            NotAppliedError: a queue is missing and may not be declared.
            BrokerError: the broker refuses, or the connection was lost.
        """
        missing = self.ready.missing(digits)
        while missing:
            self._wanted_digits.update(missing)
            failed = await self._tasks.run(self, self._declare_wanted)
            for one in missing:
                if one in failed:
                    raise failed[one]
            missing = self.ready.missing(missing)

    async def _declare_wanted(self) -> Mapping[Digit, BideError]:
        """Declare the digits wanted by now, and return the errors of those that failed."""
        # Let other publishes of this iteration of the event loop add their digits.
        await asyncio.sleep(0)
        digits, self._wanted_digits = self._wanted_digits, set()
        failed: dict[Digit, BideError] = {}
        try:
            await self._declare_digits(digits)
        except BideError as error:
            if len(digits) == 1 or not isinstance(error, BrokerError) or not self._connection.is_open:
                return dict.fromkeys(digits, error)
            # A queue that cannot be declared must not stop the others, so each is declared separately.
            for one in digits:
                try:
                    await self._declare_digits({one})
                except BideError as single:
                    failed[one] = single
        for one in digits.difference(failed):
            self.ready.add(one)
        return failed

    async def _declare_digits(self, digits: set[Digit]) -> None:
        known = digits if self.is_complete else digits & self._settled
        if known and not await exists(self._connection, _queues_of(self._growing, known)):
            # It is not known which queue is missing, so all are declared. Declaring an existing queue changes nothing.
            known = set()
        # The mark of 'bide delay apply' does not cover bindings for routing keys with more words than the core
        # topology binds.
        known = {one for one in known if one in self._settled or self._growing.has_core_bindings(one.padding)}
        rest = digits - known
        if rest:
            if not self._declare and not self.is_complete:
                raise self.not_applied()
            await self._declare_queues(rest)
        # Another client may have declared a known queue again, but only with bindings for keys of another word count.
        wanted = self._growing.digit_topology(digits if self._declare else rest)
        bindings = Topology(bindings=wanted.bindings)
        try:
            if len(bindings):
                await apply(self._connection, bindings, external=names_in(bindings), can_move=False)
        except AccessRefusedError:
            if rest or not self.is_complete:
                raise
        self._settled |= rest
        if rest:
            log.debug("the delay queues %s are ready", _names_text(_queues_of(self._growing, rest)))

    async def _declare_queues(self, digits: set[Digit]) -> None:
        """Declare the queues of digits and make them survive a crash. The caller binds them afterwards, so they hold no
        messages yet."""
        queues = _queues_of(self._growing, digits)
        if not self._declare:
            if not await exists(self._connection, queues):
                raise self.not_applied(f"queues that a delay needs are missing, among {_names_text(queues)}")
        elif queues.queues:
            log.info("declaring the delay queues %s", _names_text(queues))
            try:
                await apply(self._connection, queues, external=names_in(queues), can_move=False)
                await settle(self._connection, prefix=self._infrastructure.delivery_exchange, can_move=False)
            except AccessRefusedError as error:
                if not (self.is_complete and await exists(self._connection, queues)):
                    raise self.not_applied(str(error)) from error

    def not_applied(self, reason: str = "") -> NotAppliedError:
        """The error for a client that may not declare what is missing."""
        return NotAppliedError(
            f"the delay infrastructure {self._infrastructure.name!r} is not complete on the virtual host "
            f"{self._connection.url.vhost!r} of {self._connection.address}{reason and f' ({reason})'}: call "
            "bide.admin.infrastructure.install(...) with the same settings, as a user who may declare it, or connect "
            "with declare=True as such a user"
        )


def _queues_of(growing: Growing, digits: Iterable[Digit]) -> Topology:
    return Topology(queues=growing.digit_topology(digits).queues)


def _names_text(queues: Topology) -> str:
    names = [repr(one.name) for one in queues.queues]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
