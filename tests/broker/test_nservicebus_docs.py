"""The programs and commands of docs/nservicebus.md."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.broker.dotnet import Endpoint, Transport
from tests.broker.receiving import connected, eventually, has_consumer
from tests.readme import Shell, blocks, code, commands_of, shape, table
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from tests.support import Rabbitmq, Vhost

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
    (commands,) = (text for _, text in blocks(PAGE, "An endpoint") if text.startswith("$"))
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


def test_a_first_delayed_message_has_the_headers_on_the_page(vhost: Vhost, tmp_path: Path, rabbitmq: Rabbitmq) -> None:
    (tmp_path / "web.py").write_text(programs()["web.py"])
    shell = Shell(tmp_path, rabbitmq, vhost)
    (commands,) = (text for _, text in blocks(PAGE, "A first delayed message") if text.startswith("$"))
    shell.check((f"set -o pipefail; {command}", shown) for command, shown in commands_of(commands))


async def test_the_programs_need_no_more_permissions_than_the_page_says(
    vhost: Vhost, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (commands,) = (text for _, text in blocks(PAGE, "An endpoint") if text.startswith("$"))
    settings = 'declare=False, retry=bide.Retry(immediate=0, delays=["1s"])'
    for name, text in programs().items():
        without = text.replace("connect_sync(", "connect_sync(declare=False, ")
        (tmp_path / name).write_text(without.replace('"Billing",', f'"Billing", {settings},'))
    for command, _ in commands_of(commands):
        await ended(await start(vhost, tmp_path, "-m", *shlex.split(command)))
    transport = await asyncio.to_thread(Transport, vhost.url)
    await asyncio.to_thread(transport.create_endpoint, "Sales")
    users = {}
    for row in table(PAGE, "Before production"):
        (program,), *patterns = map(code, row)
        user = f"{vhost.name}-{program}"
        vhost.broker.add_user(user, "secret")
        # Other tests share the broker.
        request.addfinalizer(partial(vhost.broker.delete_user, user))
        configure, write, read = (one for (one,) in patterns)
        vhost.broker.set_permissions(vhost.name, user, configure=configure, write=write, read=read)
        users[program] = replace(vhost, url=re.sub(r"//.*?@", f"//{user}:secret@", vhost.url))
    assert set(users) == {"web.py", "billing.py"}
    await ended(await start(users["web.py"], tmp_path, "web.py"))
    order = await asyncio.to_thread(transport.receive, "Sales")
    assert order.headers["NServiceBus.EnclosedMessageTypes"] == "Shop.PlaceOrder"
    billing = await start(users["billing.py"], tmp_path, "billing.py")
    try:
        sales = Endpoint(transport, "Sales")
        await asyncio.to_thread(sales.send, "Billing", "Shop.BillOrder, Shop", {"OrderId": 7})
        for expected in ("Shop.BillingDone", "Shop.CheckPayment"):
            received = await asyncio.to_thread(transport.receive, "Sales")
            assert received.headers["NServiceBus.EnclosedMessageTypes"] == expected
        await asyncio.to_thread(sales.send, "Billing", "Shop.BillOrder, Shop", {"no": "order"})
        for queue in ("audit", "error"):
            await asyncio.to_thread(transport.receive, queue)
    finally:
        billing.send_signal(signal.SIGTERM)
        await ended(billing)
    await asyncio.to_thread(transport.close)


def test_the_guard_lets_dotnet_declare(vhost: Vhost, tmp_path: Path, rabbitmq: Rabbitmq) -> None:
    transport = Transport(vhost.url)
    transport.build_delays()
    transport.create_endpoint("Sales")
    shell = Shell(tmp_path, rabbitmq, vhost)
    ((_, commands),) = (
        (language, text) for language, text in blocks(PAGE, "Before production") if language == "console"
    )
    verify, guard, limits = (command for command, _ in commands_of(commands))
    found = shell.paste(f"{verify} || test $? = 1")
    assert [line.split()[1] for line in found.splitlines() if line.startswith("✗")] == ["guard"], found
    shell.paste(guard)
    shell.paste(verify)
    shell.paste(limits)
    transport.build_delays()
    transport.create_endpoint("Sales")
    transport.close()


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
