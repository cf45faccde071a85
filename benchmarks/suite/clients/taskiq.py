"""taskiq: a receiver with an empty task."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from taskiq import TaskiqMessage
from taskiq.api import run_receiver_task
from taskiq_aio_pika import AioPikaBroker, Queue

from benchmarks.suite.handled import Handled
from benchmarks.suite.setup import TARGET, fill
from benchmarks.suite.task import Answer, Job

_TASK: Final = "handle"


async def consume(job: Job) -> Answer:
    """Receive with a task, without results; taskiq acknowledges each message after it."""
    broker = AioPikaBroker(job.url, qos=job.options["prefetch"]).with_queue(Queue(name=TARGET, declare=False))
    await fill(job, body=_body(broker, job.options["size"]))
    handled = Handled(job)

    async def handle(padding: str) -> None:
        handled.add()

    broker.register_task(handle, task_name=_TASK)
    broker.is_worker_process = True
    await broker.startup()
    receiving = asyncio.create_task(run_receiver_task(broker))
    answer = await handled.answer()
    receiving.cancel()
    with suppress(asyncio.CancelledError):
        await receiving
    await broker.shutdown()
    return answer


def _body(broker: AioPikaBroker, size: int) -> bytes:
    """The body of a task of this size, or of the smallest possible."""

    def encoded(padding: str) -> bytes:
        message = TaskiqMessage(task_id="0" * 32, task_name=_TASK, labels={}, args=[padding], kwargs={})
        return broker.formatter.dumps(message).message

    return encoded("x" * max(size - len(encoded("")), 0))
