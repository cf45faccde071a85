"""Sends the shop's reminders: prints them in place of e-mails."""

from __future__ import annotations

import bide

app = bide.Endpoint("reminders", deduplicate="10m")


@app.handler
async def send(message: bide.Message) -> None:
    mail = message.json()
    if mail["kind"] == "reminder":
        print(f"to {mail['email']}: please pay {mail['amount']} for order {mail['order']}", flush=True)
    else:
        print(f"to {mail['email']}: order {mail['order']} is paid, please ignore our reminder", flush=True)


if __name__ == "__main__":
    app.serve()
