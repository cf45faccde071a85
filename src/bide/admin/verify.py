"""Verification of a delay infrastructure on a broker, with a fix for each problem."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Final

from bide.admin.apply import MINIMUM_RELEASE, check_release, check_streams, exists
from bide.admin.declared import is_missing, redeclare_exchanges, redeclare_queues
from bide.admin.infrastructure import Guarded
from bide.admin.locate import private_broker
from bide.admin.node_findings import node_findings
from bide.admin.nservicebus_targets import nservicebus_targets
from bide.admin.policies import policy_findings
from bide.admin.protection import protection_findings
from bide.admin.replication import replication_findings
from bide.admin.report import Check, Finding, VerifyReport, judged, listed, unchecked
from bide.admin.schedule_findings import schedule_findings
from bide.admin.snapshot import Snapshot, count_each, find_owned, take_snapshot
from bide.admin.taps import bound_taps, tap_findings, unseen_taps
from bide.admin.target_findings import delivery_limit_findings, target_findings
from bide.admin.unbound import unbound_problem
from bide.amqp.connection import Connection
from bide.delay.cross_delivery import foreign_suffix_bindings
from bide.delay.growing import Growing
from bide.delay.protocol import DelayInfrastructure
from bide.errors import (
    BrokerError,
    LocalBrokerError,
    ManagementApiError,
    UnsupportedBrokerError,
)
from bide.management.api import ManagementApi
from bide.runtime.wording import quantity
from bide.topology import Binding, Topology

DEFAULT_PREFETCH: Final = 32
_FEATURE_FLAGS: Final = ("quorum_queue", "stream_queue")
_PREFETCH_SETTING: Final = "dead_letter_worker_consumer_prefetch"
_STUCK_SECONDS: Final = 16.0
"""How long a count must stay above 0 before its messages are called stuck. On a busy broker some messages are always
in transit. A quorum queue updates its counts every 5 seconds, and the management API collects them every 5 seconds: a
count may be 10.5 seconds old, and older on a busy machine."""

_RECHECK_AFTER: Final = 1.0
"""Seconds between two checks for stuck messages."""

_MANAGEMENT_CHECKS: Final[tuple[Check, ...]] = (
    "bindings",
    "policies",
    "targets",
    "delivery limits",
    "replication",
    "node releases",
    "node clocks",
    "stuck messages",
)
"""Checks that need the management API."""

_APPLY_HINT: Final = "call bide.admin.infrastructure.install(...) with the same settings"


async def verify(
    connection: Connection, infrastructure: DelayInfrastructure, api: ManagementApi | None
) -> VerifyReport:
    """Run all checks.

    Checks that need the management API are reported as not checked if the API does not answer.

    Args:
        connection: a connection to the virtual host.
        infrastructure: the infrastructure, with the settings that it should have.
        api: the management API of the same broker; None skips the checks that need it.

    Raises:
        BideError: the connection was lost.
    """
    vhost = connection.url.vhost
    findings = [_check_release(connection)]
    snapshot, finding = await _take_snapshot(api, vhost, infrastructure)
    findings.append(finding)
    why = f"only the management API knows: {finding.text}"
    findings += await _check_feature_flags(connection, api if snapshot else None)
    growing = await _still_growing(connection, infrastructure)
    findings += await _check_declared(connection, infrastructure, growing)
    findings += await _check_relays(connection, infrastructure)
    if snapshot is None:
        findings += [unchecked(check, why) for check in _MANAGEMENT_CHECKS]
        findings += await unseen_taps(connection, infrastructure, why)
        findings += await _check_undeliverable(connection, infrastructure)
    else:
        assert api is not None
        findings += await _check_bindings(snapshot, api, vhost, infrastructure, growing)
        findings += policy_findings(snapshot, infrastructure, connection.release)
        findings += protection_findings(snapshot, infrastructure)
        findings += target_findings(snapshot, infrastructure)
        findings += delivery_limit_findings(snapshot, infrastructure, connection.release)
        findings += _check_guard(snapshot, infrastructure)
        findings += _check_cross_delivery(snapshot, infrastructure)
        findings += tap_findings(snapshot, infrastructure)
        findings += await replication_findings(snapshot, api, vhost, infrastructure)
        findings += await node_findings(connection, api)
        findings += await nservicebus_targets(snapshot, api, vhost, infrastructure, connection.release)
        findings += await _check_stuck(snapshot, api, vhost, infrastructure)
        findings += await _check_undeliverable(connection, infrastructure)
    findings += await schedule_findings(connection, api if snapshot else None)
    findings += await _check_prefetch(connection)
    return VerifyReport(
        layout=infrastructure.name,
        broker=connection.address,
        vhost=vhost,
        release=".".join(map(str, connection.release)),
        findings=tuple(findings),
    )


def _check_release(connection: Connection) -> Finding:
    release = ".".join(map(str, connection.release))
    minimum = ".".join(map(str, MINIMUM_RELEASE))
    try:
        check_release(connection)
    except UnsupportedBrokerError as error:
        return Finding(check="release", status="problem", text=str(error))
    return Finding(check="release", status="ok", text=f"RabbitMQ {release}, at least {minimum} is needed")


async def _take_snapshot(
    api: ManagementApi | None, vhost: str, infrastructure: DelayInfrastructure
) -> tuple[Snapshot | None, Finding]:
    if api is None:
        return None, unchecked("management API", "it was not asked")
    try:
        snapshot = await take_snapshot(api, vhost, infrastructure)
    except ManagementApiError as error:
        return None, unchecked("management API", str(error))
    return snapshot, Finding(check="management API", status="ok", text=f"answers at {api.address}")


async def _check_feature_flags(connection: Connection, api: ManagementApi | None) -> list[Finding]:
    if api is not None:
        try:
            flags = await api.feature_flags()
        except ManagementApiError:
            flags = {}
        if flags:
            # Since 4.0 some of these features are always enabled and have no flag.
            off = [name for name in _FEATURE_FLAGS if flags.get(name, "enabled") != "enabled"]
            return judged(
                "feature flags",
                (
                    f"the feature flag {name} is {flags[name]}, without which dead-lettering may lose messages: run "
                    f"'rabbitmqctl enable_feature_flag {name}'"
                    for name in off
                ),
                f"{' and '.join(_FEATURE_FLAGS)} are on",
            )
    try:
        await check_streams(connection)
    except UnsupportedBrokerError as error:
        return [Finding(check="feature flags", status="problem", text=str(error))]
    except BrokerError as error:
        return [unchecked("feature flags", str(error))]
    return [Finding(check="feature flags", status="ok", text="stream_queue is on")]


async def _still_growing(connection: Connection, infrastructure: DelayInfrastructure) -> Growing | None:
    """The infrastructure, if clients declare its queues at first use and not all of them were declared in advance."""
    growing = infrastructure.growing()
    if growing is None or await exists(connection, Topology([growing.complete_mark])):
        return None
    return growing


async def _check_declared(
    connection: Connection, infrastructure: DelayInfrastructure, growing: Growing | None
) -> list[Finding]:
    """Check over AMQP whether each item exists, and whether declaring it again is accepted."""
    topology = infrastructure.topology()
    exchanges = await redeclare_exchanges(connection, topology.exchanges)
    findings = exchanges.findings("exchanges", "exchanges", _APPLY_HINT)
    queues = await redeclare_queues(connection, topology.queues)
    if growing is None:
        return [*findings, *queues.findings("queues", "queues", _APPLY_HINT)]
    core, found = growing.core_topology().queues, queues.found
    needed = [one for one in topology.queues if one in found or one in core]
    fine = f"{len(found)} as they should be; the others of {len(topology.queues)} are declared when they are first used"
    return [*findings, *queues.findings("queues", "queues", _APPLY_HINT, needed=needed, fine=fine)]


async def _check_relays(connection: Connection, infrastructure: DelayInfrastructure) -> list[Finding]:
    """Check whether the queues for relays have a consumer."""
    if not infrastructure.relay_queues:
        return []
    queues = infrastructure.relay_queues
    answers = await count_each(connection, queues)
    relays: list[int] = []
    idle: list[str] = []
    waiting = 0
    for queue, answer in zip(queues, answers, strict=True):
        if is_missing(answer):
            continue
        if isinstance(answer, BrokerError):
            return [unchecked("relays", str(answer))]
        relays.append(answer.consumer_count)
        if not answer.consumer_count:
            idle.append(queue)
            waiting += answer.message_count
    problem = (
        f"no relay consumes from {listed(idle)}, where {quantity(waiting, 'message waits', 'messages wait')}: call "
        "bide.Relay(allow=[...]) with the same settings, and allow each target that it may deliver to"
    )
    return judged("relays", [problem] if idle else [], f"{min(relays)} at work") if relays else []


async def _check_bindings(
    snapshot: Snapshot, api: ManagementApi, vhost: str, infrastructure: DelayInfrastructure, growing: Growing | None
) -> list[Finding]:
    wanted: Sequence[Binding] = infrastructure.topology().bindings
    there = set(snapshot.bindings)
    unbound = None
    if growing is not None:
        # Clients add bindings for routing keys with more words before they publish the first such message.
        wanted = [*growing.core_topology().bindings, *(one for one in wanted if one in there)]
        wanted = list(dict.fromkeys(wanted))
        unbound = await unbound_problem(snapshot, api, vhost, infrastructure)
    missing = [_binding_text(one) for one in wanted if one not in there]
    problems = (
        [f"{len(missing)} of {len(wanted)} bindings are missing, {listed(missing)}: {_APPLY_HINT}"] if missing else []
    )
    return judged("bindings", filter(None, [*problems, unbound]), f"{len(wanted)} as they should be")


def _binding_text(binding: Binding) -> str:
    return f"{binding.source} -> {binding.destination} ({binding.routing_key})"


def _check_guard(snapshot: Snapshot, infrastructure: DelayInfrastructure) -> list[Finding]:
    topology = infrastructure.topology()
    names = [one.name for one in topology.exchanges if one.name in snapshot.exchanges]
    if not isinstance(infrastructure, Guarded):
        # The alternate exchanges of this infrastructure are arguments, and the check "exchanges" compares arguments.
        return []
    alternates = {name: snapshot.alternate_of(name) for name in names}
    bare = [name for name, alternate in alternates.items() if alternate is None]
    diverted = [name for name, alternate in alternates.items() if alternate not in (None, infrastructure.undeliverable)]
    problems = []
    if bare:
        problems.append(
            f"{len(bare)} of {len(names)} exchanges have no alternate exchange ({listed(bare, limit=2)}): a message "
            "whose target is gone stays in its delay queue, and 32 of them stop that queue for all targets: call "
            f"bide.admin.infrastructure.install_guard(...) for the layout {infrastructure.name!r}"
        )
    if infrastructure.undeliverable in alternates.values() and infrastructure.undeliverable not in snapshot.exchanges:
        problems.append(
            f"the alternate exchange {infrastructure.undeliverable!r} does not exist: call "
            f"bide.admin.infrastructure.install_guard(...) for the layout {infrastructure.name!r}"
        )
    if diverted:
        others = {str(alternates[name]) for name in diverted}
        problems.append(
            f"{len(diverted)} of {len(names)} exchanges have another alternate exchange, {listed(sorted(others))} "
            f"({listed(diverted, limit=2)}): a message whose target is gone goes there, or stays in its delay queue if "
            f"no queue is bound there. Set {infrastructure.undeliverable!r} in the policy that names the other exchange"
        )
    fine = f"messages without a target go to {infrastructure.undeliverable}"
    taps = infrastructure.taps()
    if taps is not None and taps.defeats in {one.source for one in bound_taps(snapshot, taps)}:
        fine += f", but not while a tap is bound to {taps.defeats}: call bide.admin.taps.turn_off(...) to change that"
    return judged("guard", problems, fine)


def _check_cross_delivery(snapshot: Snapshot, infrastructure: DelayInfrastructure) -> list[Finding]:
    if not isinstance(infrastructure, Guarded):
        # Each binding key of this infrastructure leads to one target.
        return []
    bindings = snapshot.bindings_from(infrastructure.delivery_exchange)
    problems = [
        f"{one}: let its owner bind {'*.' * 28 + one.binding.routing_key.removeprefix('#.')!r} instead, or rename one "
        "of them"
        for one in foreign_suffix_bindings(bindings)
    ]
    return judged("cross-delivery", problems, f"none of {len(bindings)} bindings takes the messages of another target")


async def _check_stuck(
    snapshot: Snapshot, api: ManagementApi, vhost: str, infrastructure: DelayInfrastructure
) -> list[Finding]:
    stuck = {name: one.between for name, one in snapshot.queues.items() if infrastructure.owns(name) and one.between}
    deadline = time.monotonic() + _STUCK_SECONDS
    while stuck and time.monotonic() < deadline:
        await asyncio.sleep(_RECHECK_AFTER)  # messages in transit leave meanwhile
        try:
            _, again = await find_owned(api, vhost, infrastructure)
        except ManagementApiError as error:
            return [unchecked("stuck messages", str(error))]
        counts = {name: min(count, again[name].between) for name, count in stuck.items() if name in again}
        stuck = {name: count for name, count in counts.items() if count}
    problems = [
        f"{quantity(count, 'message is', 'messages are')} stuck in {name!r} after the due time: check whether the "
        "target is bound, and whether it is full. The broker tries again within three minutes. If it does not, restart "
        "a node or replace the dead-letter workers, as in docs/clusters.md"
        for name, count in stuck.items()
    ]
    return judged("stuck messages", problems, "none")


async def _check_undeliverable(connection: Connection, infrastructure: DelayInfrastructure) -> list[Finding]:
    name = infrastructure.undeliverable
    (answer,) = await count_each(connection, [name])
    if is_missing(answer):
        return []
    if isinstance(answer, BrokerError):
        return [unchecked("undeliverable messages", str(answer))]
    problems = []
    if answer.message_count:
        problems.append(
            f"{quantity(answer.message_count, 'message')} in {name!r} had no target, or no queue for the delay: "
            f"list them with bide.error_queues.ErrorQueue(client, queue={name!r}), create what is missing, and call "
            "bide.error_queues.undeliverable.resend(allow=[...])"
        )
    return judged("undeliverable messages", problems, "none")


async def _check_prefetch(connection: Connection) -> list[Finding]:
    how = f"rabbitmqctl eval 'application:get_env(rabbit, {_PREFETCH_SETTING}).'"
    broker = private_broker(connection.url)
    if broker is None:
        return [unchecked("dead-letter prefetch", f"no API reports it; look with {how!r} on the broker")]
    try:
        text = await asyncio.to_thread(broker.rabbitmqctl, "eval", f"application:get_env(rabbit, {_PREFETCH_SETTING}).")
    except LocalBrokerError as error:
        return [unchecked("dead-letter prefetch", str(error))]
    value = int("".join(re.findall("[0-9]", text)) or DEFAULT_PREFETCH)
    if value < DEFAULT_PREFETCH:
        return [
            Finding(
                check="dead-letter prefetch",
                status="problem",
                text=f"{value}: a delay queue releases only this many messages at a time; set {_PREFETCH_SETTING} in "
                "advanced.config to 1000",
            )
        ]
    more = (
        ""
        if value > DEFAULT_PREFETCH
        else f"; one queue releases up to three times as many with {_PREFETCH_SETTING} 1000"
    )
    return [Finding(check="dead-letter prefetch", status="ok", text=f"{value}{more}")]
