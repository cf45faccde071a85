"""Differences between the nodes of a cluster: RabbitMQ releases and clocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Final

from bide.admin.report import Finding, judged, listed, unchecked, warned
from bide.amqp.connection import Connection
from bide.durations import to_milliseconds
from bide.errors import BrokerError, ManagementApiError
from bide.management.api import ManagementApi
from bide.runtime.wording import quantity

_MAX_CLOCK_DIFFERENCE: Final = 1_000
"""Milliseconds."""

_REPORTED_SECONDS: Final = 15.0
"""Seconds to wait until the management API reports when a connection was accepted. It collects statistics every 5 s."""

_PAUSE: Final = 0.5
"""Seconds between two rounds of requests to the management API."""

_CLOCK_ADVICE: Final = (
    "A quorum queue measures delays by the clock of its leader, so messages are early or late by as much when the "
    "leader changes: synchronise the clocks, for example by NTP, and restart the nodes whose clock was wrong"
)


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Bounds of the time by which a node's clock is ahead of the clock of this machine, in milliseconds."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The times before and after opening a connection, in milliseconds since the epoch."""

    before: int
    after: int


async def node_findings(connection: Connection, api: ManagementApi) -> list[Finding]:
    """Whether the nodes of a cluster run the same release, and whether their clocks agree; nothing for a single node.

    Args:
        connection: a connection to the virtual host; further ones to all hosts of its URL are opened for a moment.
        api: the management API of the same cluster.
    """
    try:
        releases = await api.releases()
    except ManagementApiError as error:
        return [unchecked("node releases", str(error)), unchecked("node clocks", str(error))]
    if len(releases) < 2:
        return []
    return [*release_findings(releases), *await _check_clocks(connection, api, list(releases))]


def release_findings(releases: Mapping[str, str]) -> list[Finding]:
    """Whether the nodes run the same release.

    Args:
        releases: the release of each running node; empty if the node has not reported it.
    """
    nodes: dict[str, list[str]] = {}
    for node, release in releases.items():
        if release:
            nodes.setdefault(release, []).append(node)
    unknown = [node for node, release in releases.items() if not release]
    findings = []
    if len(nodes) > 1:
        shown = ", ".join(f"{release} on {listed(names)}" for release, names in sorted(nodes.items()))
        text = f"the nodes run different releases of RabbitMQ ({shown}), which is supported during an upgrade only"
        findings.append(warned("node releases", f"{text}: upgrade the others, as in docs/upgrade-and-remove.md"))
    if unknown:
        findings.append(
            unchecked("node releases", f"the management API does not know the release of {listed(unknown)} yet")
        )
    if findings:
        return findings
    (release,) = nodes
    return [Finding(check="node releases", status="ok", text=f"RabbitMQ {release} on {len(releases)} nodes")]


async def _check_clocks(connection: Connection, api: ManagementApi, nodes: Sequence[str]) -> list[Finding]:
    try:
        reached = await _read_clocks(connection, api, nodes)
    except ManagementApiError as error:
        return [unchecked("node clocks", str(error))]
    if len(reached) < 2:
        return [unchecked("node clocks", "bide reached fewer than two nodes: name all nodes in the URL")]
    readings = {node: reading for node, reading in reached.items() if reading is not None}
    findings = clock_findings(readings) if len(readings) > 1 else []
    if silent := [node for node in reached if node not in readings]:
        text = f"the management API does not report when {listed(silent)} accepted a connection"
        findings.append(unchecked("node clocks", text))
    if missing := [node for node in nodes if node not in reached]:
        text = f"no connection reached {listed(missing)}: name all nodes in the URL"
        findings.append(unchecked("node clocks", text))
    return findings


def clock_findings(readings: Mapping[str, ClockReading]) -> list[Finding]:
    """Whether the clocks of nodes agree.

    Args:
        readings: the readings of at least two nodes.
    """
    fastest = max(readings, key=lambda node: readings[node].least)
    slowest = min(readings, key=lambda node: readings[node].most)
    least = readings[fastest].least - readings[slowest].most
    most = max(one.most for one in readings.values()) - min(one.least for one in readings.values())
    if least > _MAX_CLOCK_DIFFERENCE:
        text = f"the clock of {fastest} is at least {least:,} ms ahead of that of {slowest}"
        return judged("node clocks", [f"{text}. {_CLOCK_ADVICE}"], "")
    if most > _MAX_CLOCK_DIFFERENCE:
        text = f"the nodes answered slowly, so their clocks may differ by up to {most:,} ms, or not at all: check again"
        return [unchecked("node clocks", text)]
    text = f"the clocks of {quantity(len(readings), 'node')} agree to {most:,} ms"
    return [Finding(check="node clocks", status="ok", text=text)]


async def _read_clocks(
    connection: Connection, api: ManagementApi, nodes: Sequence[str]
) -> dict[str, ClockReading | None]:
    """Read the clock of each node that a connection reaches; None if the management API does not report it.

    A node notes the time at which it accepts a connection, and the management API reports it as ``connected_at``, in
    milliseconds. That moment is between the start of connecting and the end of the handshake.
    """
    url = connection.url
    opened: dict[int, _Attempt] = {}
    async with AsyncExitStack() as closing:
        # Behind one address there may be a load balancer, which spreads connections that are open at the same time.
        for number in range(max(len(url.hosts), len(nodes))):
            before = to_milliseconds(connection.now())
            try:
                one = await Connection.open(replace(url, hosts=(url.hosts[number % len(url.hosts)],)))
            except BrokerError:
                continue  # the node of this host is reported as not checked
            closing.push_async_callback(one.close)
            if one.local_port is not None:
                opened[one.local_port] = _Attempt(before, to_milliseconds(connection.now()))
        entries = [(one, opened.get(_client_port(one["name"]))) for one in await api.connections_of(url.user)]
        reached = {str(one["name"]): (str(one["node"]), attempt) for one, attempt in entries if attempt is not None}
        unread: dict[str, ClockReading | None] = dict.fromkeys(node for node, _ in reached.values())
        return unread if len(unread) < 2 else {**unread, **await _accepted(api, reached)}


def _client_port(name: str) -> int:
    """The port of the client in the name of a connection, such as ``127.0.0.1:48106 -> 127.0.0.1:5672``."""
    return int(name.partition(" -> ")[0].rpartition(":")[2])


async def _accepted(api: ManagementApi, reached: Mapping[str, tuple[str, _Attempt]]) -> dict[str, ClockReading]:
    """Wait until the management API reports when the nodes accepted the connections."""
    readings: dict[str, ClockReading] = {}
    waiting = dict(reached)
    deadline = time.monotonic() + _REPORTED_SECONDS
    while waiting and time.monotonic() < deadline:
        for name, (node, attempt) in list(waiting.items()):
            if (at := await api.connected_at(name)) is not None:
                # The node rounds down, and to_milliseconds() rounds up.
                least, most = at - attempt.after, at + 2 - attempt.before
                known = readings.get(node, ClockReading(least, most))
                readings[node] = ClockReading(max(known.least, least), min(known.most, most))
                del waiting[name]
        if waiting:
            await asyncio.sleep(_PAUSE)  # statistics are collected meanwhile
    return readings
