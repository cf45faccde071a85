"""Faults that RabbitMQ reports or causes itself: alarms, moved leaders, changed policies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from bide.check.faults.fault import Fault, FaultSite, insist
from bide.local_broker import LocalBroker

POLICY: Final = "bide-check"

_MOVE: Final = """
    [case ra_leaderboard:lookup_leader(Name) of
         undefined -> ok; % an election is under way
         {_, Node} = Leader ->
             case [Id || {_, N} = Id <- ra_leaderboard:lookup_members(Name), N =/= Node] of
                 [] -> ok;
                 Others -> ra:transfer_leadership(Leader, lists:nth(rand:uniform(length(Others)), Others))
             end
     end || Queue <- rabbit_amqqueue:list(<<"VHOST">>),
            amqqueue:get_type(Queue) =:= rabbit_quorum_queue,
            {Name, _} <- [amqqueue:get_pid(Queue)]], ok.
"""
"""Erlang code that moves the leader of each quorum queue to another node."""


@contextmanager
def _move_leaders(site: FaultSite, node: LocalBroker) -> Iterator[str]:
    move = _MOVE.replace("VHOST", site.vhost)
    insist(lambda: site.running_node().rabbitmqctl("eval", move))
    yield "all queues"
    insist(lambda: site.running_node().rabbitmqctl("eval", move))


@contextmanager
def _change_policy(site: FaultSite, node: LocalBroker) -> Iterator[str]:
    body = {"pattern": "^(bide|check)[.]", "definition": {"max-length": 100_000_000}, "apply-to": "queues"}
    insist(lambda: site.running_node().management.call("PUT", "policies", site.vhost, POLICY, body=body))
    yield "max-length of all queues"
    insist(lambda: _delete_policy(site))


def _delete_policy(site: FaultSite) -> None:
    """Delete the policy, unless an earlier call that timed out has deleted it."""
    management = site.running_node().management
    if any(one["name"] == POLICY for one in management.call("GET", "policies", site.vhost)):
        management.call("DELETE", "policies", site.vhost, POLICY)


def limits_of(node: LocalBroker) -> list[str]:
    """A node's memory limit (bytes, or a fraction of the memory) and its limit of free disk space (bytes)."""
    text = node.rabbitmqctl(
        "eval",
        """io:format("~w ~w~n", [case vm_memory_monitor:get_vm_memory_high_watermark() of
               {absolute, Bytes} -> Bytes; Fraction -> Fraction end, rabbit_disk_monitor:get_disk_free_limit()]).""",
    )
    return text.split()[:2]


def set_limits(node: LocalBroker, memory: str, disk: str) -> None:
    """Set a node's memory limit and its limit of free disk space, as :func:`limits_of` returns them."""
    node.rabbitmqctl("set_vm_memory_high_watermark", *([] if "." in memory else ["absolute"]), memory)
    node.rabbitmqctl("set_disk_free_limit", disk)


@contextmanager
def _memory_alarm(site: FaultSite, node: LocalBroker) -> Iterator[str]:
    memory, disk = insist(lambda: limits_of(node))
    insist(lambda: set_limits(node, "1000", disk))
    yield node.name
    insist(lambda: set_limits(node, memory, disk))


@contextmanager
def _disk_alarm(site: FaultSite, node: LocalBroker) -> Iterator[str]:
    memory, disk = insist(lambda: limits_of(node))
    insist(lambda: set_limits(node, memory, "1000000000MB"))
    yield node.name
    insist(lambda: set_limits(node, memory, disk))


LEADERS = Fault(name="leaders", what="the leaders of all queues move, twice", inject=_move_leaders, hits_node=False)
POLICY_CHANGE = Fault(
    name="policy",
    what="a policy for all queues is set and deleted",
    inject=_change_policy,
    hits_node=False,
    twice=False,
)
MEMORY = Fault(name="memory", what="the memory alarm of a node", inject=_memory_alarm, twice=False)
DISK = Fault(name="disk", what="the disk alarm of a node", inject=_disk_alarm, twice=False)
