"""Pattern 3: one program reads the mailbox; a headers exchange routes mails to applications.

Prints::

    finance: component status
    other: lunch
"""

from __future__ import annotations

import asyncio
from email.message import EmailMessage

import bide
from bide.patterns.broadcast import email_routing, mail_headers


def mail(sender: str, subject: str) -> EmailMessage:
    made = EmailMessage()
    made["From"], made["To"], made["Subject"] = sender, "fleet@air.example", subject
    return made


async def main() -> None:
    topology = email_routing(
        "example3.mailbox",
        rules={"example3.finance": {"from": "reports@abc.example", "subject": "component status"}},
        others="example3.other",
    )
    async with bide.connect() as client:
        await client.declare(topology)
        for one in (mail("Reports <reports@abc.example>", "component status"), mail("cook@air.example", "lunch")):
            await client.publish(one.as_bytes(), exchange="example3.mailbox", headers=mail_headers(one))
        for queue in ("example3.finance", "example3.other"):
            async with client.consume(queue) as messages:
                message = await anext(messages)
                print(f"{queue.removeprefix('example3.')}: {message.headers['subject']}")
                await message.ack()
        await client.destroy(topology)


asyncio.run(main())
