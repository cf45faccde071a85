"""Replication of a delay infrastructure's queues on a cluster: members and leaders."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Final

from bide.admin.policies import owned_queues
from bide.admin.protection import queue_pattern
from bide.admin.report import Finding, judged, listed, unchecked, warned
from bide.admin.snapshot import Snapshot
from bide.delay.protocol import DelayInfrastructure
from bide.errors import ManagementApiError
from bide.management.api import FoundQueue, ManagementApi

_DEFAULT_MEMBERS: Final = 3
"""The default number of members of a quorum queue, on a cluster of at least as many nodes."""

_MAX_LEADER_SHARE: Final = 2 / 3
"""The largest share of the queues that one node should lead: their leaders do most of the work, and fail together."""


async def replication_findings(
    snapshot: Snapshot, api: ManagementApi, vhost: str, infrastructure: DelayInfrastructure
) -> list[Finding]:
    """Whether the queues survive the loss of a node, and whether the nodes share the work.

    Args:
        snapshot: the snapshot of the infrastructure.
        api: the management API, which reports the nodes of the cluster.
        vhost: the virtual host of the infrastructure.
        infrastructure: the infrastructure whose queues are checked.
    """
    queues = owned_queues(snapshot, infrastructure)
    return await queue_replication(queues, api, vhost, queue_pattern(infrastructure))


async def queue_replication(
    queues: Mapping[str, FoundQueue], api: ManagementApi, vhost: str, pattern: str
) -> list[Finding]:
    """Whether queues survive the loss of a node, and whether the nodes share the work.

    Args:
        queues: the queues, by name.
        api: the management API, which reports the nodes of the cluster.
        vhost: the virtual host of the queues.
        pattern: a regular expression for their names, for the suggested commands.
    """
    try:
        nodes = await api.nodes()
    except ManagementApiError as error:
        return [unchecked("replication", str(error))]
    if len(nodes) < 2:
        return [Finding(check="replication", status="ok", text="the cluster has one node, with all queues")]
    replicated = {name: one for name, one in queues.items() if one.type != "classic"}
    for name, one in replicated.items():
        if one.members is None:
            replicated[name] = await api.queue(vhost, name, statistics=True) or one
    unknown = [name for name, one in replicated.items() if one.members is None]
    known = {name: one for name, one in replicated.items() if one.members is not None}
    why = f"the management API does not report the members of {listed(unknown, limit=2)}"
    classic = queues.keys() - replicated.keys()
    copies = (
        f"{len(classic)} of {len(queues)} queues are classic queues ({listed(sorted(classic), limit=2)}), which exist "
        "on one node: while that node is down, they are unavailable"
    )
    arguments = f"--vhost-pattern {quote(f'^{re.escape(vhost)}$')} --queue-pattern {quote(pattern)}"
    return [
        *_member_findings(known, nodes, vhost, arguments),
        *_online_findings(known, nodes),
        *([unchecked("replication", why)] if unknown else []),
        *([warned("replication", copies)] if classic else []),
        *_leader_findings(known, nodes, arguments),
    ]


def _member_findings(
    queues: Mapping[str, FoundQueue], nodes: Mapping[str, bool], vhost: str, arguments: str
) -> list[Finding]:
    wanted = min(_DEFAULT_MEMBERS, len(nodes))
    few = {name: one for name, one in queues.items() if len(nodes.keys() & (one.members or ())) < wanted}
    quorum = [one for one in few.values() if one.type == "quorum"]
    commands = [f"rabbitmq-queues grow {node} all {arguments}" for node in _nodes_without_member(quorum, nodes)]
    commands += [
        f"rabbitmq-streams add_replica {quote(name)} {node} --vhost {quote(vhost)}"
        for name, one in few.items()
        if one.type == "stream"
        for node in _nodes_without_member([one], nodes)
    ]
    problem = (
        f"{len(few)} of {len(queues)} queues have fewer than {wanted} members ({listed(sorted(few), limit=2)}), "
        f"although the cluster has {len(nodes)} nodes: the loss of one node may stop them. Run {' && '.join(commands)}"
    )
    fine = f"{len(queues)} queues have at least {wanted} members, on {len(nodes)} nodes"
    return judged("replication", [problem] if few else [], fine)


def _nodes_without_member(queues: Sequence[FoundQueue], nodes: Mapping[str, bool]) -> list[str]:
    """Running nodes without a member of one of these queues; on a large cluster, only as many as are needed."""
    lacking = [name for name, up in nodes.items() if up and any(name not in (one.members or ()) for one in queues)]
    return (
        lacking
        if len(nodes) <= _DEFAULT_MEMBERS
        else lacking[: _DEFAULT_MEMBERS - min(len(one.members or ()) for one in queues)]
    )


def _online_findings(queues: Mapping[str, FoundQueue], nodes: Mapping[str, bool]) -> list[Finding]:
    degraded = {name: one for name, one in queues.items() if set(one.members or ()) - set(one.online)}
    if not degraded:
        return []
    stopped = {name for name, one in degraded.items() if len(one.online) <= len(one.members or ()) // 2}
    where = sorted({node for one in degraded.values() for node in set(one.members or ()) - set(one.online)})
    down = [node for node in where if not nodes.get(node)]
    way_out = (
        f"start {listed(down)}"
        if down
        else "restart that node; a member that then does not start has to be replaced, as in docs/clusters.md"
    )
    findings = []
    if stopped:
        text = f"{len(stopped)} of {len(queues)} queues have no majority of their members online"
        effect = f"they neither accept nor release messages; {way_out}"
        findings += judged("replication", [f"{text} ({listed(sorted(stopped), limit=2)}): {effect}"], "")
    if len(stopped) < len(degraded):
        text = (
            f"{len(degraded) - len(stopped)} of {len(queues)} queues lack a member on {listed(where)}, which is offline"
        )
        findings.append(warned("replication", f"{text}: the loss of another one may stop them; {way_out}"))
    return findings


def _leader_findings(queues: Mapping[str, FoundQueue], nodes: Mapping[str, bool], arguments: str) -> list[Finding]:
    leading = Counter({name: 0 for name, up in nodes.items() if up})
    # The leader of a queue with one member cannot move.
    movable = [one for one in queues.values() if one.type == "quorum" and len(one.members or ()) > 1]
    leading.update(one.leader for one in movable if one.leader)
    total = leading.total()
    if len(leading) < _DEFAULT_MEMBERS or total < len(leading):
        return []
    shown = ", ".join(f"{node} {count}" for node, count in leading.most_common())
    ((busiest, most),) = leading.most_common(1)
    if most <= _MAX_LEADER_SHARE * total:
        return [Finding(check="leaders", status="ok", text=f"of {total} quorum queues: {shown}")]
    text = f"{busiest} leads {most} of {total} quorum queues ({shown}), so it does most of the work"
    return [warned("leaders", f"{text}. Run rabbitmq-queues rebalance quorum {arguments}")]
