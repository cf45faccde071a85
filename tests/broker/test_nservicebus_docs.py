"""The programs and commands of docs/nservicebus.md."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
from asyncio.subprocess import PIPE, Process
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.broker.dotnet import Endpoint, Transport
from tests.broker.receiving import connected, eventually, has_consumer
from tests.readme import blocks, commands_of, shape
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from tests.support import Vhost

PAGE = "docs/nservicebus.md"
SAGA = ("11111111-2222-3333-4444-555555555555", "Sales.OrderPolicy, Sales")


def programs() -> dict[str, str]:
    """The programs by their file names."""
    found = {}
    for language, text in blocks(PAGE):
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", text)
            assert name is not None, text
            found[name[1]] = text
    return found


def outputs(title: str) -> list[str]:
    """What the programs of a section print."""
    return [text for language, text in blocks(PAGE, title) if language == "" and not text.startswith("$")]


async def start(vhost: Vhost, folder: Path, *command: str) -> Process:
    environment = {**os.environ, "BIDE_URL": vhost.url, "BIDE_MANAGEMENT_URL": vhost.broker.management_url}
    return await asyncio.create_subprocess_exec(
        sys.executable, *command, env=environment, cwd=folder, stdout=PIPE, stderr=PIPE
    )


async def ended(process: Process) -> str:
    """The output of a process that succeeds."""
    output, errors = await asyncio.wait_for(process.communicate(), TIMEOUT)
    assert process.returncode == 0, errors.decode()
    return output.decode()


async def test_the_programs_do_what_the_page_says(vhost: Vhost, tmp_path: Path) -> None:
    for name, text in programs().items():
        (tmp_path / name).write_text(text)
    (printed,) = outputs("An endpoint")
    (commands,) = (text for _, text in blocks(PAGE) if text.startswith("$"))
    for command, output in commands_of(commands):
        process = await start(vhost, tmp_path, "-m", *shlex.split(command))
        assert shape(await ended(process)) == shape(output.replace("virtual host /", f"virtual host {vhost.name}"))
    transport = await asyncio.to_thread(Transport, vhost.url)
    for queue in ("Sales", "Reporting", "Particular.ServiceControl"):
        await asyncio.to_thread(transport.create_queue, queue)
    transport.channel.exchange_declare("Shop:IOrderEvent", "fanout", durable=True)
    transport.channel.exchange_bind("Reporting", "Shop:IOrderEvent", "")

    async def receive(queue: str) -> Any:
        return await asyncio.to_thread(transport.receive, queue)

    billing = await start(vhost, tmp_path, "billing.py")
    try:
        registered = await receive("Particular.ServiceControl")
        assert registered.json()["Endpoint"] == "Billing"
        sales = Endpoint(transport, "Sales")
        await asyncio.to_thread(sales.send, "Billing", "Shop.BillOrder, Shop", {"OrderId": 7}, saga=SAGA)
        reply, check = await receive("Sales"), await receive("Sales")
        assert reply.headers["NServiceBus.EnclosedMessageTypes"] == "Shop.BillingDone"
        assert reply.headers["NServiceBus.SagaId"] == SAGA[0]
        assert check.headers["NServiceBus.EnclosedMessageTypes"] == "Shop.CheckPayment"
        assert (await receive("Reporting")).json() == {"OrderId": 7}
        assert (await receive("audit")).headers["NServiceBus.ProcessingEndpoint"] == "Billing"
        headers = {"NServiceBus.EnclosedMessageTypes": "Shop.OrderCancelled, Shop"}
        await asyncio.to_thread(transport.publish, "Shop:OrderCancelled", "", headers, b'{"OrderId":7}', "m1")
        assert (await receive("audit")).json() == {"OrderId": 7}
        await ended(await start(vhost, tmp_path, "web.py"))
        order = await receive("Sales")
        assert order.headers["NServiceBus.EnclosedMessageTypes"] == "Shop.PlaceOrder"
        assert order.headers["NServiceBus.OriginatingEndpoint"] == "Web"
    finally:
        billing.send_signal(signal.SIGTERM)
        output = await ended(billing)
    assert output == printed
    await asyncio.to_thread(transport.close)


async def test_the_programs_work_without_dotnet(vhost: Vhost, tmp_path: Path) -> None:
    for name, text in programs().items():
        (tmp_path / name).write_text(text)
    printed = dict(zip(("billing.py", "sales.py"), outputs("Try it without .NET"), strict=True))
    endpoints = {name: await start(vhost, tmp_path, name) for name in printed}
    try:
        async with connected(vhost.url) as connection:
            # An endpoint consumes when it has declared everything, not yet when its queue exists.
            for queue in ("Billing", "Sales"):
                await eventually(partial(has_consumer, connection, queue))
        await ended(await start(vhost, tmp_path, "web.py"))
        async with asyncio.timeout(TIMEOUT):
            for name, text in printed.items():
                output = endpoints[name].stdout
                assert output is not None
                assert [(await output.readline()).decode() for _ in text.splitlines()] == text.splitlines(keepends=True)
        for endpoint in endpoints.values():
            endpoint.send_signal(signal.SIGTERM)
            assert await ended(endpoint) == ""
    finally:
        for endpoint in endpoints.values():
            if endpoint.returncode is None:
                endpoint.kill()
                await endpoint.wait()
