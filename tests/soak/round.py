"""One round: a broker, a job that is killed repeatedly, and the final check."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlparse

from bide.local_broker import LocalBroker
from tests.soak import check
from tests.soak.account import Account
from tests.soak.ending import is_allowed
from tests.soak.feed import Feed, batches, declare
from tests.soak.job import COPY, QUERIES, QUEUE, SCHEDULED, STREAM, Task
from tests.soak.job_run import JobRun, SoakError, end, gate
from tests.support import flush_declarations, stream_port

MASTERS: Final = ("local[2]", "local[2,4]")
"""Without and with further attempts at a task."""

_LONGEST_PAUSE: Final = 2.5
_PATIENT: Final = 1 / 3
"""How often the next kill waits until all queries have advanced: a slow machine would repeat one batch for ever."""
_LONGEST_WAIT: Final = 600.0
_BUSY_WITHIN: Final = 15.0
_SMALL_FRAMES: Final = "stream.frame_max = 8192"
"""So that a task of ``once`` publishes many frames, several of them in flight."""
_LOOK_EVERY: Final = 0.02
"""Seconds between two looks at files that the job writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What stays the same when a round goes on in another run.

    Attributes:
        chroot: the root whose RabbitMQ it is, None for the one that is installed.
        kills: after which the round is brought to its end.
    """

    number: int
    chroot: str | None
    kills: int

    def save(self, folder: Path) -> None:
        """Write it into the round's folder."""
        unfinished = folder / ".plan.json"
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.rename(folder / "plan.json")

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read it, None where there is none."""
        path = folder / "plan.json"
        return cls(**json.loads(path.read_text())) if path.exists() else None


class Round:
    """Runs a round, from its beginning or from where an earlier run left it.

    Args:
        choose: the kind of the next kill.
        until: when no more kills are wanted, on the clock of ``time.monotonic``.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        account: Account,
        *,
        chance: random.Random,
        choose: Callable[[], str],
        until: float,
        say: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._account = account
        self._chance = chance
        self._choose = choose
        self._until = until
        self._say = say
        self._killed = account.kills_of(plan.number)
        self._hits: dict[str, float] = {}
        """When each query was hit last: what ends from then on may be due to that."""
        self._killed_at = float("-inf")
        """When a process was killed last."""

    def run(self) -> bool:
        """Run the round; return whether every check passed."""
        end(self._folder)
        chroot = Path(self._plan.chroot) if self._plan.chroot else None
        with LocalBroker.start(
            self._folder / "broker", detached=False, chroot=chroot, extra_config=_SMALL_FRAMES
        ) as broker:
            declare(broker.url)
            # This run may be killed at once, and the broker with it.
            flush_declarations(broker)
            try:
                with gate(broker.url, self._folder):
                    self._torment(broker)
                    sound = self._check(broker)
            except SoakError as error:
                self._account.add("failure", round=self._plan.number, what=str(error))
                self._say(f"round {self._plan.number}: {error}")
                sound = False
            finally:
                end(self._folder)
        return sound

    def _torment(self, broker: LocalBroker) -> None:
        """Kill as often as is planned, then let the queries come to their end."""
        amqp_port = int(urlparse(broker.url).port or 0)
        ports: dict[int, tuple[str, ...]] = {stream_port(broker): ("read", "once"), amqp_port: ("write", "keyed")}
        with Feed(broker.url, self._folder, self._chance) as feed:
            while not self._run_job(self._start_job(broker), feed, ports):
                pass

    @property
    def _wanted(self) -> bool:
        return self._killed < self._plan.kills and time.monotonic() < self._until

    def _start_job(self, broker: LocalBroker) -> JobRun:
        task = Task(
            url=broker.url,
            stream_port=stream_port(broker),
            folder=str(self._folder),
            master=self._chance.choice(MASTERS),
        )
        return JobRun(task, self._folder)

    def _run_job(self, job_run: JobRun, feed: Feed, ports: dict[int, tuple[str, ...]]) -> bool:
        """Kill until the plan is done, then wait for the end; False once the job itself is killed."""
        try:
            while self._wanted:
                if not self._run_until_kill(job_run, feed, ports):
                    return False
            job_run.finish()
            self._wait(job_run, lambda: job_run.finished, "the end of all queries")
            return True
        finally:
            # What a killed JVM has left behind is not ended: it may disturb the next one.
            job_run.close()

    def _run_until_kill(self, job_run: JobRun, feed: Feed, ports: dict[int, tuple[str, ...]]) -> bool:
        """Run until the next kill, and kill; return whether the job is still alive."""

        def while_fed(condition: Callable[[], bool]) -> Callable[[], bool]:
            def look() -> bool:
                feed.top_up()
                return condition()

            return look

        self._wait(job_run, while_fed(lambda: job_run.working), "all queries at work")
        if self._chance.random() < _PATIENT:
            before = {query: batches(self._folder, query)[1] for query in QUERIES}
            advanced = while_fed(lambda: all(batches(self._folder, query)[1] > before[query] for query in QUERIES))
            self._wait(job_run, advanced, "another micro-batch of each query")
        at = time.monotonic() + self._chance.uniform(0, _LONGEST_PAUSE)
        self._wait(job_run, while_fed(lambda: time.monotonic() >= at), "the moment")
        kind = self._choose()
        amid = {query for query in QUERIES if self._in_batch(query)}
        match kind:
            case "jvm":
                if job_run.working and job_run.kill_jvm(self._chance):
                    # Python processes that it leaves behind may disturb the next one.
                    self._record_kill(*QUERIES, process=True)
                    self._count(kind, amid=bool(amid))
                    return False
            case "worker" | "daemon":
                if queries := self._kill_process(job_run, kind, ports, while_fed):
                    self._count(kind, *queries, amid=any(map(self._in_batch, queries)))
            case _:
                query = self._chance.choice(QUERIES)
                # Whether it is hit is known with the answer, which may come together with the end of it.
                if job_run.disturb(
                    kind, query, lambda condition, what: self._wait(job_run, while_fed(condition), what, judge=False)
                ):
                    self._record_kill(query)
                    self._count(kind, query, amid=query in amid)
        return True

    def _record_kill(self, *queries: str, process: bool = False) -> None:
        now = time.monotonic()
        self._hits.update(dict.fromkeys(queries, now))
        if process:
            self._killed_at = now

    def _in_batch(self, query: str) -> bool:
        begun, done = batches(self._folder, query)
        return begun > done

    def _kill_process(
        self,
        job_run: JobRun,
        kind: str,
        ports: dict[int, tuple[str, ...]],
        while_fed: Callable[[Callable[[], bool]], Callable[[], bool]],
    ) -> tuple[str, ...]:
        """Kill a process as soon as one is at work; return the queries that it may be of."""
        kill = job_run.kill_worker if kind == "worker" else job_run.kill_daemon
        deadline = time.monotonic() + _BUSY_WITHIN
        hit: list[str] = []

        def killed() -> bool:
            if queries := kill(ports, self._chance):
                hit.extend(queries)
                # The daemon is the same for all.
                self._record_kill(*(QUERIES if kind == "daemon" else queries), process=True)
            return bool(hit) or time.monotonic() > deadline

        self._wait(job_run, while_fed(killed), "a worker that has something to do")
        return tuple(hit)

    def _count(self, kind: str, *queries: str, amid: bool) -> None:
        self._killed += 1
        self._account.add("kill", round=self._plan.number, kind=kind, queries=queries, amid=amid)

    def _wait(self, job_run: JobRun, condition: Callable[[], bool], what: str, *, judge: bool = True) -> None:
        """Wait for something, and watch the job meanwhile.

        Args:
            judge: whether queries that end are judged; else they are when something is waited for the next time.

        Raises:
            SoakError: it does not come, or the job does what it must not.
        """
        deadline = time.monotonic() + _LONGEST_WAIT
        while True:
            job_run.look()
            while judge and job_run.ended:
                self._judge(*job_run.ended.pop())
            if condition():
                return
            if time.monotonic() > deadline:
                raise SoakError(f"after {_LONGEST_WAIT:g} s still not there: {what}")
            time.sleep(_LOOK_EVERY)  # files give no event

    def _judge(self, query: str, text: str) -> None:
        """Whether a query may have ended in this way."""
        now = time.monotonic()
        since_hit = now - self._hits.get(query, float("-inf"))
        if not is_allowed(text, since_hit=since_hit, since_kill=now - self._killed_at):
            raise SoakError(f"{query} ended by itself: {text}")

    def _check(self, broker: LocalBroker) -> bool:
        table = self._folder / "read"
        paths = check.committed_files(table)
        files = check.compare_files(check.read_stream(broker.url, STREAM), check.read_files(paths))
        rows = check.read_rows(self._folder / "write")
        queue = check.compare_queue(rows, check.read_queue(broker.url, QUEUE, rows, self._folder / "came.jsonl"))
        copy = check.compare_copy(rows, (body for _, body in check.read_stream(broker.url, COPY)))
        delivered = check.read_queue(broker.url, SCHEDULED, rows, self._folder / "delivered.jsonl")
        schedules = check.compare_queue(rows, delivered)
        orphans = len(set(table.glob("*.parquet")) - set(paths))
        found = check.found(files, queue, copy, schedules, orphans)
        self._account.add("checked", round=self._plan.number, release=broker.release, found=found)
        sound = all(part.sound for part in (files, queue, copy, schedules))
        what = f"{files}, {queue}, {copy}, schedules: {schedules}"
        if not sound:
            self._account.add("failure", round=self._plan.number, what=what)
        self._say(f"round {self._plan.number}, RabbitMQ {broker.release}: {self._killed} kills, {what}")
        return sound
