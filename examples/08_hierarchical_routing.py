"""Pattern 8: a subscriber to "finance" also receives the message types added below it later.

Prints::

    ledger: finance.fraud.alert
    ledger: finance.fraud.pattern-found
"""

from __future__ import annotations

import asyncio

import bide
from bide.patterns.conventions import hierarchical_routing, message_line


async def main() -> None:
    topology = hierarchical_routing(
        messages=["example8-finance.fraud.alert"], queues={"example8-ledger": ["example8-finance"]}
    )
    later = message_line("example8-finance.fraud.pattern-found")
    async with bide.connect() as client:
        await client.declare(topology)
        await client.publish("!", exchange="example8-finance.fraud.alert")
        await client.declare(later)
        await client.publish("?", exchange="example8-finance.fraud.pattern-found")
        async with client.consume("example8-ledger") as messages:
            for _ in range(2):
                message = await anext(messages)
                print("ledger:", message.exchange.removeprefix("example8-"))
                await message.ack()
        await client.destroy(topology | later)


asyncio.run(main())
