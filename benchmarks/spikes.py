"""Causes of the maximum lateness in docs/benchmarks.md.

``python -m benchmarks.spikes --rate 1500 --seconds 60`` sends delayed messages at an even rate through a fresh private
broker, and writes down meanwhile when anything stood still: the machine (a process that wakes every two milliseconds),
the disk (another that writes and syncs), this client (its event loop, and its collections of garbage), and the broker's
node (its timers, long collections of garbage, long runs of one process, new files of its log). Then it prints the
messages that came latest, and what else happened while they were on their way.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from benchmarks.suite.lateness import infrastructure_of, publish_steadily
from benchmarks.suite.percentiles import percentile
from benchmarks.suite.setup import TARGET, prepare
from benchmarks.suite.task import Job
from bide.client.client import connect
from bide.local_broker import LocalBroker

PAUSE: Final = 0.010
"""Shortest reported pause, in seconds, of steps that should take two milliseconds."""

EPISODE: Final = 0.050
"""Seconds between late messages that are reported as one episode."""

MARGIN: Final = 0.030
"""Seconds before the due time in which something may have delayed a message."""

_MACHINE: Final = f"""
import sys, time
before = time.time()
while True:
    time.sleep(0.002)
    now = time.time()
    if now - before > {PAUSE}:
        print(before, now, flush=True)
    before = now
"""

# The sleep between writes keeps the probe's load on the disk low.
_DISK: Final = f"""
import os, sys, time
file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
while True:
    before = time.time()
    os.pwrite(file, bytes(2000), 0)
    os.fdatasync(file)
    now = time.time()
    if now - before > {PAUSE / 2}:
        print(before, now, flush=True)
    time.sleep(0.005)
"""

_NODE: Final = r"""
spawn(fun() ->
  {ok, File} = file:open("FILE", [write]),
  erlang:system_monitor(self(), [{long_gc, 8}, {long_schedule, 8}]),
  Name = fun(P) when is_pid(P) -> case catch process_info(P, registered_name) of
      {registered_name, N} -> N; _ -> case catch proc_lib:translate_initial_call(P) of {M, _, _} -> M; _ -> P end end;
    (P) -> P end,
  Say = fun(From, To, What) -> io:format(File, "~p ~p ~0p~n", [From / 1000, To / 1000, What]) end,
  Watch = fun W(Files) ->
    Before = erlang:system_time(millisecond),
    receive {monitor, P, Kind, Facts} ->
      Took = proplists:get_value(timeout, Facts, 0),
      Say(Before - Took, Before, {Kind, Name(P)}), W(Files)
    after 5 ->
      Now = erlang:system_time(millisecond),
      if Now - Before > 14 -> Say(Before, Now, timers); true -> ok end,
      Counted = case catch seshat:counters(ra) of C when is_map(C) ->
        maps:get(wal_files, maps:get(ra_log_wal, C, #{}), 0); _ -> 0 end,
      if Counted =/= Files, Files =/= none -> Say(Before, Now, 'new log file'); true -> ok end,
      W(Counted)
    end end,
  Watch(none) end), ok.
"""


@dataclass(frozen=True, slots=True)
class Pause:
    """Something that stood still, from and to in seconds since 1970."""

    start: float
    end: float
    what: str

    @property
    def shown(self) -> str:
        """In a few words."""
        return f"{self.what} {(self.end - self.start) * 1000:.0f} ms"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message: when it was received, in seconds since 1970, and how late, in seconds."""

    at: float
    late: float


class Watch:
    """The watched parts of the system and their pauses."""

    def __init__(self, folder: Path, broker: LocalBroker) -> None:
        self._folder = folder
        self._node = broker.folder / "spikes.log"
        self._broker = broker
        self._own: list[Pause] = []
        self._collected_at = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch as long as the block takes, from within an event loop."""
        self._broker.rabbitmqctl("eval", _NODE.replace("FILE", str(self._node)))
        programs = {"machine": (_MACHINE,), "disk": (_DISK, str(self._folder / "probe"))}
        started = []
        for name, (program, *arguments) in programs.items():
            with (self._folder / name).open("w") as log:
                started.append(subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=log))
        loop = asyncio.create_task(self._loop())
        gc.callbacks.append(self._collected)
        try:
            yield
        finally:
            gc.callbacks.remove(self._collected)
            loop.cancel()
            for process in started:
                process.terminate()
                process.wait()

    async def _loop(self) -> None:
        before = time.time()
        while True:
            await asyncio.sleep(0.002)  # a step of two milliseconds, see PAUSE
            now = time.time()
            if now - before > PAUSE:
                self._own.append(Pause(before, now, "client"))
            before = now

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        now = time.time()
        if phase == "start":
            self._collected_at = now
        elif now - self._collected_at > PAUSE / 2:
            self._own.append(Pause(self._collected_at, now, f"client's garbage (generation {info['generation']})"))

    def pauses(self) -> list[Pause]:
        """All of them."""
        found = list(self._own)
        for name in ("machine", "disk"):
            for line in (self._folder / name).read_text().splitlines():
                start, end = line.split()
                found.append(Pause(float(start), float(end), name))
        lines = re.finditer(r"^(\S+) (\S+) (.+)$", self._node.read_text(), re.M)
        found += [Pause(float(line[1]), float(line[2]), f"node: {line[3]}") for line in lines]
        return sorted(found, key=lambda one: one.start)


async def measured(broker: LocalBroker, job: Job, watch: Watch) -> list[Arrival]:
    """Send, receive, and watch."""
    infrastructure = infrastructure_of(job.options["layout"])
    await prepare(job.url, infrastructure)
    await asyncio.sleep(5)  # what was declared a moment ago is still being written
    expected = round(job.options["rate"] * job.options["seconds"])
    arrivals: list[Arrival] = []
    async with (
        connect(job.url, infrastructure=infrastructure) as client,
        client.consume(TARGET, prefetch=1_000) as messages,
    ):
        await client.publish(b"", to=TARGET, delay=infrastructure.resolution)
        await (await anext(messages)).ack()
        with watch.running():
            publishing = asyncio.create_task(publish_steadily(client, job))
            async with asyncio.timeout(job.options["seconds"] + job.options["longest"] + 60):
                async for message in messages:
                    late = message.lateness
                    assert late is not None
                    arrivals.append(Arrival(message.received_at.timestamp(), late / timedelta(seconds=1)))
                    await message.ack()
                    if len(arrivals) == expected:
                        break
            await publishing
    return arrivals


def episodes(arrivals: Sequence[Arrival], least: int) -> list[list[Arrival]]:
    """The latest messages, at least ``least``, grouped into episodes."""
    limit = sorted((one.late for one in arrivals), reverse=True)[min(least, len(arrivals)) - 1]
    found: list[list[Arrival]] = []
    for one in sorted((one for one in arrivals if one.late >= limit), key=lambda one: one.at):
        if found and one.at - found[-1][-1].at < EPISODE:
            found[-1].append(one)
        else:
            found.append([one])
    return found


def shown(arrivals: Sequence[Arrival], pauses: Sequence[Pause], least: int) -> str:
    """The printed report."""
    late = sorted(one.late * 1000 for one in arrivals)
    points = ", ".join(f"p{point:g} {percentile(late, point):.1f}" for point in (50, 99, 99.9))
    lines = [f"{len(arrivals):,} messages, ms late: {points}, max {late[-1]:.1f}", ""]
    for group in episodes(arrivals, least):
        worst = max(group, key=lambda one: one.late)
        start, end = min(one.at - one.late for one in group) - MARGIN, group[-1].at
        also = [one.shown for one in pauses if one.end > start and one.start < end]
        after = group[0].at - arrivals[0].at
        how = f"{after:7.2f} s  {len(group):4} messages, up to {worst.late * 1000:5.1f} ms"
        lines.append(f"{how}  {'; '.join(also) or 'nothing'}")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=("clock", "cascade"), default="clock")
    parser.add_argument("--rate", type=float, default=1_500, help="messages/s (default 1500)")
    parser.add_argument("--seconds", type=float, default=60, help="of sending (default 60)")
    parser.add_argument("--longest", type=int, default=60, help="longest delay in s; the shortest is one (default 60)")
    parser.add_argument("--latest", type=int, default=100, help="messages to look at (default 100)")
    parser.add_argument("--root", type=Path, help="run the RabbitMQ of the system in this folder (Linux, as root)")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="bide-spikes-", dir=os.environ.get("TMPDIR")) as folder,
        LocalBroker.start(ephemeral=True, chroot=options.root) as broker,
    ):
        own = {"layout": options.layout, "step": 1_000}
        job = Job(
            work="",
            options={**own, "rate": options.rate, "seconds": options.seconds, "longest": options.longest},
            url=broker.add_vhost("v"),
            pid=broker.pid or 0,
        )
        watch = Watch(Path(folder), broker)
        arrivals = asyncio.run(measured(broker, job, watch))
        print(shown(arrivals, watch.pauses(), options.latest))


if __name__ == "__main__":
    main()
