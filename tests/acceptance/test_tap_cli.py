"""``bide tap`` as a subprocess, on a real broker."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import bide
from tests.acceptance.test_cli import PATIENT, SMALL, Program
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from tests.support import Vhost

PAGE = (Path(__file__).parents[2] / "docs" / "taps.md").read_text()
NSB = ("--layout", "nservicebus", "--routing", "direct")


def without_address(text: str) -> str:
    return re.sub(r" on \S+, virtual host [^\s:]+", " on HERE", text)


def test_status_shows_what_on_and_off_did(program: Program, vhost: Vhost) -> None:
    assert "is not on" in program.fails(1, "tap", "on", *SMALL)
    program.ok("delay", "apply", *SMALL)
    assert program.ok("tap", "status", *SMALL).splitlines()[1:] == [
        "  scheduled  bide.v1.tap.scheduled  does not exist",
        "  delivered  bide.v1.tap.delivered  does not exist",
    ]
    limits = ("--max-age", "12h", "--max-bytes", "50MB")
    shown = program.ok("tap", "on", *limits, *SMALL)
    assert without_address(shown).splitlines() == [
        "clock: taps on, 7 bindings on HERE",
        "  scheduled  bide.v1.tap.scheduled  new",
        "  delivered  bide.v1.tap.delivered  new",
    ]
    again = json.loads(program.ok("tap", "on", "--json", *SMALL))
    assert (again["layout"], again["vhost"], again["bindings"]) == ("clock", vhost.name, 7)
    assert (again["created"], again["kept"]) == ([], ["bide.v1.tap.scheduled", "bide.v1.tap.delivered"])
    assert "x-max-age" in program.fails(1, "tap", "on", "--max-age", "13h", "--max-bytes", "50MB", *SMALL)

    found = json.loads(program.ok("tap", "status", "--json", *SMALL))
    assert (found["state"], found["why"]) == ("on", "")
    for stream, count in (("scheduled", 6), ("delivered", 1)):
        one = found["streams"][stream]
        assert (one["exists"], one["bindings"], one["wanted"]) == (True, count, count)
        assert (one["arguments"]["x-max-age"], one["arguments"]["x-max-length-bytes"]) == ("12h", 50_000_000)
    assert "6 of 6 bindings, keeps 12h, 50,000,000 bytes" in program.ok("tap", "status", *SMALL)

    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
    program.ok("send", "x", "--to", "orders", "--in", "1s", *SMALL)
    program.ok("receive", "orders", "--count", "1", *PATIENT)
    assert "on: 'bide.v1.tap.scheduled' and 'bide.v1.tap.delivered'" in program.ok("delay", "verify", *SMALL)

    kept = "bide.v1.tap.scheduled and bide.v1.tap.delivered stay with their messages"
    assert program.ok("tap", "off", *SMALL) == f"clock: taps off; {kept}\n"
    assert "taps off" in program.ok("tap", "status", *SMALL).splitlines()[0]
    assert program.run("tap", "off", "--delete", *SMALL, stdin=b"n\n").returncode == 1
    assert json.loads(program.ok("tap", "status", "--json", *SMALL))["streams"]["scheduled"]["exists"]
    assert "bide.v1.tap.delivered deleted" in program.ok("tap", "off", "--delete", *SMALL, stdin=b"y\n")
    assert json.loads(program.ok("tap", "off", "--delete", "--yes", "--json", *SMALL))["deleted"] == []


def test_tap_on_names_the_cost_and_streams_survive_destroy(program: Program, vhost: Vhost) -> None:
    program.ok("delay", "apply", *NSB)
    done = program.run("tap", "on", *NSB)
    assert (done.returncode, done.stdout.decode().splitlines()[1]) == (0, "  scheduled  bide.tap.nsb.v2.scheduled  new")
    assert done.stderr.decode().startswith(
        "note: from now on a message for a deleted endpoint is only in bide.tap.nsb.v2."
    )

    vhost.broker.management.call(
        "DELETE", "bindings", vhost.name, "e", "nsb.v2.delay-delivery", "q", "bide.tap.nsb.v2.delivered", "%23"
    )
    done = program.run("tap", "status", *NSB)
    assert (done.returncode, "taps incomplete" in done.stdout.decode()) == (1, True)
    assert "run 'bide tap on' with the same options" in done.stderr.decode()
    program.ok("tap", "on", *NSB)

    done = program.run("delay", "destroy", "--yes", *NSB)
    assert done.returncode == 0
    assert "stay, with their messages: 'bide tap off --delete' deletes them" in done.stderr.decode()
    assert "bide.tap.nsb.v2.delivered deleted" in program.ok("tap", "off", "--delete", "--yes", *NSB)
    assert vhost.broker.management.call("GET", "queues", vhost.name) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("on", "--layout", "waiting-hall"), "'waiting-hall' is not one of 'clock', 'nservicebus', 'nservicebus-v1', "),
        (("status", "--levels", "28"), "No such option"),
        (("on", "--max-bytes", "lots"), "the size 'lots' cannot be read"),
        (("on", "--max-bytes", "10 apples"), "the size '10 apples' cannot be read"),
        (("on", "--max-bytes", "1kB"), "1000 bytes is not a valid size of a stream"),
        (("on", "--max-age", "1.5s"), "must be a whole number of seconds"),
        (("on", "--max-age", "later"), "later"),
    ],
)
def test_invalid_tap_commands_are_refused(program: Program, arguments: tuple[str, ...], expected: str) -> None:
    assert expected in program.fails(2, "tap", *arguments)


def test_without_the_management_api_the_status_is_unknown(program: Program) -> None:
    program.ok("delay", "apply", *SMALL)
    program.ok("tap", "on", *SMALL)
    done = program.run("tap", "status", *SMALL, "--management-url", "http://127.0.0.1:1")
    assert done.returncode == 0
    assert "taps unknown" in done.stdout.decode()
    assert "bindings and limits are not known: " in done.stderr.decode()


def test_the_page_shows_the_printed_output(program: Program) -> None:
    """But for addresses and counts: each ``bide tap`` command of the page, in order."""
    program.ok("delay", "apply", *SMALL)
    program.ok("delay", "apply", "--layout", "nservicebus")
    shown = re.findall(r"^\$ bide (tap [^\n]*)\n((?:(?!\$|```)[^\n]*\n)*)", PAGE, re.MULTILINE)
    assert len(shown) >= 4
    for command, output in shown:
        done = program.run(*command.split())
        printed = done.stdout.decode() + done.stderr.decode()
        assert comparable(printed) == comparable(output), command
    found = re.search(r"```python\n(# tapped\.py\n.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    program.ok("tap", "on")
    done = subprocess.run(
        [sys.executable, "-c", found[1]], env=program.environment, capture_output=True, timeout=TIMEOUT, check=False
    )
    assert (done.returncode, comparable(done.stdout.decode())) == (0, comparable(found[2])), done.stderr.decode()


def comparable(text: str) -> list[str]:
    """Without what differs from run to run: the wait may be a millisecond longer, by the rounding of both times."""
    text = re.sub(r"\d+ messages?", "N messages", without_address(text))
    return re.sub(r"\b100[01]$", "WAIT", text, flags=re.MULTILINE).splitlines()
