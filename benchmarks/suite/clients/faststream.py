"""FastStream: a subscriber with an empty handler."""

from __future__ import annotations

from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

from benchmarks.suite.handled import Handled
from benchmarks.suite.setup import TARGET, fill
from benchmarks.suite.task import Answer, Job


async def consume(job: Job) -> Answer:
    """Receive with a handler; FastStream acknowledges each message after it."""
    await fill(job)
    handled = Handled(job)
    broker = RabbitBroker(job.url, logger=None)

    @broker.subscriber(RabbitQueue(TARGET, declare=False), channel=Channel(prefetch_count=job.options["prefetch"]))
    async def handle(body: bytes) -> None:
        handled.add()

    async with broker:
        await broker.start()
        return await handled.answer()
