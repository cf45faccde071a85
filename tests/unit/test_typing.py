"""Type checkers refuse wrong calls of the public API, and accept right ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from tests.timeouts import TIMEOUT

ROOT = Path(__file__).parents[2]

SNIPPETS = dedent("""
    from __future__ import annotations

    from datetime import timedelta

    import bide


    def blocking(client: bide.SyncClient, topology: bide.Topology) -> None:
        client.publish(b"", to="q", delay="5s", headers={"a": 1})
        client.publish(b"", to="q", delay=timedelta(seconds=5)).attempts.bit_length()
        client.publish(b"", too="q")  # error: call-arg
        client.publish(b"", to="q", delay=5)  # error: arg-type
        client.publish(b"", to=3)  # error: arg-type
        client.publish(b"", to="q").missing  # error: attr-defined
        client.schedule(b"", to="q", key="k", delay="5s")
        client.schedule(b"", to="q", key=1, delay="5s")  # error: arg-type
        client.publish_many([bide.OutgoingMessage(b"", to="q")]).confirmed.bit_length()
        client.publish_many([b""])  # error: list-item
        client.publish_many([], windows=3)  # error: call-arg
        client.declare("q")  # error: arg-type
        client.declare(topology, externals=[])  # error: call-arg
        client.exists("q").bit_length()
        client.exists(topology)  # error: arg-type
        client.move_scheduled(delay="5s", prefixed="a")  # error: call-arg
        with client.consume("q", prefetch=10, timeout="1s") as messages:
            for message in messages:
                message.body.hex()
                message.ack()
                message.message_id.upper()  # error: union-attr
                message.acknowledge()  # error: attr-defined
                message.boddy  # error: attr-defined
                message.due.isoformat()  # error: union-attr
                message.ack(True)  # error: call-arg
        client.consume("q", prefech=10)  # error: call-arg
        client.consume("q", timeout=1)  # error: arg-type
        bide.connect_sync("amqp://localhost", time_out="3s")  # error: call-arg
        bide.conect("amqp://localhost")  # error: attr-defined
        with bide.connect_sync(wait="60s", on_reconnected=print) as other:
            received = other.get("q")
            received.ack()  # error: union-attr
            other.purge("q").bit_length()
            other.message_count(3)  # error: arg-type
            other.private_queue(bindings=["events"])  # error: list-item
            other.connected()  # error: operator
        bide.connect_sync("amqp://localhost", on_lost="retry")  # error: arg-type


    async def asynchronous(client: bide.Client) -> None:
        await client.publish(b"", to="q", delay="5s")
        await client.publish(b"", too="q")  # error: call-arg
        await client.publish(b"", to="q", delay=5)  # error: arg-type
        async for message in client.consume("q", timeout="1s"):
            await message.ack()
            message.ack()  # error: unused-coroutine
            message.boddy  # error: attr-defined
        async with message.process(requeue=True) as same:
            same.body.hex()
        async with message.process(retry=True):  # error: call-arg
            pass
        client.consume("q", timeout=1)  # error: arg-type
        (await bide.connect()).publsh()  # error: attr-defined
        for summary in client.publish_many([]):  # error: attr-defined
            pass
""").lstrip()


def test_type_checkers_refuse_wrong_calls_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "snippets.py"
    file.write_text(SNIPPETS)
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--no-error-summary", str(file)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TIMEOUT).stdout
    found = set(re.findall(r"^\S*snippets\.py:(\d+): error: .*\[([a-z-]+)\]$", output, re.MULTILINE))
    expected = {
        (str(number), comment[1])
        for number, line in enumerate(SNIPPETS.splitlines(), 1)
        if (comment := re.search(r"# error: ([a-z-]+)$", line))
    }
    assert len(expected) > 20
    assert found == expected, output
