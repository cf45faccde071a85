"""The programs of docs/observability.md and their output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest

import bide
from tests.polling import wait_until
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from tests.support import Vhost

PAGE = (Path(__file__).parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_IDS = re.compile(r"[0-9a-f]{4}/[0-9a-f]{4}|[0-9a-f]{32}")


def shown(start: str) -> list[str]:
    """The lines of the block that starts like this."""
    (found,) = (text for language, text in _BLOCK.findall(PAGE) if not language and text.startswith(start))
    return str(found).splitlines()


def names(lines: list[str]) -> list[str]:
    """The samples of a metrics page without their values, times of creation and buckets."""
    found = [line.rpartition(" ")[0] for line in lines if line.startswith("bide_")]
    return [one for one in found if "_bucket{" not in one and "_created{" not in one]


def spans(lines: list[str]) -> list[str]:
    """Spans and log lines without their ids. A slow machine may end them in another order."""
    return sorted(_IDS.sub("ID", line) for line in lines)


def fields(lines: list[str]) -> list[tuple[str, list[str]]]:
    """The events of the messages without a delay, with their fields."""
    events = [json.loads(line) for line in lines]
    return [(one["event"], list(one)) for one in events if "due" not in one]


@pytest.mark.slow
def test_the_programs_print_the_documented_output(vhost: Vhost, tmp_path: Path) -> None:
    for language, text in _BLOCK.findall(PAGE):
        name = re.match(r"# (\w+\.py)\n", text)
        if language == "python" and (name or "def brief" in text):
            (tmp_path / (name[1] if name else "brief.py")).write_text(text.replace("serve(9464)", "serve(0)"))
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
    environment = {
        **os.environ,
        "BIDE_URL": vhost.url,
        "BIDE_MANAGEMENT_URL": vhost.broker.management_url,
        "PYTHONUNBUFFERED": "1",
    }

    def printed(program: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, program],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    with subprocess.Popen(
        [sys.executable, "endpoint.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as serving:
        try:
            assert serving.stdout is not None
            url = serving.stdout.readline().strip()

            def metrics() -> list[str]:
                with urlopen(url, timeout=TIMEOUT) as reply:
                    return str(reply.read().decode()).splitlines()

            assert spans(printed("shop.py")) == spans(shown("publish orders"))
            wait_until(lambda: names(metrics()) == names(shown("bide_")), "all messages are done with")
            assert fields(printed("events.py")) == fields(shown('{"event"'))
            serving.terminate()
            output, _ = serving.communicate(timeout=TIMEOUT)
            assert spans(output.splitlines()) == spans(shown("process orders"))
        finally:
            serving.kill()


def test_the_function_of_the_page_stamps_messages(vhost: Vhost) -> None:
    (program,) = (text for language, text in _BLOCK.findall(PAGE) if "current_tenant" in text)
    found: dict[str, Any] = {"contextmanager": contextmanager, "current_tenant": ContextVar("tenant", default="acme")}
    exec(program, found)
    with bide.connect_sync(vhost.url, stamp=found["tenant"]) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
        client.publish(b"order", to="orders")
        with client.consume("orders", timeout=timedelta(seconds=TIMEOUT)) as messages:
            message = next(iter(messages))
            message.ack()
    assert message.headers["tenant"] == "acme"
