"""A program that runs ``bide pipeline`` commands in one session, on a cluster or Connect.

Each line of standard input is one command, answered by one line on standard output; both are JSON.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from typing import Any

from bide.cli.app import run
from bide.pipelines.session import session


def answer(*command: str) -> Any:
    """The output of a command with ``--json``; it must not fail."""
    stdout = io.StringIO()
    with redirect_stdout(stdout):
        code = run(["pipeline", *command, "--json"])
    assert code == 0, f"{command} ended with {code}"
    return json.loads(stdout.getvalue())


if __name__ == "__main__":
    master, settings = sys.argv[1], json.loads(sys.argv[2])
    with session(master, name="commands", configuration=settings, time_zone="UTC"):
        for line in sys.stdin:
            sys.stdout.write(json.dumps(answer(*json.loads(line), "--master", master)) + "\n")
            sys.stdout.flush()
