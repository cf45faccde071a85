"""The pictures of docs/console.md: each view, light and dark, wide and on a phone.

``make console-pictures`` starts a broker of its own and a gate, fills them as a shop would, lets messages come for some
minutes, and takes a picture of each view in Chromium, with the font Inter. ``pngquant`` gives the pictures a palette.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import subprocess
import tempfile
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import bide
from bide.admin.taps import turn_on
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.cli.advice import with_options
from bide.console.parameters import Parameters
from bide.console.schedules import change
from bide.console.server import serve
from bide.console.settings import Access
from bide.console.vhost import ConsoleVhost
from bide.error_queues import ErrorQueue, Selection
from bide.local_broker import LocalBroker
from tests import browser
from tests.browser import Browser

PICTURES: Final = Path(__file__).parents[1] / "docs/pictures"
VIEWS: Final = {
    "waiting": "waiting",
    "tap": "waiting?tap=1",
    "find": "find?text=invoice:00042",
    "schedules": "schedules",
    "many": "many?prefix=invoice%3A&to=reminders&count=1",
    "failures": "failures?queue=error",
    "problems": "problems",
    "lateness": "lateness?minutes=15",
    "log": "log",
}
"""The address of each view, by the name in its pictures."""

SIZES: Final = {"wide": (1200, 1240), "phone": (390, 1720)}
"""Width, and the maximum height, of a picture of a long page."""

LEAST: Final = 480
"""The height of a short page, which has the list of views beside it."""

ENDS: Final = """
[['.view', 32], ['.card', 16], ['.card.flat tbody tr', 0]].flatMap(([chosen, margin]) =>
  [...document.querySelectorAll(chosen)].map((one) => Math.ceil(one.getBoundingClientRect().bottom) + margin))
"""
"""Where a picture can end, so that it does not cut through a card or a row."""

UNANSWERED: Final = """
[...document.querySelectorAll('.source.missing, .badge')]
  .some((one) => ['no gate answers', 'not searched'].includes(one.innerText))
"""
"""Whether no gate answered."""

QUEUES: Final = ("reminders", "mail", "orders", "billing", "checkout", "error")
SCHEDULES: Final = 1_500
PAUSE: Final = 0.2
"""Seconds between two messages of the traffic."""

OPERATOR: Final = "ann@shop.example"
PATIENCE: Final = 120
"""Seconds for a view."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.console_pictures", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15, help="time for which messages come")
    parser.add_argument("--into", type=Path, default=PICTURES, help="the folder of the pictures")
    arguments = parser.parse_args()
    # Messages fail as they should.
    logging.getLogger("bide.endpoint").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder, LocalBroker.start(ephemeral=True) as broker:
        asyncio.run(run(broker, Path(folder), arguments.into, arguments.minutes * 60))


async def run(broker: LocalBroker, folder: Path, into: Path, seconds: float) -> None:
    """Fill the broker, and take the pictures."""
    url = broker.add_vhost("shop")
    gate = bide.Gate(url, allow=["reminders", "mail", "orders", "billing"], state=folder / "gate")
    async with bide.connect(url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(one) for one in QUEUES]))
        infrastructure = await client.infrastructure()
        await client.publish(b"", to="orders", delay="10ms")
        connection = await Connection.open(BrokerUrl.parse(url))
        await turn_on(connection, infrastructure)
        await connection.close()
        gating = asyncio.create_task(gate.run())
        handling = asyncio.create_task(handle(client, broker.management_url))
        traffic = asyncio.create_task(send(client))
        try:
            await asyncio.gather(schedule(client), asyncio.sleep(seconds))  # traffic arrives meanwhile
            vhost = ConsoleVhost(
                url=BrokerUrl.parse(url),
                infrastructure=infrastructure,
                management_url=broker.management_url,
                stream_port=broker.stream_port,
            )
            async with replace(vhost) as connected:
                await operate(client, connected)
            await show(vhost, folder, into)
        finally:
            for task in (traffic, handling):
                task.cancel()
            gate.stop()
            await asyncio.gather(gating, handling, traffic, return_exceptions=True)


async def schedule(client: bide.Client) -> None:
    """What waits: reminders of invoices over three days, recurring jobs, and delayed messages without a key."""
    chance = random.Random(7)
    targets = ["reminders"] * 6 + ["mail"] * 3 + ["billing"]

    def delay(mean: float, deviation: float) -> str:
        return f"{max(int(chance.gauss(mean, deviation) * 3600), 600)}s"

    reminders = [
        bide.OutgoingSchedule(
            json={"invoice": number, "amount": chance.randint(10, 400)},
            key=f"invoice:{number:05}",
            to=chance.choice(targets),
            delay=delay(chance.choice([7, 31, 31, 55]), 4),
        )
        for number in range(SCHEDULES)
    ]
    async for _ in client.publish_many(reminders):
        pass
    jobs = {
        "digest:daily": ("mail", "0 8 * * MON-FRI", "Europe/Berlin"),
        "report:weekly": ("billing", "30 6 * * MON", "America/New_York"),
        "stock:poll": ("orders", "*/15 * * * *", "UTC"),
        "carts:expire": ("orders", "0 3 * * *", "UTC"),
    }
    for key, (queue, rule, zone) in jobs.items():
        await client.schedule(json={}, key=key, to=queue, every=rule, time_zone=zone)
    await client.pause("report:weekly")
    await client.schedule(json={"campaign": 12}, key="campaign:12", to="newsletters", delay="0s")
    waiting = [
        bide.OutgoingMessage(json={"order": number}, to="orders", delay=delay(chance.choice([3, 20, 90, 300]), 2))
        for number in range(600)
    ]
    async for _ in client.publish_many(waiting):
        pass


async def send(client: bide.Client) -> None:
    """Orders for the endpoint, and delayed messages that come within seconds."""
    chance = random.Random(8)
    number = 0
    while True:
        number += 1
        wait = f"{chance.choice([0.5, 1, 2, 5])}s"
        await client.publish(json={"mail": number}, to="mail", delay=wait)
        if number % 25 == 0:
            kind = chance.choice(["OrderPlaced", "OrderPlaced", "OrderPlaced", "RefundRequested"])
            values = {"order": 4_000 + number, "amount": chance.randint(5, 300)}
            await client.publish(json=values, to="checkout", type=kind)
        await asyncio.sleep(PAUSE)


async def handle(client: bide.Client, management_url: str) -> None:
    """An endpoint, some of whose messages fail."""
    app = bide.Endpoint(
        "checkout",
        retry=bide.Retry(immediate=1, delays=["2s"]),
        error_queue="error",
        slow_down_after=None,
        management_url=management_url,
    )

    @app.handler(type="OrderPlaced")
    async def charge_card(message: bide.Message) -> None:
        amount = message.json()["amount"]
        if amount > 100:
            raise ConnectionError("the payment service does not answer: 503 from payments.internal")
        if amount < 20:
            raise ValueError(f"the amount {amount} is below the minimum of 20")

    @app.handler
    async def refund_order(message: bide.Message) -> None:
        raise LookupError(f"order {message.json()['order']} has no payment")

    await app.run(client)


async def operate(client: bide.Client, vhost: ConsoleVhost) -> None:
    """A few changes of an operator, for the log."""
    errors = ErrorQueue(client, "error", management_url=vhost.management_url, operator=OPERATOR)
    failed = [one async for one in errors.messages(Selection(exception="LookupError"))]
    for one in failed[:1]:
        await errors.edit(one.id, body=b'{"order": 4001, "payment": 17}')
    await errors.retry(Selection(ids=frozenset(one.id for one in failed[1:3])))
    await errors.archive(Selection(exception="ValueError"), keep="30d")
    for values in (
        {"action": "move", "key": "invoice:00011", "delay": "2d"},
        {"action": "pause", "key": "invoice:00023"},
        {"action": "cancel", "key": "invoice:00007"},
    ):
        await change(vhost, Parameters(values=values, operator=OPERATOR))


async def show(vhost: ConsoleVhost, folder: Path, into: Path) -> None:
    """Serve the console, and take a picture of each view."""
    started: asyncio.Future[Access] = asyncio.get_running_loop().create_future()
    stopping = asyncio.Event()
    serving = asyncio.create_task(
        serve([vhost], Access(port=0), started=started.set_result, stopping=stopping, advise=with_options)
    )
    try:
        access = await started
        await asyncio.to_thread(take, access.url, folder, into)
    finally:
        stopping.set()
        with suppress(asyncio.CancelledError):
            await serving


def take(url: str, folder: Path, into: Path) -> None:
    """Take the pictures of a console."""
    origin = url.partition("#")[0]
    with browser.start(folder / "profile") as page:
        page.visit(url)
        wait(page)
        for name, path, colours, size in pictures():
            width, height = SIZES[size]
            load(page, f"{origin}#/{path}", width, height, colours)
            overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            target = into / f"console-{name}-{colours}-{size}.png"
            target.write_bytes(reduced(screenshot(page, width, height)))
            cut = f", {overflow} px too wide" if overflow > 0 else ""
            print(f"{target.name}: {target.stat().st_size:,} bytes{cut}", flush=True)


def pictures() -> Iterator[tuple[str, str, str, str]]:
    """View, address, colours and size of each picture."""
    for name, path in VIEWS.items():
        for colours in ("light", "dark"):
            # On a phone, the skyline of the tap is too far down for a picture.
            for size in SIZES if name != "tap" else ("wide",):
                yield name, path, colours, size


def load(page: Browser, url: str, width: int, height: int, colours: str) -> None:
    """Load a view, and again while no gate leads, as happens on a busy machine."""
    deadline = time.monotonic() + PATIENCE
    while True:
        page.visit("about:blank")
        page.visit(url, width=width, height=height, dark=colours == "dark")
        wait(page)
        if not page.evaluate(UNANSWERED):
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"no gate leads: {url}")


def wait(page: Browser) -> None:
    """Wait until a view has loaded."""
    deadline = time.monotonic() + PATIENCE
    while not page.evaluate("document.querySelector('.view')?.dataset.ready === 'true'"):
        if time.monotonic() > deadline:
            raise SystemExit(f"a view did not load: {page.evaluate('location.href')}, {page.complaints}")
        time.sleep(0.1)  # no event reports that the view is complete


def screenshot(page: Browser, width: int, height: int) -> bytes:
    """The page from its top to its last element that ends above a height, as PNG."""
    ends = page.evaluate(ENDS)
    end = max(one for one in ends if one <= height)
    clip = {"x": 0, "y": 0, "width": width, "height": max(end, LEAST), "scale": 1}
    found = page.call("Page.captureScreenshot", captureBeyondViewport=True, format="png", clip=clip)
    return b64decode(found["data"])


def reduced(picture: bytes) -> bytes:
    """A PNG with a palette."""
    return subprocess.run(
        ["pngquant", "--speed", "1", "--strip", "128", "-"], input=picture, stdout=subprocess.PIPE, check=True
    ).stdout


if __name__ == "__main__":
    main()
