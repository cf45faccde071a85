"""The programs and commands of docs/patterns.md and of the page of each pattern."""

from __future__ import annotations

import ast
import asyncio
import inspect
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import pytest

import bide
from bide.messaging.delayed_message import DelayedMessagePublisher
from bide.messaging.ephemeral import EphemeralDelays
from bide.messaging.partitions import consume_partitions
from bide.messaging.rpc import Caller
from bide.messaging.rpc_server import serve
from bide.messaging.wire_tap import tap
from bide.patterns.catalogue import PATTERNS
from bide.patterns.partitions import partition_queues
from tests.broker.receiving import eventually, receive
from tests.readme import Shell, blocks
from tests.support import Rabbitmq, Vhost
from tests.timeouts import TIMEOUT

PAGE: Final = "docs/patterns.md"
NAMES: Final = {
    "bide": bide,
    "Caller": Caller,
    "DelayedMessagePublisher": DelayedMessagePublisher,
    "EphemeralDelays": EphemeralDelays,
    "consume_partitions": consume_partitions,
    "partition_queues": partition_queues,
    "serve": serve,
    "tap": tap,
}


def programs(page: str) -> list[str]:
    return [text for language, text in blocks(page) if language == "python"]


async def run(page: str, number: int = 0, *, limit: str | None = None, **names: Any) -> dict[str, Any]:
    """Run a program of a page, and return its variables.

    Args:
        limit: the timeout of the program, which is too short on a busy machine; that of tests replaces it.
    """
    program = programs(page)[number]
    if limit is not None:
        assert limit in program
        program = program.replace(limit, f'timeout="{TIMEOUT:g}s"')
    found = {**NAMES, **names}
    code = compile(program, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = FunctionType(code, found)()
    if inspect.isawaitable(running):
        await running
    return found


async def first(page: str, client: bide.Client, publishing: Any, number: int = 0, **names: Any) -> Any:
    """What a program prints or handles first, which runs until it is cancelled."""
    handled: asyncio.Queue[Any] = asyncio.Queue()
    names |= {"print": handled.put_nowait, "handler": lambda message: handled.put(message.body)}
    async with asyncio.timeout(TIMEOUT), asyncio.TaskGroup() as group:
        running = group.create_task(run(page, number, client=client, **names))

        async def has_handled() -> bool:
            # A tap hears what is published after it is bound.
            await publishing()
            return not handled.empty()

        await eventually(has_handled)
        running.cancel()
    return handled.get_nowait()


def test_each_page_with_a_program_is_here() -> None:
    pages = [f"docs/patterns/{one.number:02}-{one.name}.md" for one in PATTERNS if one.number is not None]
    assert [page[14:16] for page in pages if programs(page)] == ["04", "06", "13", "14", "15", "18"]


async def test_the_tap_hears_messages(client: bide.Client) -> None:
    (pattern,) = (one for one in PATTERNS if one.number == 4)
    await client.declare(pattern.sample_topology())

    async def publish() -> None:
        await client.publish(b"sold", exchange="booking.new", routing_key="web")

    assert await first("docs/patterns/04-private-consumer-exchanges.md", client, publish) == b"sold"


async def test_partitions_are_consumed(client: bide.Client) -> None:
    for name in partition_queues("bookings", 3):
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(name, {"x-single-active-consumer": True})]))

    async def publish() -> None:
        await client.publish(b"booked", to="bookings.2")

    assert await first("docs/patterns/06-ordered-partitions.md", client, publish) == b"booked"


async def test_a_delay_by_a_cascade(vhost: Vhost, client: bide.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIDE_URL", vhost.url)
    await client.declare(bide.Topology(queues=[bide.Queue.quorum("consumer-app-1")]))
    await run("docs/patterns/13-delayed-retry-cascade.md", body=b"again")
    (message,) = await receive(client, "consumer-app-1", 1)
    assert message.body == b"again"


async def test_a_retry_by_an_ephemeral_queue(client: bide.Client) -> None:
    await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
    await EphemeralDelays(client).send(b"order", delay="100ms", to="orders")
    async with asyncio.timeout(TIMEOUT), client.consume("orders") as messages:
        message = await anext(messages)
        await run("docs/patterns/14-ephemeral-delay.md", client=client, message=message)
        again = await anext(messages)
        assert again.body == b"order"
        await again.ack()


async def test_the_header_of_the_plugin_delays(client: bide.Client) -> None:
    reminders = bide.Exchange("reminders", "topic")
    await client.declare(
        bide.Topology([reminders], [bide.Queue.quorum("mail")], [bide.Binding("reminders", "mail", "user.#")])
    )
    await run("docs/patterns/15-delayed-message-exchange.md", client=client)
    (message,) = await receive(client, "mail", 1)
    assert (message.body, message.routing_key) == (b"tea", "user.7")
    assert message.due is not None


async def test_a_call_gets_its_reply(client: bide.Client) -> None:
    page = "docs/patterns/18-rpc.md"
    await client.declare(bide.Topology(queues=[bide.Queue.quorum("prices")]))

    async def handler(request: bide.Message) -> bytes:
        return b"price of " + request.body

    async with asyncio.timeout(TIMEOUT), asyncio.TaskGroup() as group:
        serving = group.create_task(run(page, 1, client=client, handler=handler))
        found = await run(page, 0, limit='timeout="2s"', client=client)
        serving.cancel()
    assert found["reply"].body == b"price of tea"


async def test_the_program_and_the_commands_of_the_catalogue(
    client: bide.Client, vhost: Vhost, rabbitmq: Rabbitmq, tmp_path: Path
) -> None:
    await run(PAGE, client=client)
    assert await client.exists("everybody-else")
    listing, explaining = (text for language, text in blocks(PAGE) if language == "sh")
    shell = Shell(tmp_path, rabbitmq, vhost)
    answered = listing.replace("bide topology destroy", "echo y | bide topology destroy")
    printed = await asyncio.to_thread(shell.paste, answered)
    assert printed.index("if-else ") < printed.index("flowchart LR") < printed.index("everybody-else")
    assert not await client.exists("everybody-else")
    (shown,) = (text for language, text in blocks(PAGE) if text.startswith("exchange travel"))
    assert await asyncio.to_thread(shell.paste, f"{explaining.strip()} || test $? = 1") == shown
