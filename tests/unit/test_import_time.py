"""The modules that ``import bide`` and ``bide --help`` import."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

from tests.timeouts import TIMEOUT

NEW_MODULES = """
import json, sys
before = set(sys.modules)
{code}
print(json.dumps(sorted(set(sys.modules) - before)))
"""

PUBLISHER = "import bide; bide.connect('amqp://localhost'), bide.Topology, bide.Clock"
LAYOUTS = "import bide; bide.connect, bide.connect_sync, bide.Topology, bide.Clock, bide.WaitingHall, bide.NServiceBus"
HELP = "from bide.cli.app import run; run(['--help'])"
SEND_HELP = "from bide.cli.app import run; run(['send', '--help'])"

HEAVY = (
    # of ours, or of our faces
    *(
        "bide.cli",
        "bide.demo",
        "bide.local_broker",
        "bide.management.api",
        "bide.topology.rendering",
        "bide.topology.routing",
    ),
    *("click", "rich", "httpx2", "httpcore2", "anyio"),
    # of the extras, or of other systems
    *("prometheus_client", "opentelemetry", "wsgiref"),
    *("pyspark", "pyarrow", "pandas", "numpy", "celery", "kombu", "amqp", "aio_pika", "aiormq", "starlette"),
    # of the standard library
    *("multiprocessing", "unittest", "http.client", "email", "xml", "sqlite3", "ctypes", "fractions"),
    *("importlib.metadata", "hashlib", "secrets"),
)

NOT_FOR_PUBLISHERS = (
    *("bide.client.consumer", "bide.client.message", "bide.client.bulk", "bide.client.sync", "bide.recoverability"),
    *("bide.delay.cascade", "bide.delay.celery", "bide.delay.nservicebus", "bide.delay.waiting_hall"),
)

NOT_FOR_HELP = (
    *("bide.client", "bide.amqp", "bide.delay", "bide.topology", "bide.pipelines", "bide.cli.send", "bide.cli.errors"),
    *("asyncio", "ssl", "rich", "httpx2", "importlib.metadata"),
)

NOT_FOR_SEND_HELP = (
    *("bide.client", "bide.amqp", "bide.delay.clock", "bide.topology", "bide.pipelines", "bide.cli.errors"),
    *("bide.cli.pipeline", "rich", "httpx2", "importlib.metadata"),
)


@cache
def imported(code: str) -> frozenset[str]:
    """The modules that code imports, and their packages."""
    output = subprocess.run(
        [sys.executable, "-c", NEW_MODULES.format(code=code)], check=True, capture_output=True, timeout=TIMEOUT
    ).stdout
    return frozenset(json.loads(output.splitlines()[-1]))


@pytest.mark.parametrize("code", [PUBLISHER, LAYOUTS])
def test_import_bide_imports_nothing_heavy(code: str) -> None:
    assert "bide.client.client" in imported(code)
    assert not imported(code).intersection(HEAVY)


def test_a_publisher_does_not_import_consumers_or_other_layouts() -> None:
    assert "bide.client.publisher" in imported(PUBLISHER)
    assert not imported(PUBLISHER).intersection(NOT_FOR_PUBLISHERS)


def test_help_imports_no_command() -> None:
    assert "bide.cli.app" in imported(HELP)
    assert not imported(HELP).intersection(NOT_FOR_HELP)


@pytest.mark.parametrize("name", NOT_FOR_SEND_HELP)
def test_the_help_of_a_command_imports_that_command_alone(name: str) -> None:
    assert "bide.cli.send" in imported(SEND_HELP)
    assert name not in imported(SEND_HELP)
