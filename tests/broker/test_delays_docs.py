"""The output of ``bide delay verify`` and ``bide delay apply`` in docs/delays.md."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.readme import Shell, blocks, commands_of
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from bide.management.api import ManagementApi
    from tests.support import Rabbitmq, Vhost

PAGE = (Path(__file__).parents[2] / "docs" / "delays.md").read_text(encoding="utf-8")
COUNTED = ("exchanges", "queues", "bindings", "policies", "targets")


def run(vhost: Vhost, *arguments: str) -> list[str]:
    """The lines that a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "bide", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "BIDE_URL": vhost.url, "BIDE_MANAGEMENT_URL": vhost.broker.management_url},
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_page_shows_the_output_of_verify_after_three_delays(vhost: Vhost) -> None:
    """But for the addresses, and what depends on the release."""
    run(vhost, "topology", "apply", "point-to-point", "--queue", "orders")
    for delay in ("5m", "1h", "1d"):
        run(vhost, "send", "x", "--to", "orders", "--in", delay)
    printed = run(vhost, "delay", "verify")[1:]
    found = re.search(r"^\$ bide delay verify\nclock on .*\n((?:.+\n)+?)```", PAGE, re.MULTILINE)
    assert found is not None
    shown = found[1].splitlines()
    assert [line[2:26].strip() for line in printed] == [line[2:26].strip() for line in shown]
    counted = [line for line in printed if line[2:].startswith(COUNTED)]
    assert len(counted) == len(COUNTED)
    assert set(counted) <= set(shown)


def test_the_page_shows_the_output_of_apply(vhost: Vhost) -> None:
    """But for the address."""
    (line,) = run(vhost, "delay", "apply")
    assert f"\n{line.partition(' on ')[0]} on " in PAGE


async def test_the_section_about_policies_shows_the_output_of_its_commands(
    vhost: Vhost, rabbitmq: Rabbitmq, api: ManagementApi, tmp_path: Path
) -> None:
    async def put(kind: str, name: str, pattern: str, **definition: Any) -> None:
        body = {"pattern": pattern, "definition": definition, "apply-to": "queues", "priority": 5}
        await api.call("PUT", kind, vhost.name, name, body=body)

    shell = Shell(tmp_path, rabbitmq, vhost)
    (_, commands), (_, strict) = blocks("docs/delays.md", "Policies")
    await put("policies", "housekeeping", ".*", **{"expires": 604_800_000, "queue-leader-locator": "balanced"})
    await asyncio.to_thread(shell.check, commands_of(commands))
    await put("operator-policies", "limits", ".*", **{"message-ttl": 86_400_000})
    assert strict in await asyncio.to_thread(shell.paste, "bide delay verify || test $? = 1")
