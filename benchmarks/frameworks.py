"""Delays of task frameworks with and without bide's adapters, side by side.

``python -m benchmarks.frameworks`` starts a fresh private broker. For each framework, with and without the adapter, on
an empty virtual host, it sends messages with a delay of an hour, starts a worker, and waits until the worker takes no
more, for five minutes at most: Celery alone takes them one after the other. Then it reads the worker's memory and the
unacknowledged messages of all queues, sends messages with delays of half a second to two seconds, and prints how late
they ran.

Celery alone holds tasks in the worker's memory, if their queue is a classic one, as here. taskiq-aio-pika's own broker
has a queue with a TTL for each message, as its manual says. FastStream has no delays of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, Final

import celery
import dramatiq
import taskiq_aio_pika
from dramatiq.brokers import rabbitmq
from faststream.rabbit import RabbitBroker, RabbitQueue
from taskiq.api import run_receiver_task

from bide.integrations.celery import CeleryApp
from bide.integrations.dramatiq import RabbitmqBroker
from bide.integrations.faststream import DelayMiddleware, delayed
from bide.integrations.taskiq import AioPikaBroker
from bide.local_broker import LocalBroker

_URL: Final = "BIDE_BENCHMARK_URL"
_HOUR: Final = 3600.0
_QUIET: Final = 5.0
_LONGEST_START: Final = 300.0
_GIVE_UP: Final = 30.0
_AT_ONCE: Final = 500

KINDS: Final = {
    "celery": ("stock", "adapted"),
    "dramatiq": ("stock", "adapted"),
    "faststream": ("adapted",),
    "taskiq": ("stock", "adapted"),
}
"""The frameworks, and the ways in which each of them delays messages."""


def begin(due: float) -> None:
    """The task of dramatiq: print how late it begins, unless the message only warms up."""
    if not due:
        return
    # One write for each line, because many threads print.
    os.write(1, f"{time.time() - due:.6f}\n".encode())


async def begin_async(due: float) -> None:
    """The task of taskiq, and the handler of FastStream."""
    begin(due)


def celery_task(kind: str) -> Any:
    """The task, and its application."""
    make: Any = CeleryApp if kind == "adapted" else celery.Celery
    app = make("benchmark", broker=os.environ[_URL], set_as_current=False)
    app.conf.update(task_default_queue="work", task_ignore_result=True)
    app.conf.broker_connection_retry_on_startup = True
    return app.task(begin, name="begin")


def dramatiq_actor(kind: str) -> Any:
    """The actor, and its broker."""
    make: Any = RabbitmqBroker if kind == "adapted" else rabbitmq.RabbitmqBroker
    # Without confirms, so that sending many messages takes less time.
    broker = make(url=os.environ[_URL], confirm_delivery=False)
    return dramatiq.actor(broker=broker)(begin)


def faststream_broker() -> RabbitBroker:
    """The broker, with the middleware and the handler."""
    broker = RabbitBroker(os.environ[_URL], logger=None)
    broker.add_middleware(DelayMiddleware(broker))
    broker.subscriber("work")(begin_async)
    return broker


def taskiq_task(kind: str) -> Any:
    """The task, and its broker."""
    if kind == "adapted":
        broker: Any = AioPikaBroker(os.environ[_URL])
    else:
        broker = taskiq_aio_pika.AioPikaBroker(os.environ[_URL], delay_queue=taskiq_aio_pika.Queue(name="delay"))
    return broker.register_task(begin_async, task_name="begin")


def work(framework: str, kind: str) -> None:
    """Be a worker until the process is killed."""
    if framework == "celery":
        options = ["--pool", "threads", "--concurrency", "8", "--without-gossip", "--without-mingle"]
        celery_task(kind).app.worker_main(["--quiet", "worker", "--loglevel", "error", *options])
        return
    if framework == "dramatiq":
        dramatiq.Worker(dramatiq_actor(kind).broker, worker_threads=8).start()
        threading.Event().wait()

    async def receive() -> None:
        if framework == "faststream":
            await faststream_broker().start()
            await asyncio.Event().wait()
        broker = taskiq_task(kind).broker
        broker.is_worker_process = True
        await broker.startup()
        await run_receiver_task(broker)

    asyncio.run(receive())


@asynccontextmanager
async def sending(framework: str, kind: str) -> AsyncIterator[Callable[[float, float], Awaitable[object]]]:
    """How FastStream or taskiq sends the due time with a delay."""
    if framework == "faststream":
        broker = faststream_broker()
        async with broker:
            # The queue has to exist before the first message is delayed.
            await broker.declare_queue(RabbitQueue("work"))
            yield lambda due, delay: broker.publish(due, "work", headers=delayed(timedelta(seconds=delay)))
        return
    task = taskiq_task(kind)
    await task.broker.startup()
    yield lambda due, delay: task.kicker().with_labels(delay=delay).kiq(due)
    await task.broker.shutdown()


def send(framework: str, kind: str, delays: list[float]) -> None:
    """Send a message with each of these delays twice: first one that is not measured, for what is declared once."""
    if framework == "celery":
        task = celery_task(kind)
        for is_warm in (False, True):
            for delay in delays:
                eta = datetime.now(UTC) + timedelta(seconds=delay)
                task.apply_async((eta.timestamp() if is_warm else 0.0,), eta=eta)
        task.app.close()
        return
    if framework == "dramatiq":
        actor = dramatiq_actor(kind)
        for is_warm in (False, True):
            for delay in delays:
                due = time.time() + delay if is_warm else 0.0
                actor.send_with_options(args=(due,), delay=int(delay * 1000))
        actor.broker.close()
        return

    async def kick() -> None:
        async with sending(framework, kind) as send_one:
            for is_warm in (False, True):
                for start in range(0, len(delays), _AT_ONCE):
                    batch = delays[start : start + _AT_ONCE]
                    dues = [time.time() + delay if is_warm else 0.0 for delay in batch]
                    await asyncio.gather(*map(send_one, dues, batch))

    asyncio.run(kick())


def memory(pid: int) -> float:
    """The resident memory of a process, in megabytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def unacknowledged(broker: LocalBroker, vhost: str) -> tuple[int, int]:
    """Consumers and unacknowledged messages of all queues."""
    options = ("--silent", "--no-table-headers", "consumers", "messages_unacknowledged")
    rows = [line.split() for line in broker.rabbitmqctl("list_queues", "-p", vhost, *options).splitlines()]
    return sum(int(consumers) for consumers, _ in rows), sum(int(held) for _, held in rows)


def measure(broker: LocalBroker, framework: str, kind: str, pending: int, messages: int) -> str:
    """One line of the table."""
    vhost = f"{framework}-{kind}"
    os.environ[_URL] = broker.add_vhost(vhost)
    command = [sys.executable, "-m", "benchmarks.frameworks", "--worker", framework, kind]
    send(framework, kind, [_HOUR] * (pending // 2))
    lines: queue.Queue[str] = queue.Queue()

    def read(output: IO[str]) -> None:
        for line in output:
            lines.put(line)

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        output = worker.stdout
        assert output is not None
        threading.Thread(target=read, args=(output,), daemon=True).start()
        try:
            before, since = -1, time.monotonic()
            latest = since + _LONGEST_START
            while time.monotonic() < min(since + _QUIET, latest):
                consumers, held = unacknowledged(broker, vhost)
                if held != before or not consumers:
                    before, since = held, time.monotonic()
            used = memory(worker.pid)
            generator = random.Random(1)
            send(framework, kind, [generator.uniform(0.5, 2.0) for _ in range(messages)])
            late: list[float] = []
            with suppress(queue.Empty):
                while len(late) < messages:
                    late.append(float(lines.get(timeout=_GIVE_UP)) * 1000)
        finally:
            worker.kill()
    broker.delete_vhost(vhost)
    late.sort()
    found = f"{late[len(late) // 2]:.0f} | {late[int(len(late) * 0.99)]:.0f}" if late else "- | -"
    return f"| {framework} | {kind} | {before:,} | {used:.0f} | {len(late)} of {messages} | {found} |"


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="*", help=f"Some of {', '.join(KINDS)}. [default: all]")
    parser.add_argument("--pending", type=int, default=20_000, help="Messages that wait. [default: 20000]")
    parser.add_argument("--messages", type=int, default=200, help="Messages with short delays. [default: 200]")
    parser.add_argument("--chroot", type=Path, help="Root folder of a system with another RabbitMQ.")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(*given.worker)
        return
    with LocalBroker.start(ephemeral=True, chroot=given.chroot) as broker:
        print(f"RabbitMQ {broker.release}, {given.pending:,} messages wait for an hour\n")
        print("| framework | broker | unacknowledged | worker, MB | ran | p50 late, ms | p99 |")
        print("|---|---|---|---|---|---|---|")
        for framework in given.frameworks or KINDS:
            for kind in KINDS[framework]:
                print(measure(broker, framework, kind, given.pending, given.messages), flush=True)
        print(f"\nload average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
