"""Verification of the schedule log and of the gates that follow it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from bide.admin.declared import Redeclared, is_missing, redeclare_exchanges, redeclare_queues
from bide.admin.policies import policy_problems
from bide.admin.replication import queue_replication
from bide.admin.report import Check, Finding, judged, listed, unchecked, warned
from bide.admin.snapshot import count_each, take_schedule_snapshot
from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.durations import to_milliseconds
from bide.errors import BideError, BrokerError, ManagementApiError, NewerRecordError, ScheduleRecordError
from bide.management.api import ManagementApi
from bide.runtime.wording import quantity
from bide.schedules.encoding import decode
from bide.schedules.names import MAX_RESERVATIONS, PARTITIONS, ScheduleNames
from bide.schedules.records import Beat

_LISTEN: Final = 2.5
"""Seconds in which each gate appends two beats to each partition."""

_MAX_CLOCK_DIFFERENCE: Final = 1000
"""Milliseconds. The beats of a busy gate arrive late, so a smaller difference is not reported."""

_DECLARE: Final = "start a gate with bide.Gate(allow=[...]), which declares it if the whole log is missing"

_POLICY_FIXES: Final = {
    "policy": "change its pattern to leave the schedule log out; bide.admin.protection.protect(...) does so for all "
    "queues of the log except its streams",
    "operator policy": "no other policy can override it, so change its pattern to leave the schedule log out",
}

_RENAMED: Final[dict[Check, Check]] = {"replication": "schedule replication", "leaders": "schedule leaders"}


async def schedule_findings(
    connection: Connection, api: ManagementApi | None, names: ScheduleNames | None = None
) -> list[Finding]:
    """Check the schedule log; no findings if the virtual host has none.

    Args:
        connection: a connection to the virtual host.
        api: the management API of the same broker; None skips the checks that need it.
        names: the names of the log; None for those that clients use.

    Raises:
        BideError: the connection was lost.
    """
    names = names or ScheduleNames()
    topology = names.topology()
    exchanges = await redeclare_exchanges(connection, topology.exchanges)
    queues = await redeclare_queues(connection, topology.queues)
    if not exchanges.found and not queues.found:
        return []
    findings = [*_declared(exchanges, queues), *await _undeliverable(connection, names)]
    if api is None:
        findings.append(unchecked("schedule policies", "only the management API knows them"))
    else:
        try:
            findings += await _managed(connection, api, names)
        except ManagementApiError as error:
            findings.append(unchecked("schedule policies", str(error)))
    consumed, findings_of_gates = await _gates(connection, names)
    findings += findings_of_gates
    if consumed:
        streams = [one.name for one in queues.found if one.name in {names.log(number) for number in range(PARTITIONS)}]
        findings += await _clocks(connection, names, streams)
    return findings


def _declared(exchanges: Redeclared, queues: Redeclared) -> list[Finding]:
    found = [
        *exchanges.findings("schedule log", "exchanges", _DECLARE),
        *queues.findings("schedule log", "queues", _DECLARE),
    ]
    wrong = [one for one in found if one.status != "ok"]
    fine = f"{len(exchanges.found)} exchanges and {len(queues.found)} queues as they should be"
    return wrong or judged("schedule log", [], fine)


async def _managed(connection: Connection, api: ManagementApi, names: ScheduleNames) -> list[Finding]:
    """The checks that need the management API: bindings, policies, replication."""
    vhost = connection.url.vhost
    snapshot = await take_schedule_snapshot(api, vhost, names)
    there = set(snapshot.bindings)
    wanted = names.topology().bindings
    missing = [f"{one.source} -> {one.destination} ({one.routing_key})" for one in wanted if one not in there]
    findings: list[Finding] = []
    if missing:
        text = f"{len(missing)} of {len(wanted)} bindings are missing, {listed(missing)}: bind them again"
        findings += judged("schedule log", [text], "")
    problems = policy_problems(snapshot, snapshot.queues, connection.release, ways_out=_POLICY_FIXES)
    findings += judged("schedule policies", problems, f"no harmful policy on {quantity(len(snapshot.queues), 'queue')}")
    pattern = f"^{names.operations}.".replace(".", r"\.")
    replication = await queue_replication(snapshot.queues, api, vhost, pattern)
    return [*findings, *(replace(one, check=_RENAMED[one.check]) for one in replication)]


async def _undeliverable(connection: Connection, names: ScheduleNames) -> list[Finding]:
    (answer,) = await count_each(connection, [names.undeliverable])
    if is_missing(answer):
        return []
    if isinstance(answer, BrokerError):
        return [unchecked("schedule log", str(answer))]
    if not answer.message_count:
        return []
    text = (
        f"{quantity(answer.message_count, 'scheduled message')} in {names.undeliverable!r} found no target, or none "
        "that the gate may deliver to: list them with "
        f"bide.error_queues.ErrorQueue(client, queue={names.undeliverable!r}), create what is missing, and call "
        f"bide.error_queues.undeliverable.resend(queue={names.undeliverable!r}, allow=[...])"
    )
    return [warned("schedule log", text)]


async def _gates(connection: Connection, names: ScheduleNames) -> tuple[bool, list[Finding]]:
    """Whether a gate may lead a partition, and the findings about gates."""
    answers = await count_each(connection, [names.queries(number) for number in range(PARTITIONS)])
    unknown = [one for one in answers if isinstance(one, BrokerError) and not is_missing(one)]
    if unknown:
        return True, [unchecked("gates", str(unknown[0]))]
    led = [number for number, one in enumerate(answers) if not isinstance(one, BrokerError) and one.consumer_count]
    idle = [number for number in range(PARTITIONS) if number not in led]
    findings: list[Finding] = []
    if idle:
        findings.append(
            warned(
                "gates",
                f"no gate leads {len(idle)} of {PARTITIONS} partitions of {names.operations!r} "
                f"({', '.join(map(str, idle))}), so their messages are not delivered: call bide.Gate(allow=[...])",
            )
        )
    rooms = await count_each(connection, [names.room(number) for number in range(PARTITIONS)])
    full = [
        number
        for number, one in enumerate(rooms)
        if not isinstance(one, BrokerError) and one.message_count * 2 > MAX_RESERVATIONS
    ]
    if full:
        text = f"more than half of the room of the partitions {', '.join(map(str, full))} is taken"
        findings.append(warned("gates", f"{text}: check that a gate runs; scheduling is refused when it is full"))
    fine = Finding(check="gates", status="ok", text=f"all {PARTITIONS} partitions are led by a gate")
    return bool(led), findings or [fine]


async def _clocks(connection: Connection, names: ScheduleNames, streams: Sequence[str]) -> list[Finding]:
    """Compare the clocks in the beats of gates with each other and with the clock of this machine."""
    heard: dict[str, int] = {}
    channel = await connection.channel()

    def hear(delivery: Delivery) -> None:
        channel.ack(delivery.delivery_tag)
        if delivery.exchange != names.gates:
            return
        try:
            record = decode(delivery.body)
        except (NewerRecordError, ScheduleRecordError):
            return
        if isinstance(record, Beat):
            ahead = record.clock - to_milliseconds(connection.url.transport.now())
            # A beat takes time to arrive, which makes the clock look slow, so the fastest beat counts.
            heard[record.gate] = max(ahead, heard.get(record.gate, ahead))

    try:
        await channel.qos(100)
        for stream in streams:
            await channel.consume(stream, on_message=hear, on_end=_ignore, arguments={"x-stream-offset": "next"})
        await asyncio.sleep(_LISTEN)  # beats arrive meanwhile
    except BrokerError as error:
        if connection.lost.done():
            raise
        return [unchecked("gate clocks", str(error))]
    finally:
        channel.abandon()
    if not heard:
        return [unchecked("gate clocks", f"no gate has appended a beat within {_LISTEN} s")]
    clocks = {**heard, "this machine": 0}
    slowest, fastest = min(clocks, key=lambda one: clocks[one]), max(clocks, key=lambda one: clocks[one])
    difference = clocks[fastest] - clocks[slowest]
    problem = (
        f"the clock of {fastest} is {difference:,} ms ahead of that of {slowest}, so messages are delivered early or "
        "late: synchronise the clocks, for example by NTP"
    )
    fine = f"the clocks of {quantity(len(heard), 'gate')} and of this machine agree to {difference} ms"
    return judged("gate clocks", [problem] if difference > _MAX_CLOCK_DIFFERENCE else [], fine)


def _ignore(_: BideError) -> None:
    """Ignore a closed channel: the beats received so far count."""
