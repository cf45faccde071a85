"""Pattern 13: failed messages return after a second, through delay queues that all share.

Prints::

    attempt 1 fails
    attempt 2 works
"""

from __future__ import annotations

import asyncio

import bide
from bide.patterns.delays import delayed_retry_cascade

# Three levels: 1, 2 and 4 seconds, so any delay up to 7. On a broker that .NET endpoints use, leave it at all 28.
LAYOUT = bide.NServiceBus(routing="direct", levels=3)

app = bide.Endpoint("example13.orders", retry=bide.Retry(immediate=0, delays=["1s"]))


@app.handler
async def charge(message: bide.Message) -> None:
    attempt = message.history.retries + 1
    if attempt == 1:
        print("attempt 1 fails")
        raise ConnectionError("the bank does not answer")
    print(f"attempt {attempt} works")
    app.stop()


async def main() -> None:
    topology = delayed_retry_cascade(queues=["example13.orders"], levels=3)
    async with bide.connect(infrastructure=LAYOUT) as client:
        await client.declare(topology)
        await client.publish("order 7", to="example13.orders")
        await app.run(client)
        await client.destroy(topology)


asyncio.run(main())
