"""Profile of RabbitMQ during a burst: the reasons for ratios of docs/benchmarks.md.

``python -m benchmarks.burst_profile`` lets 200,000 messages become due at once, through several numbers of lanes
and with several dead-letter prefetches, each in three ways: as it is; with the broker's data in memory
(``/dev/shm``), so that no write waits for a disk; and without a consumer, so that nothing has to be delivered and
acknowledged. What becomes faster by that is what it had waited for. Meanwhile it looks 50 times a second at the node's
processes: which of them run, which are ready to run but have no scheduler, and how many messages wait in their
mailboxes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Final

from benchmarks.suite.burst import PREFETCH, infrastructure_of, send, timeout_of
from benchmarks.suite.machine import busy_cores, describe, source, stolen_seconds
from benchmarks.suite.processor import processor_seconds
from benchmarks.suite.setup import TARGET, prepare
from benchmarks.suite.task import Job
from bide.admin.apply import message_counts
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.client import Client, connect
from bide.local_broker import LocalBroker
from bide.topology import Queue

MEMORY: Final = Path("/dev/shm")
CASES: Final = ("1/32", "4/32", "16/32", "1/1000", "4/1000", "moment/32", "moment/1000")
"""Lanes, or messages to one moment, and dead-letter prefetch."""

WAYS: Final = ("as it is", "data in memory", "no consumer")
KINDS: Final = {
    "ra_log_wal": "the log of all quorum queues",
    "target": "the queue that they are delivered to",
    "delay": "queues that hold messages back",
    "rabbit_fifo_dlx_worker": "publish dead letters",
    "rabbit_channel": "channels",
    "rabbit_writer": "write to sockets",
    "rabbit_reader": "read from sockets",
}

_SAMPLES: Final = 200
_APART_MS: Final = 20  # between samples: 50 a second
_BEGIN: Final = 0.5
"""Seconds after the due time when the first look is taken."""

_POLL: Final = 0.02

_WATCH: Final = r"""
Kind = fun(P) -> case process_info(P, registered_name) of
  {registered_name, ra_log_wal} -> ra_log_wal;
  {registered_name, N} -> L = atom_to_list(N),
    case {lists:prefix("VHOST_", L), lists:suffix("_target", L)} of
      {true, true} -> target; {true, false} -> delay; _ -> other end;
  _ -> case catch proc_lib:translate_initial_call(P) of {M, _, _} -> M; _ -> other end end end,
Wanted = [KINDS],
Watched = [{K, P} || P <- processes(), K <- [Kind(P)], lists:member(K, Wanted)],
Busy = fun() -> lists:sort(erlang:statistics(scheduler_wall_time_all)) end,
erlang:system_flag(scheduler_wall_time, true),
Before = Busy(),
Look = fun() -> lists:foldl(fun({K, P}, A) -> case process_info(P, [status, message_queue_len]) of
    [{status, S}, {message_queue_len, Q}] ->
      {R, W, L} = maps:get(K, A, {0, 0, 0}),
      A#{K => {R + case S of running -> 1; _ -> 0 end, W + case S of runnable -> 1; _ -> 0 end, L + Q}};
    undefined -> A end end, #{}, Watched) end,
Looks = [begin timer:sleep(APART), Look() end || _ <- lists:seq(1, SAMPLES)],
After = Busy(),
Use = [{I, (A1 - A0) / (T1 - T0)} || {{I, A0, T0}, {I, A1, T1}} <- lists:zip(Before, After)],
N = erlang:system_info(schedulers),
Sum = fun(Low, High) -> lists:sum([U || {I, U} <- Use, I > Low, I =< High]) end,
io:format("schedulers ~.3f~n", [Sum(0, N)]),
io:format("dirty_io ~.3f~n", [Sum(N + erlang:system_info(dirty_cpu_schedulers), 1 bsl 30)]),
[begin
  Of = [maps:get(K, L, {0, 0, 0}) || L <- Looks],
  Mean = fun(E) -> lists:sum([element(E, O) || O <- Of]) / length(Of) end,
  io:format("kind ~p ~.3f ~.3f ~.1f~n", [K, Mean(1), Mean(2), Mean(3)])
 end || K <- Wanted], ok.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Processes of one kind, averaged over all samples.

    Attributes:
        running: how many ran, or waited for a file.
        ready: how many could have, with a free scheduler.
        mailbox: messages that waited for them.
    """

    running: float
    ready: float
    mailbox: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """One burst.

    Attributes:
        rate: messages per second from the due time to the last.
        machine: cores that were in use, for whatever; *node* and *client* those of the broker and of this process.
        stolen: cores that the host of a virtual machine gave to others, on average until the last had come.
        schedulers: of the node, busy; *files*: its threads for files, busy.
    """

    rate: float
    machine: float
    node: float
    client: float
    stolen: float
    schedulers: float
    files: float
    kinds: Mapping[str, Kind]


async def measured(broker: LocalBroker, job: Job, *, consumed: bool) -> Burst:
    """Publish, wait, and watch until the last has come."""
    assert broker.pid is not None
    messages = job.options["messages"]
    infrastructure = infrastructure_of(job)
    await prepare(job.url, infrastructure)
    async with connect(job.url, infrastructure=infrastructure) as client:
        due = await send(client, job)
        watching = asyncio.create_task(_watch(broker, due))
        arriving = _consumed(client, messages) if consumed else _counted(job.url, messages)
        node, own, start = processor_seconds(broker.pid), time.process_time(), time.time()
        stolen = stolen_seconds()
        async with asyncio.timeout(due - start + timeout_of(messages)):
            await arriving
        end = time.time()
        # From the due time on: before it, nothing is done.
        seconds = end - due
        node, own = processor_seconds(broker.pid) - node, time.process_time() - own
        stolen = stolen_seconds() - stolen
        output, machine = await watching
    numbers = {name: float(value) for name, value in re.findall(r"^(schedulers|dirty_io) (\S+)$", output, re.M)}
    return Burst(
        rate=messages / seconds,
        machine=machine,
        node=node / seconds,
        client=own / seconds,
        stolen=stolen / (end - start),
        schedulers=numbers["schedulers"],
        files=numbers["dirty_io"],
        kinds={
            name: Kind(running=float(running), ready=float(ready), mailbox=float(mailbox))
            for name, running, ready, mailbox in re.findall(r"^kind (\w+) (\S+) (\S+) (\S+)$", output, re.M)
        },
    )


async def _consumed(client: Client, messages: int) -> None:
    async with client.consume(TARGET, prefetch=PREFETCH) as arriving:
        received = 0
        async for message in arriving:
            await message.ack()
            received += 1
            if received == messages:
                return


async def _counted(url: str, messages: int) -> None:
    queue = Queue.quorum(TARGET)
    connection = await Connection.open(BrokerUrl.parse(url))
    try:
        while (await message_counts(connection, [queue]))[TARGET] < messages:  # noqa: ASYNC110 (there is no event)
            await asyncio.sleep(_POLL)
    finally:
        await connection.close()


async def _watch(broker: LocalBroker, due: float) -> tuple[str, float]:
    script = (
        _WATCH.replace("VHOST", "v")
        .replace("KINDS", ", ".join(KINDS))
        .replace("APART", str(_APART_MS))
        .replace("SAMPLES", str(_SAMPLES))
    )
    await asyncio.sleep(max(due + _BEGIN - time.time(), 0))
    watching = asyncio.create_task(asyncio.to_thread(broker.rabbitmqctl, "eval", script))
    # The tool itself takes a second of a core to start.
    await asyncio.sleep(_SAMPLES * _APART_MS / 1_000 / 2)
    machine = await asyncio.to_thread(busy_cores)
    return await watching, machine


def profile(case: str, way: str, options: argparse.Namespace) -> Burst:
    """One burst on a broker of its own."""
    through, _, prefetch = case.partition("/")
    layout, lanes = ("clock", 1) if through == "moment" else ("one queue", int(through))
    place = Path(tempfile.mkdtemp(prefix="bide-burst-", dir=MEMORY if way == "data in memory" else None))
    try:
        with LocalBroker.start(
            place / "broker", ephemeral=True, chroot=options.root, dead_letter_prefetch=int(prefetch)
        ) as broker:
            job = Job(
                work="",
                options={"messages": options.messages, "layout": layout, "lanes": lanes},
                url=broker.add_vhost("v"),
            )
            return asyncio.run(measured(broker, job, consumed=way != "no consumer"))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def shown(bursts: Mapping[str, Burst]) -> str:
    """A table in Markdown."""
    rows = {
        "messages/s": [f"{one.rate:,.0f}" for one in bursts.values()],
        "cores in use": [f"{one.machine:.2f}" for one in bursts.values()],
        "of these, the node": [f"{one.node:.2f}" for one in bursts.values()],
        "of these, the client": [f"{one.client:.2f}" for one in bursts.values()],
        "taken by the host of the machine": [f"{one.stolen:.2f}" for one in bursts.values()],
        "schedulers busy": [f"{one.schedulers:.2f}" for one in bursts.values()],
        "threads for files busy": [f"{one.files:.2f}" for one in bursts.values()],
        **{
            f"{kind}: {about}": [
                f"{one.running:.2f} / {one.ready:.2f} / {one.mailbox:,.0f}"
                for one in (burst.kinds[kind] for burst in bursts.values())
            ]
            for kind, about in KINDS.items()
        },
    }
    lines = [f"| running / ready / in mailboxes | {' | '.join(bursts)} |", "|---" * (len(bursts) + 1) + "|"]
    return "\n".join([*lines, *(f"| {title} | {' | '.join(cells)} |" for title, cells in rows.items())])


def main() -> None:
    """Read the command line, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--case", action="append", help=f"LANES/PREFETCH, moment/PREFETCH (default {' '.join(CASES)})")
    parser.add_argument("--way", action="append", choices=WAYS, help="only these")
    parser.add_argument("--root", type=Path, help="run the RabbitMQ of the system in this folder (Linux, as root)")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too, or add them to it")
    options = parser.parse_args()
    found: dict[str, dict[str, Burst]] = {}
    for case, way in product(options.case or CASES, options.way or WAYS):
        one = profile(case, way, options)
        found.setdefault(way, {})[case] = one
        print(f"{case}, {way}: {one.rate:,.0f}/s", flush=True)
    for way, bursts in found.items():
        print(f"\n{way}\n\n{shown(bursts)}")
    if options.json is not None:
        by_way = {way: {case: asdict(one) for case, one in bursts.items()} for way, bursts in found.items()}
        keep(options.json, {"machine": describe(), "source": source(), "messages": options.messages}, by_way)


def keep(file: Path, head: Mapping[str, object], bursts: Mapping[str, Mapping[str, object]]) -> None:
    """Write the numbers down, beside those that the file has of other cases of the same commit and machine."""
    earlier = json.loads(file.read_text()) if file.exists() else {}
    there = earlier.pop("bursts", {}) if all(earlier.get(name) == value for name, value in head.items()) else {}
    by_way = {way: {**there.get(way, {}), **bursts.get(way, {})} for way in WAYS if way in there or way in bursts}
    file.write_text(json.dumps({**head, "bursts": by_way}, indent=1) + "\n")


if __name__ == "__main__":
    main()
