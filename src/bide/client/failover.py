"""Failover to another host of the URL, from a node that answers or confirms nothing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Final, Literal

from bide.amqp.connection import Connection
from bide.amqp.url import address_of
from bide.errors import BideError
from bide.runtime.logs import logger

log = logger(__name__)

TICK: Final = 0.5
"""Seconds between two checks of a connection."""
PROBE_AFTER: Final = 3.0
"""Seconds without an answer, while a message or call waits for one, after which the node is probed."""
PROBE_ANSWER: Final = 3.0
"""Seconds to wait for the node's answer to the probe."""
LEAVE_AFTER: Final = 6.0
"""Seconds without an answer after which the client leaves the node, if another host is better."""
JITTER: Final = 1.3
"""``PROBE_AFTER`` and ``LEAVE_AFTER`` are multiplied by a random factor of 1 to ``JITTER``, so that the clients of a
node do not all leave it at once."""
TRIAL: Final = 10.0
"""Seconds to wait for confirms of another host. Electing a new leader of a quorum queue takes 5 to 11 s."""

FIRST_PAUSE: Final = 5.0
LONGEST_PAUSE: Final = 60.0
"""Seconds between two probes while the node does not answer, and after a move; randomised."""

Reason = Literal["silent", "unconfirmed"]
"""Why a node was left: it sent no byte, or it confirmed nothing while another host confirmed a message."""

moves: Final = Counter[Reason]()
"""The number of times that connections of this process left a node, by reason."""

Trial = Callable[[Connection], Awaitable[bool]]
"""Sends an unconfirmed message over a connection to another host, and returns whether that host confirms it."""


class Failover:
    """Watches a connection on which messages or calls wait for an answer.

    A node that was stopped or cut off from its clients sends nothing, not even an answer to a probe. The client leaves
    the node if another host accepts the client. A node that was cut off from the majority of its cluster answers probes
    and sends heartbeats, but confirms nothing for quorum queues. The client leaves the node if another host confirms
    one of the messages that wait for the node's confirm. The client does not leave a node that blocks publishers, nor
    one that confirms any message meanwhile, because that node is slow and not broken.

    The trial uses messages to several targets, because the target may be the reason why a message is not confirmed.
    The client leaves only after all of them are confirmed or refused, or after ``TRIAL``: the first message of a
    channel to a queue blocks the whole channel while the queue has no leader (``rabbit_fifo_client:enqueue``, RabbitMQ
    3.10 to 4.3).

    Args:
        trials: returns one ``Trial`` for each target to try; empty if no waiting message may be sent again.
        on_move: called with the new connection. It has to close the old one.
    """

    def __init__(self, trials: Callable[[], Sequence[Trial]], on_move: Callable[[Connection], None]) -> None:
        self._trials = trials
        self._on_move = on_move
        self._tick_handle: asyncio.TimerHandle | None = None
        self._examination: asyncio.Task[None] | None = None
        self._answers_seen = 0
        self._seconds_unanswered = 0.0
        self._probe_after = 0.0
        self._probe_pause = FIRST_PAUSE
        self._paused_until = 0.0

    def watch(self, connection: Connection) -> None:
        """Watch this connection while it is open."""
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        self._note_answer(connection)
        self._tick_handle = connection.loop.call_later(TICK, self._tick, connection)

    async def stop(self) -> None:
        """Stop watching."""
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        task, self._examination = self._examination, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})

    def _tick(self, connection: Connection) -> None:
        if not connection.is_open:
            return
        self._tick_handle = connection.loop.call_later(TICK, self._tick, connection)
        if self._is_healthy(connection):
            self._note_answer(connection)
            return
        # Ticks are counted, not seconds: a blocked event loop cannot receive anything.
        self._seconds_unanswered += TICK
        is_examined = self._examination is not None and not self._examination.done()
        if (
            self._seconds_unanswered >= self._probe_after
            and not is_examined
            and connection.loop.time() >= self._paused_until
        ):
            self._examination = connection.loop.create_task(self._examine(connection))

    def _is_healthy(self, connection: Connection) -> bool:
        return (
            connection.blocked_by is not None or not connection.is_waiting or connection.answers != self._answers_seen
        )

    def _note_answer(self, connection: Connection) -> None:
        self._answers_seen = connection.answers
        self._seconds_unanswered = 0.0
        self._probe_after = _jittered(PROBE_AFTER)
        connection.trouble = ""
        if connection.loop.time() >= self._paused_until + LONGEST_PAUSE:
            self._probe_pause = FIRST_PAUSE

    async def _examine(self, connection: Connection) -> None:
        """Find out whether the node is broken, and leave it if another host is better."""
        begun = connection.loop.time()
        connection.probe()
        other, reason = None, None
        try:
            other, failure = await self._other_host(connection)
            reason = await self._reason_to_leave(connection, other, begun=begun, failure=failure)
            if other is None or reason is None or not (connection.is_open and other.is_open):
                reason = None
                return
            log.warning("leaving the broker at %s for %s: %s", connection.address, other.address, connection.trouble)
            moves[reason] += 1
            self._on_move(other)
        finally:
            if reason is None and other is not None:
                await other.close()
            self._paused_until = connection.loop.time() + self._probe_pause * random.uniform(0.5, 1.0)  # noqa: S311 (jitter)
            self._probe_pause = min(self._probe_pause * 2, LONGEST_PAUSE)

    async def _other_host(self, connection: Connection) -> tuple[Connection | None, str]:
        """A connection to another host, or None and the reason why there is none."""
        url = connection.url
        hosts = tuple(one for one in url.hosts if address_of(*one) != connection.address)
        if not hosts:
            return None, ""
        # In random order, even with order=given: otherwise a first host that is broken too would be tried every time.
        others = replace(url, hosts=hosts, shuffle=True, timeout=timedelta(seconds=PROBE_ANSWER))
        try:
            other = await Connection.open(others)
        except BideError as error:
            return None, str(error)
        # With all hosts: the client may later have to move from this one to another.
        other.url = url
        return other, ""

    async def _reason_to_leave(
        self, connection: Connection, other: Connection | None, *, begun: float, failure: str
    ) -> Reason | None:
        """The reason to leave the node, or None to stay."""
        create_task = connection.loop.create_task
        trying = [] if other is None else [create_task(_succeeds(one, other)) for one in self._trials()]
        leave_after = _jittered(LEAVE_AFTER)
        try:
            while connection.is_open and not self._is_healthy(connection):
                is_silent = connection.heartbeat.received_at < begun
                seconds = connection.loop.time() - begun
                if self._seconds_unanswered >= leave_after and seconds >= PROBE_ANSWER:
                    connection.trouble = _trouble_text(connection, is_silent=is_silent, failure=failure)
                    if other is None or not other.is_open:
                        return None
                    if seconds >= TRIAL or all(one.done() for one in trying):
                        if is_silent:
                            return "silent"
                        if not any(one.done() and one.result() for one in trying):
                            return None
                        connection.trouble = (
                            f"the node at {connection.address} confirms nothing, and the one at {other.address} does"
                        )
                        return "unconfirmed"
                await asyncio.sleep(TICK)  # until the next check
            return None
        finally:
            for one in trying:
                one.cancel()
            if trying:
                await asyncio.wait(trying)


def _trouble_text(connection: Connection, *, is_silent: bool, failure: str) -> str:
    if is_silent:
        # RabbitMQ also falls silent before it closes a connection for an internal error, for three seconds per channel
        # that waits for a leader (channel_termination_timeout in rabbit_reader).
        return (
            f"the node at {connection.address} answers nothing at all: it is stopped or cannot be reached, or the "
            "majority of the cluster's nodes is lost; 'rabbitmqctl cluster_status' lists the nodes that run"
        )
    others = f", and no other host of the URL accepts the client ({failure})" if failure else ""
    cause = "most likely the majority of the cluster's nodes is lost"
    if len(connection.url.hosts) == 1:
        # AMQP does not show whether the node belongs to a cluster.
        cause = "it is overloaded, or it is one node of a cluster and the majority of the cluster's nodes is lost"
    return (
        f"the node at {connection.address} answers, but confirms and declares nothing{others}: {cause}; start the "
        "nodes that are down, or repair the network between them ('rabbitmqctl cluster_status' lists those that run)"
    )


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(1.0, JITTER)  # noqa: S311 (no secret)


async def _succeeds(trial: Trial, other: Connection) -> bool:
    """Whether the trial succeeds. Each attempt has a new channel: an old one may wait for a leader on a lost node."""
    try:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(PROBE_ANSWER):
                    return await trial(other)
    except BideError as error:
        log.debug("the trial of the broker at %s failed: %s", other.address, error)
        return False
