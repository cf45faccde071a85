"""The programs in examples/: they print what they announce, and clean up."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from bide.patterns.catalogue import PATTERNS
from tests.support import Vhost
from tests.timeouts import TIMEOUT

FOLDER = Path(__file__).parents[3] / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))

_PRINTS = re.compile(r"^Prints.*::\n\n((?: {4}.*\n)+)", re.MULTILINE)


def test_each_numbered_pattern_has_an_example() -> None:
    assert [one.example for one in PATTERNS if one.number is not None] == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
async def test_each_example_prints_its_documented_output(name: str, vhost: Vhost) -> None:
    promised = _PRINTS.search((FOLDER / name).read_text())
    assert promised is not None
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, FOLDER / name),
        env={**os.environ, "BIDE_URL": vhost.url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, stderr = await asyncio.wait_for(process.communicate(), TIMEOUT)
    assert (printed.decode(), process.returncode) == (promised[1].replace("    ", ""), 0), stderr.decode()
    kept = {one["name"] for one in vhost.broker.management.call("GET", "queues", vhost.name)}
    assert not {one for one in kept if one.startswith("example")}
