"""The programs of docs/bulk.md, with fewer messages."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import bide
from tests.readme import blocks
from tests.support import Vhost
from tests.timeouts import TIMEOUT

PROGRAMS: Final = [text for language, text in blocks("docs/bulk.md") if language == "python"]
FEWER: Final = {'"amqp://localhost"': "{url!r}", "1_000_000": "20", "10_000": "20"}


def run(vhost: Vhost, program: str) -> str:
    """What a program prints."""
    for shown, instead in FEWER.items():
        program = program.replace(shown, instead.format(url=vhost.url))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_the_programs_publish_what_they_say(vhost: Vhost) -> None:
    many, schedules, with_threads = PROGRAMS
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders"), bide.Queue.quorum("reminders")]))
        assert "  # 1000000 confirmed" in many
        assert run(vhost, many) == "20 confirmed\n"
        assert "  # 10000 confirmed" in schedules
        assert run(vhost, schedules) == "20 confirmed\n"
        assert run(vhost, with_threads) == ""
        assert await client.message_count("bide.v1.m5") == 40
