"""CPU cost of a delayed message inside RabbitMQ: the reasons for docs/benchmarks.md.

``python -m benchmarks.broker_profile --rate 1500 --seconds 30`` sends messages at an even rate without a delay, through
``Clock`` with whole seconds and to 10 ms, and through the binary cascade, on a fresh private broker each. It asks the
node's own counters before and after, and prints per message: processor time in user and system mode, what the node's
threads did in it, reductions (Erlang's unit of work) by kind of process, and what the log of the quorum queues had to
write. ``--saturate`` does the same with as many messages as go through.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks.suite import lateness, sustained
from benchmarks.suite.machine import describe, source
from benchmarks.suite.percentiles import percentile
from benchmarks.suite.processor import processor_seconds, processor_times
from benchmarks.suite.setup import prepare
from benchmarks.suite.task import Answer, Job
from bide.local_broker import LocalBroker

LAYOUTS: Final = {
    "no delay": ("clock", 0),
    "Clock": ("clock", 1_000),
    "Clock, to 10 ms": ("clock", 10),
    "binary cascade": ("cascade", 1_000),
}
"""Layout and step of the delays in ms, by the names of the contestants."""

IDLE: Final = 10.0
"""Seconds that a node with nothing to do is looked at."""

WARM_UP: Final = 45.0
"""Seconds until the longest delay of :mod:`benchmarks.suite.sustained` has passed."""

KINDS: Final = {
    "delay queue": "holds messages back",
    "target queue": "receives them when they are due",
    "rabbit_fifo_dlx_worker": "publishes dead letters",
    "rabbit_channel": "publishers' and consumers' channels",
    "rabbit_writer": "writes to sockets",
    "rabbit_reader": "reads from sockets",
    "ra_log_wal": "the log of all quorum queues",
}
"""Kinds of processes that are worth a line of their own."""

ACTIVITIES: Final = {
    "emulator": "running processes",
    "gc": "collecting garbage",
    "port": "sockets",
    "check_io": "polling sockets",
    "aux": "timers, memory and other chores",
    "other": "waking up, and looking for work",
}
"""What a scheduler's thread does, by microstate accounting; the rest of the time it sleeps."""

_SNAPSHOT: Final = r"""
erlang:system_flag(microstate_accounting, true),
[io:format("~p ~p ~p~n", [T, K, erlang:convert_time_unit(V, perf_counter, nanosecond)]) ||
  {{T, K}, V} <- maps:to_list(lists:foldl(fun(#{type := T, counters := C}, A) ->
    maps:fold(fun(K, V, B) -> maps:update_with({T, K}, fun(Y) -> Y + V end, V, B) end, A, C) end,
    #{}, erlang:statistics(microstate_accounting)))],
Name = fun(P) -> case process_info(P, registered_name) of
  {registered_name, N} -> case atom_to_list(N) of
    "ra_log_wal" -> ra_log_wal;
    L -> case lists:suffix("_target", L) of
      true -> 'target queue';
      false -> case lists:prefix("VHOST_", L) of true -> 'delay queue'; false -> other end end end;
  _ -> case catch proc_lib:translate_initial_call(P) of {M, _, _} -> M; _ -> other end end end,
Kinds = lists:foldl(fun(P, M) -> case process_info(P, reductions) of
  {reductions, R} -> maps:update_with(Name(P), fun(Y) -> Y + R end, R, M); _ -> M end end, #{}, processes()),
Log = maps:fold(fun(K, V, A) -> Part = case K of ra_log_wal -> wal; _ -> server end,
  maps:fold(fun(F, X, B) when is_integer(X) -> maps:update_with({Part, F}, fun(Y) -> Y + X end, X, B);
    (_, _, B) -> B end, A, V) end, #{},
  case catch seshat:counters(ra) of C when is_map(C) -> C; _ -> ra_counters:overview() end),
io:format("total ~p~n", [element(1, erlang:statistics(exact_reductions))]),
[io:format("kind ~p ~p~n", [K, V]) || {K, V} <- maps:to_list(Kinds)],
[io:format("~p ~p ~p~n", [P, F, V]) || {{P, F}, V} <- maps:to_list(Log)], ok.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one message costs.

    Attributes:
        late_ms: the median of how late they came; without a delay, how long they took.
        rate: messages per second.
        user_us, system_us: processor time of the node, in microseconds.
        idle_us: of that, what the node uses with nothing to do, for so long as a message's share of a second.
        threads_us: what the schedulers' threads did, and the threads for files, in microseconds.
        reductions: in all; *by_kind* of those processes that lived all the time.
        commands: entries of the log, which are what quorum queues agree on.
        log_bytes: that were written to it; None where the release does not count them.
        log_batches: writes, each with a sync to the disk.
    """

    late_ms: float
    rate: float
    user_us: float
    system_us: float
    idle_us: float
    threads_us: Mapping[str, float]
    reductions: float
    by_kind: Mapping[str, float]
    commands: float
    log_bytes: float | None
    log_batches: float


class Node:
    """The counters of a broker's node, read when it is entered and when it is left."""

    def __init__(self, broker: LocalBroker, vhost: str) -> None:
        assert broker.pid is not None
        self._broker = broker
        self._pid = broker.pid
        self._script = _SNAPSHOT.replace("VHOST", vhost)
        self._spent: dict[str, float] = {}

    async def __aenter__(self) -> None:
        self._spent = {name: -value for name, value in (await asyncio.to_thread(self._read)).items()}

    async def __aexit__(self, *error: object) -> None:
        for name, value in (await asyncio.to_thread(self._read)).items():
            self._spent[name] = self._spent.get(name, 0.0) + value

    def _read(self) -> dict[str, float]:
        output = self._broker.rabbitmqctl("eval", self._script)
        values = {line[1]: float(line[2]) for line in re.finditer(r"^(.+) (\d+)$", output, re.M)}
        user, system = processor_times(self._pid)
        return {**values, "user": user, "system": system}

    def profile(self, answer: Answer, messages: float, *, idle: float) -> Profile:
        """The cost per message.

        Args:
            idle: cores that the node uses with nothing to do.
        """
        each = {name: value / messages for name, value in self._spent.items()}
        rate = answer.values.get("sent") or answer.values["rate"]
        return Profile(
            late_ms=answer.values["p50"],
            rate=rate,
            idle_us=idle / rate * 1e6,
            user_us=each["user"] * 1e6,
            system_us=each["system"] * 1e6,
            threads_us={
                **{state: each.get(f"scheduler {state}", 0.0) / 1e3 for state in ACTIVITIES},
                "files": sum(
                    value / 1e3
                    for name, value in each.items()
                    if name.startswith("dirty_io_scheduler ") and not name.endswith(" sleep")
                ),
            },
            reductions=each["total"],
            by_kind={kind: each.get(f"kind '{kind}'", each.get(f"kind {kind}", 0.0)) for kind in KINDS},
            commands=each.get("wal writes", 0.0),
            log_bytes=each.get("wal bytes_written"),
            log_batches=each.get("wal batches", 0.0),
        )


def profile(name: str, options: argparse.Namespace) -> Profile:
    """Measure one contestant on a broker of its own."""
    layout, step = LAYOUTS[name]
    with LocalBroker.start(ephemeral=True, chroot=options.root) as broker:
        assert broker.pid is not None
        job = Job(
            work="",
            options={
                "layout": layout,
                "step": step,
                "rate": options.rate,
                "seconds": options.seconds,
                "longest": options.longest if step else 0,
                "bits": 12,
                "first": 100_000,
            },
            url=broker.add_vhost("v"),
            pid=broker.pid,
        )
        return asyncio.run(saturated(broker, job) if options.saturate else steady(broker, job))


async def steady(broker: LocalBroker, job: Job) -> Profile:
    """Measure one contestant at an even rate."""
    await prepare(job.url, lateness.infrastructure_of(job.options["layout"]))
    await asyncio.sleep(5)  # what was declared a moment ago is still being written
    idle = await idle_cores(broker)
    node = Node(broker, "v")
    answer = await lateness.bide(job, around=node)
    return node.profile(answer, round(job.options["rate"] * job.options["seconds"]), idle=idle)


async def idle_cores(broker: LocalBroker) -> float:
    """Cores that a node uses with nothing to do: with every queue there are timers, and counters to add up."""
    assert broker.pid is not None
    before, start = processor_seconds(broker.pid), time.perf_counter()
    await asyncio.sleep(IDLE)
    return (processor_seconds(broker.pid) - before) / (time.perf_counter() - start)


async def saturated(broker: LocalBroker, job: Job) -> Profile:
    """Measure one contestant that has always more to do."""
    idle = await idle_cores(broker)  # without the queues of the infrastructure, which are not there yet
    node = Node(broker, "v")
    async with sustained.saturated(job) as (flow, run):
        await run(WARM_UP)
        async with node:
            before, started = flow.arrived, time.perf_counter()
            flow.late.clear()
            await run(job.options["seconds"])
            arrived, seconds = flow.arrived - before, time.perf_counter() - started
        return node.profile(
            Answer(values={"p50": percentile(sorted(flow.late), 50), "rate": arrived / seconds}), arrived, idle=idle
        )


def shown(profiles: Mapping[str, Profile]) -> str:
    """A table in Markdown."""
    rows = {
        "messages/s": [f"{one.rate:,.0f}" for one in profiles.values()],
        "p50, ms": [f"{one.late_ms:,.1f}" for one in profiles.values()],
        "CPU in user mode, µs": [f"{one.user_us:,.0f}" for one in profiles.values()],
        "CPU in system mode, µs": [f"{one.system_us:,.0f}" for one in profiles.values()],
        "CPU in both modes of an idle node, µs": [f"{one.idle_us:,.0f}" for one in profiles.values()],
        **{
            f"schedulers, {about}, µs": [f"{one.threads_us[state]:,.0f}" for one in profiles.values()]
            for state, about in ACTIVITIES.items()
        },
        "threads for files, µs": [f"{one.threads_us['files']:,.0f}" for one in profiles.values()],
        "entries of the log": [f"{one.commands:.2f}" for one in profiles.values()],
        "bytes of the log": ["" if one.log_bytes is None else f"{one.log_bytes:,.0f}" for one in profiles.values()],
        "writes and syncs of the log": [f"{one.log_batches:.2f}" for one in profiles.values()],
        "reductions": [f"{one.reductions:,.0f}" for one in profiles.values()],
        **{
            f"of these, {kind}: {about}": [f"{one.by_kind[kind]:,.0f}" for one in profiles.values()]
            for kind, about in KINDS.items()
        },
    }
    lines = [f"| per message | {' | '.join(profiles)} |", "|---" * (len(profiles) + 1) + "|"]
    return "\n".join([*lines, *(f"| {title} | {' | '.join(cells)} |" for title, cells in rows.items())])


def main() -> None:
    """Read the command line, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1_500, help="messages/s (default 1500)")
    parser.add_argument("--seconds", type=float, default=30, help="of sending (default 30)")
    parser.add_argument("--longest", type=int, default=60, help="longest delay in s; the shortest is one (default 60)")
    parser.add_argument("--saturate", action="store_true", help="send as much as goes through, in units of 10 ms")
    parser.add_argument("--root", type=Path, help="run the RabbitMQ of the system in this folder (Linux, as root)")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    options = parser.parse_args()
    names = [name for name in LAYOUTS if not options.saturate or name in ("Clock", "binary cascade")]
    profiles = {name: profile(name, options) for name in names}
    print(shown(profiles))
    if options.json is not None:
        head = {"machine": describe(), "source": source(), "seconds": options.seconds, "longest": options.longest}
        profiled = {name: asdict(one) for name, one in profiles.items()}
        options.json.write_text(json.dumps({**head, "layouts": profiled}, indent=1) + "\n")


if __name__ == "__main__":
    main()
