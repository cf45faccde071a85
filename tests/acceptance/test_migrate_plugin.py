"""``bide migrate-plugin`` as a subprocess, on brokers with the real plugin and without it.

The plugin is not part of RabbitMQ. Tests that need it are skipped unless its folder is installed, or is on
``RABBITMQ_PLUGINS_DIR``: see docs/from-delayed-plugin.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pika
import pytest

import bide
from bide.admin.locate import management_api
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.delayed_plugin.scheduling import BATCH
from bide.durations import EPOCH
from bide.errors import LocalBrokerError, ManagementApiError
from bide.local_broker import LocalBroker
from bide.local_broker.configuration import PLUGINS
from bide.local_broker.installation import find_installation
from bide.topology import Argument
from bide.topology.rendering import definitions
from tests.acceptance.test_cli import SMALL, Program
from tests.broker.receiving import declare
from tests.broker.test_delayed_plugin_terms import rabbitmqctl
from tests.polling import killed_at_the_end, wait_while_running
from tests.readme import Shell, blocks, commands_of, read, section
from tests.relay_process import relay as relaying
from tests.support import NUMBER, Rabbitmq, Vhost
from tests.timeouts import TIMEOUT

NAME = "rabbitmq_delayed_message_exchange"
PAGE = "docs/from-delayed-plugin.md"
HALL = ("--levels", "4")
DEFINITIONS: dict[str, list[dict[str, Any]]] = {
    "exchanges": [
        {
            "name": f"shop-{number}",
            "type": "x-delayed-message",
            "durable": True,
            "auto_delete": False,
            "internal": False,
            "arguments": {"x-delayed-type": "topic", "alternate-exchange": "lost"},
        }
        for number in range(40)
    ],
    "queues": [],
    "bindings": [
        {
            "source": f"shop-{number}",
            "destination": "orders",
            "destination_type": "queue",
            "routing_key": "order.*",
            "arguments": {},
        }
        for number in range(40)
    ],
}


def plugin_folders(rabbitmq: Rabbitmq, named: str) -> Iterator[Path]:
    """Where the broker looks for plugins. To look there takes no time; to start a broker takes seconds."""
    found = find_installation(home=rabbitmq.home, chroot=rabbitmq.chroot)
    default = ("/usr/lib/rabbitmq/plugins", str(found.home / "plugins"))
    for name in named.split(os.pathsep) if named else default:
        yield (found.chroot or Path("/")) / Path(name).relative_to("/")


@pytest.fixture(scope="module")
def plugin_vhost(rabbitmq: Rabbitmq, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vhost]:
    """The virtual host / of a broker with the plugin."""
    folders = os.environ.get("RABBITMQ_PLUGINS_DIR", "")
    if not any(folder.glob(f"{NAME}-*") for folder in plugin_folders(rabbitmq, folders)):
        pytest.skip("the delayed-message plugin is not installed")
    try:
        broker = rabbitmq.start(
            ephemeral=True,
            plugins=[*PLUGINS, NAME],
            environment={"RABBITMQ_PLUGINS_DIR": folders} if folders else None,
        )
    except LocalBrokerError as error:
        pytest.skip(f"the plugin is not installed: {error}")
    with broker:
        if NAME not in broker.rabbitmqctl("eval", "rabbit_plugins:active()."):
            pytest.skip("the delayed-message plugin is not installed")
        yield Vhost(name="/", url=broker.url, broker=broker)


@pytest.fixture
def plugin(plugin_vhost: Vhost) -> Iterator[Vhost]:
    """A virtual host of that broker for one test."""
    name = f"plugin-{time.monotonic_ns()}"
    yield Vhost(name=name, url=plugin_vhost.broker.add_vhost(name), broker=plugin_vhost.broker)
    plugin_vhost.broker.delete_vhost(name)


def delayed(name: str, routing: str, **arguments: Argument) -> bide.Exchange:
    return bide.Exchange(name, "x-delayed-message", arguments={"x-delayed-type": routing, **arguments})


async def put(url: str, topology: bide.Topology, messages: list[tuple[str, str, dict[str, Any], bytes]]) -> None:
    """Declare exchanges of the plugin, and publish as a client without bide does."""
    connection = await Connection.open(BrokerUrl.parse(url))
    async with await connection.channel(confirms=True) as channel:
        await declare(channel, topology)
        await asyncio.gather(
            *(
                channel.publish(exchange=exchange, routing_key=key, values=values, body=body, mandatory=False)
                for exchange, key, values, body in messages
            )
        )
    await connection.close()


async def receive(url: str, queue: str, number: int, *, more: float = 0) -> list[tuple[bide.Message, datetime]]:
    """This number of messages with the times when they came, and those that come soon after."""
    found: list[tuple[bide.Message, datetime]] = []
    async with bide.connect(url) as client, client.consume(queue, prefetch=1000) as messages:
        while True:
            try:
                async with asyncio.timeout(TIMEOUT if len(found) < number else max(more, 0.01)):
                    message = await anext(messages)
            except TimeoutError:
                return found
            found.append((message, datetime.now(UTC)))
            await message.ack()


def write_export(path: Path, messages: list[dict[str, Any]]) -> None:
    """A complete export, as the command writes it."""
    lines: list[dict[str, Any]] = [{"bide-export": 1, "started": "2026-11-23T23:00:00.000+00:00"}]
    end: dict[str, Any] = {"end": True, "messages": len(messages), "node": "rabbit@host"}
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *messages, end]))


def exported(vhost: str, due: datetime, body: str, *, keys: tuple[str, ...] = ("order.created",)) -> dict[str, Any]:
    # Flags of delivery_mode alone: persistent.
    return {
        "due": (due - EPOCH) // timedelta(milliseconds=1),
        "vhost": vhost,
        "exchange": "shop",
        "routing_keys": keys,
        "encoded_properties": b64encode(b"\x10\x00\x02").decode(),
        "body": b64encode(body.encode()).decode(),
    }


WAITING = {
    "due": 4_102_444_800_000,
    "vhost": "/",
    "exchange": "shop",
    "routing_keys": ["k"],
    "encoded_properties": b64encode(b"\0\0").decode(),
    "body": "",
}
DAMAGED_LINES = [
    b'{"due"',
    b"[1]",
    b"[" * 100_000,
    b"\xff",
    *(
        json.dumps(one).encode()
        for one in (
            {"due": 1},
            {**WAITING, "due": "\u00b2"},
            {**WAITING, "due": True},
            {**WAITING, "due": 10**30},
            {**WAITING, "exchange": 5},
            {**WAITING, "routing_keys": "k"},
            {**WAITING, "routing_keys": []},
            {**WAITING, "body": "\u00e4"},
        )
    ),
]


def test_a_damaged_export_is_bad_usage(program: Program, tmp_path: Path) -> None:
    first, end = b'{"bide-export": 1}\n', b'{"end": true, "messages": 1, "node": "n"}\n'
    for number, line in enumerate(DAMAGED_LINES):
        file = tmp_path / str(number)
        file.write_bytes(first + line + b"\n" + end)
        for command in (["import", str(file)], ["apply", "--yes", "--exported", str(file)]):
            assert f"{file} is damaged in the line at the byte {len(first)}" in program.fails(
                2, "migrate-plugin", *command
            )
    file = tmp_path / "pages"
    for line in (b'{"page": 5}', b'{"page"', b'{"page": "a", "messages": "b"}'):
        file.write_bytes(first + line + b"\n")
        error = program.fails(2, "migrate-plugin", "export", str(file), "--rabbitmqctl", "false")
        assert f"{file} is damaged in the line at the byte {len(first)}" in error


def test_a_message_with_odd_properties_does_not_hold_up_the_others(
    program: Program, vhost: Vhost, tmp_path: Path
) -> None:
    odd: list[dict[str, Any]] = [
        {"headers": {"x-delay": "soon"}},
        {"headers": {"x-delay": "inf"}},
        {"headers": {"x-delay": [1]}},
        {"expiration": "soon"},
    ]
    waiting = [
        {
            **WAITING,
            "due": int(time.time() * 1000) + 3_600_000,
            "vhost": vhost.name,
            "exchange": "amq.topic",
            "encoded_properties": b64encode(b"".join(pika.BasicProperties(**one).encode())).decode(),
        }
        for one in [*odd, {"message_id": "good"}]
    ]
    file = tmp_path / "export"
    lines = [{"bide-export": 1}, *waiting, {"end": True, "messages": len(waiting), "node": "n"}]
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    done = program.run("migrate-plugin", "import", str(file), "--json")
    assert done.returncode == 1, done.stderr
    counts = json.loads(done.stdout)
    assert (counts["scheduled"], counts["refused"]) == (1, 4)
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "export.refused").read_text().splitlines()]
    assert sum("x-delay" in one for one in reasons) == 3, reasons
    assert sum("expiration" in one for one in reasons) == 1, reasons


def test_a_damaged_record_of_progress_is_bad_usage(program: Program, tmp_path: Path) -> None:
    file, noted = tmp_path / "export", tmp_path / "export.progress"
    file.write_bytes(b'{"bide-export": 1}\n{"end": true, "messages": 0, "node": "n"}\n')
    for text in ("", "{", "[]", '{"place": -1}', '{"place": "x"}', '{"other": 1}'):
        noted.write_text(text)
        assert f"{noted} is damaged" in program.fails(2, "migrate-plugin", "import", str(file))


def test_forty_exchanges_of_a_definitions_file_are_planned_at_once(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "definitions.json"
    path.write_text(json.dumps(DEFINITIONS))
    done = program.run("migrate-plugin", "check", "--definitions", str(path))
    assert (done.returncode, done.stdout.decode().splitlines()[0]) == (1, "shop-0: topic, 1 binding")
    shown = program.ok("migrate-plugin", "plan", "--definitions", str(path)).splitlines()
    assert len(shown) == 41
    assert shown[0] == (
        "✓ shop-0: messages with x-delay go to bide.hall.v1.check-in, others to shop-0.delivery, a topic exchange with "
        "its 1 binding"
    )
    assert shown[-1] == "then run a relay: bide relay --allow 'x:*.delivery'"
    planned = json.loads(program.ok("migrate-plugin", "plan", "--way", "plain", "--json", "--definitions", str(path)))
    exchanges = {one["name"]: one for one in planned["definitions"]["exchanges"]}
    assert len(exchanges) == len(planned["definitions"]["bindings"]) == 40
    assert (exchanges["shop-7"]["type"], exchanges["shop-7"]["arguments"]) == ("topic", {"alternate-exchange": "lost"})


def test_forty_exchanges_of_a_broker_that_lost_the_plugin_are_replaced_at_once(program: Program, vhost: Vhost) -> None:
    names = sorted(f"shop-{number}" for number in range(40))
    topology = bide.Topology(
        [bide.Exchange(name, "direct", arguments={"x-delayed-type": "direct"}) for name in names],
        [bide.Queue.quorum("orders")],
        [bide.Binding(name, "orders", "order") for name in names],
    )
    asyncio.run(put(vhost.url, topology, []))
    # Without the plugin, the broker refuses new x-delayed-message exchanges but keeps existing ones.
    try:
        vhost.broker.rabbitmqctl("eval", _CHANGE_TYPES.replace("VHOST", vhost.name))
    except LocalBrokerError as error:
        if not any(reason in str(error) for reason in ("node_not_running", "no_exists")):
            raise
        pytest.skip("the broker has no Mnesia, or no table of exchanges in it")
    done = program.run("migrate-plugin", "check")
    shown = done.stdout.decode().splitlines()
    assert (done.returncode, shown[:-1]) == (1, [f"{name}: direct, 1 binding" for name in names])
    assert json.loads(program.ok("migrate-plugin", "apply", "--yes", "--json", *HALL))["exchanges"] == names
    assert program.ok("migrate-plugin", "check").startswith("no exchange of")

    for values, when in (({"headers": {"x-delay": 1000}}, "later"), ({}, "now")):
        messages = [(name, "order", dict[str, Any](values), f"{name} {when}".encode()) for name in names]
        asyncio.run(put(vhost.url, bide.Topology(), messages))
    found = asyncio.run(receive(vhost.url, "orders", len(names)))
    assert {one.body.decode() for one, _ in found} == {f"{name} now" for name in names}
    with relaying(vhost, "--allow", "x:*.delivery", *HALL):
        found = asyncio.run(receive(vhost.url, "orders", len(names)))
    assert {one.body.decode() for one, _ in found} == {f"{name} later" for name in names}


_CHANGE_TYPES = """
[
    mnesia:dirty_write(Table, setelement(3, Exchange, 'x-delayed-message'))
    || Table <- [rabbit_exchange, rabbit_durable_exchange],
       Exchange <- mnesia:dirty_match_object(Table, mnesia:table_info(Table, wild_pattern)),
       {resource, <<"VHOST">>, exchange, <<"shop-", _/binary>>} <- [element(2, Exchange)]
].
"""


def test_an_exchange_that_others_lead_to_is_not_planned_for_the_hall(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "definitions.json"
    feed: dict[str, Any] = {
        "source": "feed",
        "destination": "shop-0",
        "destination_type": "exchange",
        "routing_key": "#",
    }
    feeder = {**DEFINITIONS["exchanges"][0], "name": "feed", "type": "topic", "arguments": {}}
    path.write_text(
        json.dumps(
            {
                "exchanges": [DEFINITIONS["exchanges"][0], feeder],
                "queues": [],
                "bindings": [{**feed, "arguments": {}}],
            }
        )
    )
    done = program.run("migrate-plugin", "plan", "--definitions", str(path))
    assert done.returncode == 1
    assert "✗ shop-0: messages come to it through 'feed'" in done.stdout.decode()
    program.ok("migrate-plugin", "plan", "--way", "plain", "--definitions", str(path))


@pytest.mark.slow
@pytest.mark.long
def test_pending_messages_leave_the_plugin_and_come_when_they_are_due(plugin: Vhost, tmp_path: Path) -> None:
    program = Program(plugin)
    topology = bide.Topology(
        [delayed("shop", "topic"), delayed("news", "fanout")],
        [bide.Queue("orders"), bide.Queue("readers")],
        [bide.Binding("shop", "orders", "order.*"), bide.Binding("news", "readers")],
    )
    wait = 25_000
    begun = datetime.now(UTC)
    messages: list[tuple[str, str, dict[str, Any], bytes]] = [
        ("shop", "order.created", {"message_id": f"m{n}", "headers": {"x-delay": wait + n, "n": n}}, b"%d" % n)
        for n in range(200)
    ]
    messages += [("news", "", {"headers": {"x-delay": str(wait)}, "delivery_mode": 2}, b"\x00\xff")]
    asyncio.run(put(plugin.url, topology, messages))
    ctl = rabbitmqctl(plugin.broker, tmp_path)
    path = str(tmp_path / "pending.jsonl")
    refused = program.fails(1, "migrate-plugin", "apply", "--yes", *HALL)
    assert "201 messages that are not exported wait in the plugin: news (1), shop (200)" in refused
    done = json.loads(program.ok("migrate-plugin", "export", path, "--rabbitmqctl", ctl, "--json"))
    assert done["messages"] == 201
    applied = json.loads(program.ok("migrate-plugin", "apply", "--yes", "--exported", path, "--json", *HALL))
    assert applied["exchanges"] == ["news", "shop"]
    assert program.ok("migrate-plugin", "check").startswith("no exchange of")
    since = applied["since"].replace(" ", "T")
    shown = program.ok("migrate-plugin", "import", path, "--delivered-before", since)
    assert shown.startswith("201 messages scheduled, 0 delivered by the plugin before")
    again = program.ok("migrate-plugin", "import", path, "--delivered-before", since)
    assert again.startswith("201 messages scheduled")

    found = asyncio.run(receive(plugin.url, "orders", 200, more=2))
    assert sorted(int(one.body) for one, _ in found) == list(range(200))
    for one, at in found:
        n = int(one.body)
        assert (one.message_id, one.routing_key, one.headers["n"]) == (f"m{n}", "order.created", n)
        assert one.headers["x-delay"] == -(wait + n)
        assert at >= begun + timedelta(milliseconds=wait + n)
    ((news, at),) = asyncio.run(receive(plugin.url, "readers", 1, more=1))
    assert (news.body, news.headers["x-delay"]) == (b"\x00\xff", -wait)
    assert at >= begun + timedelta(milliseconds=wait)


def test_each_command_lets_the_plugin_count_its_messages_once(plugin: Vhost) -> None:
    """The plugin copies all its messages to count them, for each call about exchanges: minutes with millions."""
    program = Program(plugin)
    names = ("news", "shop")
    bindings = [bide.Binding(name, "orders", "order.*") for name in names]
    topology = bide.Topology([delayed(name, "topic") for name in names], [bide.Queue("orders")], bindings)
    # No message waits, because the plugin would keep it, and other tests export all virtual hosts of this broker.
    asyncio.run(put(plugin.url, topology, []))
    function = "{rabbit_delayed_message, messages_delayed, 1}"

    def evaluate(expression: str) -> str:
        return plugin.broker.rabbitmqctl("eval", f"{expression}.")

    def counted(work: Callable[[], object]) -> int:
        """How often the plugin counts the messages of an exchange meanwhile."""
        evaluate(f"erlang:trace_pattern({function}, true, [call_count])")
        try:
            work()
            return int(evaluate(f"element(2, erlang:trace_info({function}, call_count))"))
        finally:
            evaluate(f"erlang:trace_pattern({function}, false, [call_count])")

    async def ask() -> None:
        async with management_api(BrokerUrl.parse(plugin.url), plugin.broker.management_url) as api:
            assert {one.delayed for one in await api.all_exchanges(plugin.name)} == {None, 0}

    once = counted(lambda: asyncio.run(ask()))
    assert once >= len(names)
    assert counted(lambda: program.run("migrate-plugin", "check")) == once
    assert counted(lambda: program.ok("migrate-plugin", "plan", *HALL)) == once
    assert counted(lambda: program.ok("migrate-plugin", "apply", "news", "--yes", *HALL)) == once
    assert counted(lambda: program.ok("migrate-plugin", "apply", "--force", "--yes", *HALL)) == once // len(names)
    assert program.ok("migrate-plugin", "check").startswith("no exchange of")


@dataclass(frozen=True)
class Numbered:
    """Numbered messages that wait in the plugin."""

    number: int
    first: datetime
    """When the first one is due at the earliest."""

    def due(self, place: int) -> datetime:
        return self.first + timedelta(milliseconds=place // 2)

    @staticmethod
    def body(place: int) -> bytes:
        return b"%d " % place + hashlib.sha256(b"%d" % place).digest() * 6

    async def put(self, url: str) -> None:
        topology = bide.Topology(
            [delayed("shop", "topic")], [bide.Queue.quorum("orders")], [bide.Binding("shop", "orders", "order.*")]
        )
        await put(url, topology, [])
        for start in range(0, self.number, BATCH):
            messages = []
            for place in range(start, min(start + BATCH, self.number)):
                # Rounded up: the broker counts from the arrival, which is later than this.
                delay = math.ceil((self.due(place) - datetime.now(UTC)) / timedelta(milliseconds=1))
                values = {"message_id": f"m{place}", "headers": {"x-delay": delay, "place": place}}
                messages.append(("shop", "order.created", values, self.body(place)))
            await put(url, bide.Topology(), messages)

    async def receive(self, url: str) -> tuple[Counter[int], list[str]]:
        """How often each one came, and what was wrong."""
        counts, wrong = Counter[int](), list[str]()
        async with bide.connect(url) as client, client.consume("orders", prefetch=1000) as messages:
            while len(counts) < self.number:
                left = max(0.0, (self.first - datetime.now(UTC)).total_seconds())
                async with asyncio.timeout(left + TIMEOUT):
                    message = await anext(messages)
                await message.ack()
                place = message.headers["place"]
                assert isinstance(place, int)
                counts[place] += 1
                if message.received_at < self.due(place):
                    wrong.append(f"{place} is early")
                if (message.body, message.message_id, message.routing_key) != (
                    self.body(place),
                    f"m{place}",
                    "order.created",
                ):
                    wrong.append(f"{place} is changed")
        return counts, wrong


LONG_NUMBER = NUMBER or 20_000
LONG_TIMEOUT = max(TIMEOUT, LONG_NUMBER / 500)
"""Seconds until the test gives up waiting for one command."""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(LONG_TIMEOUT + max(900, LONG_NUMBER // 100))
def test_many_pending_messages_leave_the_plugin_although_the_import_is_killed(
    plugin: Vhost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Program(plugin)

    def finish(*arguments: str) -> dict[str, Any]:
        with killed_at_the_end(program.start(*arguments)) as process:
            out, err = process.communicate(timeout=LONG_TIMEOUT)
        assert process.returncode == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    # A million takes the management API longer than RabbitMQ keeps a connection open.
    (longer,) = re.findall(r"rabbitmqctl eval '(\[ranch:.*?)'", read(PAGE), re.DOTALL)
    plugin.broker.rabbitmqctl("eval", longer)
    # None is due before all are exported.
    waiting = Numbered(LONG_NUMBER, datetime.now(UTC) + timedelta(seconds=LONG_TIMEOUT))
    asyncio.run(waiting.put(plugin.url))
    path = tmp_path / "pending.jsonl"
    ctl = rabbitmqctl(plugin.broker, tmp_path)
    begun = time.monotonic()
    done = finish("migrate-plugin", "export", str(path), "--rabbitmqctl", ctl, "--json")
    exported = time.monotonic() - begun
    assert done["messages"] == waiting.number
    applied = finish("migrate-plugin", "apply", "--yes", "--exported", str(path), "--json", *HALL)
    command = ("migrate-plugin", "import", str(path), "--delivered-before", applied["since"].replace(" ", "T"))
    progress = path.with_name("pending.jsonl.progress")

    def is_half_done() -> bool:
        return progress.exists() and json.loads(progress.read_text())["scheduled"] >= waiting.number // 2

    with killed_at_the_end(program.start(*command)) as process:
        wait_while_running(process, is_half_done, "half of them are scheduled", seconds=LONG_TIMEOUT, step=0.01)
    before, begun = json.loads(progress.read_text())["scheduled"], time.monotonic()
    done = finish(*command, "--json")
    imported = time.monotonic() - begun
    assert (done["scheduled"], done["refused"]) == (waiting.number, 0)
    counts, wrong = asyncio.run(waiting.receive(plugin.url))
    assert wrong == []
    assert set(counts) == set(range(waiting.number))
    assert counts.total() - waiting.number <= BATCH
    with capsys.disabled():
        sys.stdout.write(
            f"\n{waiting.number} messages of the plugin: exported in {exported:.1f} s; the import after a kill "
            f"scheduled {waiting.number - before} in {imported:.1f} s; none lost, early or changed, "
            f"{counts.total() - waiting.number} came twice\n"
        )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hall", "plain"])
def test_publishers_and_consumers_go_on_after_the_replacement(plugin: Vhost, way: str) -> None:
    program = Program(plugin)
    bindings = [bide.Binding("shop", "orders", "order.*"), bide.Binding("shop", "paid", "order.paid")]
    topology = bide.Topology([delayed("shop", "topic")], [bide.Queue("orders"), bide.Queue("paid")], bindings)
    asyncio.run(put(plugin.url, topology, []))
    program.ok("migrate-plugin", "apply", "shop", "--way", way, "--yes", *HALL)
    if way == "plain":
        program.ok("send", "later", "--exchange", "shop", "--routing-key", "order.created", "--in", "1s", *SMALL)
        program.ok("send", "now", "--exchange", "shop", "--routing-key", "order.paid")
        assert Counter(one.body for one, _ in asyncio.run(receive(plugin.url, "orders", 2))) == {b"later": 1, b"now": 1}
        return
    with relaying(plugin, "--allow", "x:*.delivery", *HALL):
        begun = datetime.now(UTC)
        messages: list[tuple[str, str, dict[str, Any], bytes]] = [
            ("shop", "order.created", {"headers": {"x-delay": 2000, "mine": "a"}}, b"later"),
            ("shop", "order.paid", {"headers": {"mine": "b"}}, b"now"),
            ("shop", "order.paid", {"headers": {"x-delay": 0}}, b"zero"),
        ]
        asyncio.run(put(plugin.url, bide.Topology(), messages))
        found = asyncio.run(receive(plugin.url, "orders", 3, more=2))
    times = {one.body: at for one, at in found}
    assert len(found) == len(times) == 3
    assert times[b"later"] >= begun + timedelta(seconds=2)
    assert {one.body: (one.exchange, one.headers.get("mine")) for one, _ in found} == {
        b"later": ("shop.delivery", "a"),
        b"now": ("shop", "b"),
        b"zero": ("shop.delivery", None),
    }
    assert Counter(one.body for one, _ in asyncio.run(receive(plugin.url, "paid", 2))) == {b"now": 1, b"zero": 1}


_CHANGING = re.compile(r"virtual host \S+|127\.0\.0\.1:\d+|\d{4}-\d\d-\d\dT[\d:.+]+|(?<=lateness_ms\": )[\d.]+")


def test_the_page_shows_the_output_of_its_commands_from_top_to_bottom(plugin: Vhost, tmp_path: Path) -> None:
    """But for addresses, times and the name of the virtual host."""
    shown = _shown("The steps")
    assert [command.split()[0] for command, _, _ in shown] == ["migrate-plugin"] * 5 + ["relay", "receive"]
    program = Program(plugin)
    topology = bide.Topology(
        [delayed("shop", "topic"), delayed("news", "fanout")],
        [bide.Queue.quorum("orders"), bide.Queue.quorum("readers")],
        [bide.Binding("shop", "orders", "order.*"), bide.Binding("news", "readers")],
    )
    waiting: dict[str, Any] = {"headers": {"x-delay": 3_600_000}}
    asyncio.run(put(plugin.url, topology, [("shop", "order.created", waiting, b"{}")] * 1000))
    path, ctl, since, printed = str(tmp_path / "pending.jsonl"), rabbitmqctl(plugin.broker, tmp_path), "", ""
    with ExitStack() as stack:
        for command, _, output in shown:
            words = ["" if one == "pending.jsonl" else one for one in shlex.split(command)]
            words = [path if not one else re.sub(r"^\d{4}-.*", since, one) for one in words]
            if words[1] == "export":
                words += ["--rabbitmqctl", ctl]
            if words[0] == "relay":
                arguments = [sys.executable, "-m", "bide", *words]
                started = subprocess.Popen(arguments, env=program.environment, stderr=subprocess.PIPE, text=True)
                relay = stack.enter_context(killed_at_the_end(started))
                assert relay.stderr is not None
                printed = relay.stderr.readline()
                message: dict[str, Any] = {"headers": {"x-delay": 5000}}
                asyncio.run(put(plugin.url, bide.Topology(), [("shop", "order.created", message, b"from any client")]))
            else:
                deadline = time.monotonic() + TIMEOUT
                printed = ""
                # The management API counts the messages of the plugin a few seconds late.
                while "1,000 messages wait" not in printed and time.monotonic() < deadline:
                    done = program.run(*words)
                    printed = (done.stdout + done.stderr).decode().replace(path, "pending.jsonl")
                    if words[1] != "check":
                        break
            if found := re.search(r"--delivered-before (\S+)", printed):
                since = found[1]
            assert _lines(printed) == _lines(output), command


def test_after_the_plugin_is_gone_the_page_replaces_its_exchanges_from_a_file_of_definitions(
    program: Program, vhost: Vhost, tmp_path: Path
) -> None:
    topology = bide.Topology(
        [delayed("shop", "topic"), delayed("news", "fanout"), bide.Exchange("plain", "topic")],
        [bide.Queue.quorum("orders"), bide.Queue.quorum("readers")],
        [
            bide.Binding("shop", "orders", "order.*"),
            bide.Binding("news", "readers"),
            bide.Binding("plain", "orders", "order.*"),
            bide.Binding("plain", "shop", "order.old", "exchange"),
        ],
    )
    before = tmp_path / "before.json"
    before.write_text(json.dumps(definitions(topology, vhost.name)))
    with pytest.raises(ManagementApiError, match="definitions"):
        vhost.broker.management.call("POST", "definitions", body=json.loads(before.read_text()))
    ((_, script),) = (one for one in blocks(PAGE, "If the plugin is gone") if one[0] == "python")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=TIMEOUT)
    vhost.broker.management.call("POST", "definitions", body=json.loads((tmp_path / "rest.json").read_text()))
    shown = _shown("If the plugin is gone")
    assert [command.split()[1] for command, _, _ in shown] == ["check", "plan", "apply"]
    # A hall does not replace an exchange that others lead to.
    before.write_text(json.dumps(definitions(replace(topology, bindings=topology.bindings[:3]), vhost.name)))
    for command, _, output in shown:
        printed = program.ok(*shlex.split(command.replace("before.json", str(before))))
        assert printed == output, command
    for exchange in ("shop", "plain"):
        program.ok("send", exchange, "--exchange", exchange, "--routing-key", "order.paid")
        assert [one.body for one, _ in asyncio.run(receive(vhost.url, "orders", 1))] == [exchange.encode()]
    # What exists stays as it is.
    again = program.ok("migrate-plugin", "apply", "--definitions", str(before), "--yes")
    assert again == "0 exchanges replaced\n"


def test_the_first_try_of_the_page_delays_a_message(vhost: Vhost, rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    shell = Shell(tmp_path, rabbitmq, vhost)
    ((_, block),) = blocks(PAGE, "Try it")
    commands = commands_of(block)
    (number,) = (n for n, (command, _) in enumerate(commands) if command.endswith("&"))
    shell.check(commands[:number])
    # The shell of the tests kills what it leaves behind.
    with relaying(vhost, *shlex.split(commands[number][0].removesuffix("&"))[2:]):
        shell.check(commands[number + 1 :])


def test_replaced_exchanges_delay_again_after_their_definitions_were_restored(
    program: Program, vhost: Vhost, tmp_path: Path
) -> None:
    """RabbitMQ exports the value of a binding that matches any x-delay as a text, which matches no delay."""
    program.ok("topology", "apply", "point-to-point", "--queue", "orders")
    before = tmp_path / "before.json"
    before.write_text(
        json.dumps({**DEFINITIONS, **{kind: DEFINITIONS[kind][:2] for kind in ("exchanges", "bindings")}})
    )
    program.ok("migrate-plugin", "apply", "--definitions", str(before), "--yes", *HALL)
    exported = vhost.broker.management.call("GET", "definitions", vhost.name)
    name = f"restored-{time.monotonic_ns()}"
    restored = Vhost(name=name, url=vhost.broker.add_vhost(name), broker=vhost.broker)
    try:
        vhost.broker.management.call("POST", "definitions", name, body=exported)
        there = Program(restored)
        # The hall is the one of the first run: its settings are not options of the second.
        assert there.ok("migrate-plugin", "apply", "--yes") == (
            "0 exchanges replaced\n"
            "the binding of shop-0, shop-1 to the waiting hall repaired: RabbitMQ exports it incorrectly\n"
        )
        assert there.ok("migrate-plugin", "apply", "--yes") == "0 exchanges replaced\n"
        there.ok("send", "later", "--exchange", "shop-1", "--routing-key", "order.a", "--header", "x-delay=1000")
        there.ok("send", "now", "--exchange", "shop-1", "--routing-key", "order.a")
        assert [one.body for one, _ in asyncio.run(receive(restored.url, "orders", 1))] == [b"now"]
        bindings = vhost.broker.management.call("GET", "exchanges", name, "shop-1", "bindings", "source")
        assert [one["destination"] for one in bindings] == ["bide.hall.v1.check-in"]
        with relaying(restored, "--allow", "x:*.delivery", *HALL):
            assert [one.body for one, _ in asyncio.run(receive(restored.url, "orders", 1))] == [b"later"]
    finally:
        vhost.broker.delete_vhost(name)


def test_exchanges_of_a_file_are_not_made_without_their_queues(program: Program, tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    before.write_text(json.dumps(DEFINITIONS))
    error = program.fails(1, "migrate-plugin", "apply", "shop-0", "--definitions", str(before), "--yes", *HALL)
    assert "'shop-0' was bound to the queue 'orders', which does not exist" in error
    assert program.ok("migrate-plugin", "check").startswith("no exchange")


@pytest.mark.slow
def test_messages_of_a_node_that_lost_the_plugin_are_moved(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    if not (folders := os.environ.get("RABBITMQ_PLUGINS_DIR", "")):
        pytest.skip("the delayed-message plugin is not installed")
    folder = tmp_path / "broker"
    environment = {"RABBITMQ_PLUGINS_DIR": folders}
    with rabbitmq.start(folder, plugins=[*PLUGINS, NAME], environment=environment) as broker:
        topology = bide.Topology(
            [delayed("shop", "topic")], [bide.Queue.quorum("orders")], [bide.Binding("shop", "orders", "order.*")]
        )
        waiting = {"headers": {"x-delay": 1000}, "delivery_mode": 2}
        late = {"headers": {"x-delay": 3_600_000}, "delivery_mode": 2}
        asyncio.run(
            put(broker.url, topology, [("shop", "order.a", waiting, b"soon"), ("shop", "order.b", late, b"late")])
        )
    with rabbitmq.start(folder) as broker:
        program = Program(Vhost(name="/", url=broker.url, broker=broker))
        done = program.run("migrate-plugin", "check")
        shop, advice = done.stdout.decode().splitlines()
        assert (done.returncode, shop) == (1, "shop: topic, 1 binding")
        assert "the plugin is not enabled here" in advice
        path, ctl = str(tmp_path / "pending.jsonl"), rabbitmqctl(broker, tmp_path)
        assert program.ok("migrate-plugin", "export", path, "--rabbitmqctl", ctl).startswith("2 messages in")
        applied = program.ok("migrate-plugin", "apply", "--exported", path, "--yes", *HALL).splitlines()
        assert applied == [
            "1 exchange replaced",
            (
                "the plugin is not enabled here and has delivered nothing: import this broker's exports without "
                "--delivered-before"
            ),
            "then run a relay: bide relay --allow 'x:*.delivery'",
        ]
        assert program.ok("migrate-plugin", "import", path).startswith("2 messages scheduled, 0 delivered")
        assert [one.body for one, _ in asyncio.run(receive(broker.url, "orders", 1))] == [b"soon"]


@pytest.mark.slow
def test_another_broker_takes_over_exchanges_and_waiting_messages(
    plugin: Vhost, broker: LocalBroker, tmp_path: Path
) -> None:
    """In the order of the section "To another broker"."""
    old = Program(plugin)
    topology = bide.Topology(
        [delayed("shop", "topic")], [bide.Queue.quorum("orders")], [bide.Binding("shop", "orders", "order.*")]
    )
    waiting = {"headers": {"x-delay": 10_000}, "message_id": "old"}
    asyncio.run(put(plugin.url, topology, [("shop", "order.a", waiting, b"waited")]))
    before, path = tmp_path / "before.json", str(tmp_path / "pending.jsonl")
    exported = plugin.broker.management.call("GET", "definitions", plugin.name)
    before.write_text(json.dumps(exported))
    old.ok("migrate-plugin", "export", path, "--rabbitmqctl", rabbitmqctl(plugin.broker, tmp_path))
    applied = json.loads(old.ok("migrate-plugin", "apply", "--exported", path, "--yes", "--json", *HALL))
    ((_, script),) = (one for one in blocks(PAGE, "If the plugin is gone") if one[0] == "python")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=TIMEOUT)
    there = Vhost(name=plugin.name, url=broker.add_vhost(plugin.name), broker=broker)
    try:
        broker.management.call("POST", "definitions", there.name, body=json.loads((tmp_path / "rest.json").read_text()))
        new = Program(there)
        new.ok("migrate-plugin", "apply", "--definitions", str(before), "--yes", *HALL)
        imported = new.ok("migrate-plugin", "import", path, "--delivered-before", applied["since"].replace(" ", "T"))
        assert imported.startswith("1 message scheduled, 0 delivered by the plugin before")
        with relaying(there, "--allow", "x:*.delivery", *HALL):
            ((message, _),) = asyncio.run(receive(there.url, "orders", 1))
        assert (message.body, message.message_id) == (b"waited", "old")
        assert "0 of 1 messages" in old.fails(1, "receive", "orders", "--count", "1", "--timeout", "1s")
    finally:
        broker.delete_vhost(there.name)


def _shown(title: str) -> list[tuple[str, str, str]]:
    """The commands of a section, and the output that it shows."""
    found = re.findall(r"^ *```\w*\n(.*?)^ *```$", section(PAGE, title), re.MULTILINE | re.DOTALL)
    return [one.partition("\n") for block in found for one in re.split(r"^ *\$ bide ", block, flags=re.MULTILINE)[1:]]


def _lines(text: str) -> list[str]:
    return [_CHANGING.sub("...", line).strip() for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hall", "plain"])
@pytest.mark.parametrize("deleted", [False, True], ids=["held", "deleted"])
def test_an_interrupted_replacement_is_finished(plugin: Vhost, way: str, deleted: bool) -> None:
    program = Program(plugin)
    binding = bide.Binding("shop", "orders", "order.*")
    asyncio.run(put(plugin.url, bide.Topology([delayed("shop", "topic")], [bide.Queue("orders")], [binding]), []))
    marks: dict[str, Argument] = {"bide-entry": "shop", "bide-way": way}
    held = bide.Exchange("shop.delivery", "topic", arguments=marks)

    async def interrupt() -> None:
        """Leave what a killed run leaves."""
        connection = await Connection.open(BrokerUrl.parse(plugin.url))
        async with await connection.channel() as channel:
            await channel.declare_exchange(held)
            await channel.bind(bide.Binding("shop.delivery", "orders", "order.*"))
            if deleted:
                await channel.delete_exchange("shop")
        await connection.close()

    asyncio.run(interrupt())
    done = json.loads(program.ok("migrate-plugin", "apply", "--way", way, "--yes", "--json", *HALL))
    assert done["exchanges" if not deleted else "finished"] == ["shop"]
    program.ok("send", "now", "--exchange", "shop", "--routing-key", "order.paid")
    assert [one.body for one, _ in asyncio.run(receive(plugin.url, "orders", 1, more=1))] == [b"now"]
    again = json.loads(program.ok("migrate-plugin", "apply", "--way", way, "--yes", "--json", *HALL))
    assert (again["exchanges"], again["finished"]) == ([], [])


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_import_continues_and_repeats_at_most_a_batch(program: Program, vhost: Vhost, tmp_path: Path) -> None:
    number = 8 * BATCH
    with bide.connect_sync(vhost.url) as client:
        client.declare(
            bide.Topology(
                [bide.Exchange("shop", "topic")], [bide.Queue("orders")], [bide.Binding("shop", "orders", "order.*")]
            )
        )
    program.ok("delay", "apply", *SMALL)
    due = datetime.now(UTC) + timedelta(seconds=18)
    path = tmp_path / "pending.jsonl"
    write_export(path, [exported(vhost.name, due, str(n)) for n in range(number)])
    noted = path.with_name("pending.jsonl.progress")
    for kill in range(3):

        def has_progressed(least: int = (2 * kill + 1) * BATCH) -> bool:
            return noted.exists() and json.loads(noted.read_text())["scheduled"] >= least

        with killed_at_the_end(program.start("migrate-plugin", "import", str(path), *SMALL)) as process:
            wait_while_running(process, has_progressed, "some batches are scheduled", step=0.001)
    done = json.loads(program.ok("migrate-plugin", "import", str(path), "--json", *SMALL))
    assert (done["scheduled"], done["refused"]) == (number, 0)
    found = asyncio.run(receive(vhost.url, "orders", number, more=3))
    assert {int(one.body) for one, _ in found} == set(range(number))
    assert all(at >= due for _, at in found)
    # The same message has the same id in every run, so a receiver can tell.
    assert len({one.message_id for one, _ in found}) == number
    assert len(found) - number <= 3 * BATCH


def test_delivered_foreign_and_unsendable_messages_are_counted(program: Program, vhost: Vhost, tmp_path: Path) -> None:
    with bide.connect_sync(vhost.url) as client:
        client.declare(
            bide.Topology(
                [bide.Exchange("shop", "topic")], [bide.Queue("orders")], [bide.Binding("shop", "orders", "order.*")]
            )
        )
    now = datetime.now(UTC)
    path = tmp_path / "pending.jsonl"
    messages = [
        exported(vhost.name, now - timedelta(minutes=2), "delivered"),
        exported(vhost.name, now - timedelta(seconds=1), "past"),
        exported("other", now, "elsewhere"),
        exported(vhost.name, now + timedelta(seconds=1), "copied", keys=("order.a", "order.b")),
        exported(vhost.name, now + timedelta(seconds=1), "soon"),
    ]
    write_export(path, messages)
    before = (now - timedelta(minutes=1)).isoformat()
    done = program.run("migrate-plugin", "import", str(path), "--delivered-before", before, "--json", *SMALL)
    assert done.returncode == 1
    counts = json.loads(done.stdout)
    del counts["place"]
    assert counts == {"scheduled": 2, "delivered": 1, "elsewhere": 1, "refused": 1}
    (line,) = path.with_name("pending.jsonl.refused").read_text().splitlines()
    assert "CC or BCC" in json.loads(line)["reason"]
    found = asyncio.run(receive(vhost.url, "orders", 2, more=1))
    assert [one.body for one, _ in found] == [b"past", b"soon"]

    shutil.copy(path, tmp_path / "cut.jsonl")
    (tmp_path / "cut.jsonl").write_bytes(path.read_bytes()[:-5])
    assert "is not a complete export" in program.fails(2, "migrate-plugin", "import", str(tmp_path / "cut.jsonl"))
    write_export(path.with_name("gone.jsonl"), [{**messages[0], "exchange": "gone"}])
    assert "the exchange 'gone' does not exist" in program.fails(
        1, "migrate-plugin", "import", str(path.with_name("gone.jsonl")), *SMALL
    )
