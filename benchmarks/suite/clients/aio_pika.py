"""aio-pika: concurrent confirmed publishes, and consuming with an iterator."""

from __future__ import annotations

import asyncio
import time

import aio_pika

from benchmarks.suite.processor import Meter
from benchmarks.suite.setup import IN_FLIGHT, TARGET, PlainMessages, fill, minutes_clock, prepare
from benchmarks.suite.task import Answer, Job


async def publish(job: Job) -> Answer:
    """Publish with 1,000 messages in flight."""
    messages = PlainMessages(await prepare(job.url, minutes_clock()))
    body = bytes(job.options["size"])
    async with await aio_pika.connect(job.url) as connection:
        channel = await connection.channel(publisher_confirms=True)
        entry = await channel.get_exchange(messages.next().exchange, ensure=False)
        meter = Meter(job.pid)
        end = time.perf_counter() + job.options["seconds"]

        async def send() -> int:
            sent = 0
            while time.perf_counter() < end:
                one = messages.next()
                message = aio_pika.Message(
                    body,
                    headers=one.headers,
                    message_id=one.message_id,
                    delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                )
                await entry.publish(message, one.routing_key)
                sent += 1
            return sent

        sent = sum(await asyncio.gather(*(send() for _ in range(IN_FLIGHT))))
        return Answer(values=meter.read(sent))


async def consume(job: Job) -> Answer:
    """Receive and acknowledge, message by message."""
    await fill(job)
    wanted = job.options["messages"]
    async with await aio_pika.connect(job.url) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=job.options["prefetch"])
        queue = await channel.get_queue(TARGET, ensure=False)
        meter = Meter(job.pid)
        received = 0
        async with queue.iterator() as messages:
            async for message in messages:
                await message.ack()
                received += 1
                if received == wanted:
                    break
            return Answer(values=meter.read(received))
