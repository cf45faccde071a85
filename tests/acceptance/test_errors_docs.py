"""The commands and the program of docs/errors.md."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import bide
from bide.amqp.url import BrokerUrl
from tests.acceptance.test_cli import Program
from tests.acceptance.test_errors_cli import fill
from tests.acceptance.test_errors_interrupted import interrupted
from tests.acceptance.test_forged_times import MALFORMED, RECORD
from tests.polling import wait_until
from tests.readme import Shell, blocks, commands_of, shape, without_left_out, without_slow_api
from tests.support import Rabbitmq, Vhost
from tests.timeouts import TIMEOUT

PAGE: Final = "docs/errors.md"
ENDPOINT: Final = """
import bide


def gateway(order):
    raise TimeoutError("the payment gateway did not answer within 5 s")


app = bide.Endpoint("orders", name="billing", retry=bide.Retry(immediate=3, delays=[]), slow_down_after=None)


@app.handler(type="OrderPlaced")
def charge(message):
    order = message.json()
    if order["amount"] > 100:
        order["card"]
    try:
        gateway(order)
    except TimeoutError as error:
        raise ConnectionError(f"order {order['id']} was not charged") from error


app.serve()
"""
"""The endpoint whose failures the page shows."""


def commands(title: str, number: int = 0) -> list[tuple[str, str]]:
    """The commands of a block of a section, and what they print."""
    found = [text for language, text in blocks(PAGE, title) if not language]
    return commands_of(found[number])


def comparable(text: str) -> list[str]:
    """What stays the same on another machine, and in another run."""
    text = re.sub(r"\S+@\S+ \(\S+\)", "USER", text)
    text = re.sub(r"^(host|sent by)( +)[^\s,]+", r"\1\2NAME", text, flags=re.MULTILINE)
    return shape(re.sub(r"\b[0-9a-f]{12}\b", "RUN", text))


def publish(client: bide.SyncClient, user: str) -> None:
    """22 orders that cannot be charged, two without a card, and half a message."""
    for number in range(1, 25):
        client.publish(
            json={"id": number, "amount": 20 if number < 23 else 200},
            to="orders",
            type="OrderPlaced",
            user_id=user,
            headers={"tenant": "acme"} if number < 9 else {},
        )
    client.publish("{", to="orders", type="OrderPlaced")


@pytest.mark.slow
def test_the_commands_print_what_the_page_shows(vhost: Vhost, rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    shell = Shell(tmp_path, rabbitmq, vhost)
    (tmp_path / "orders.py").write_text(ENDPOINT, encoding="utf-8")

    def check(shown: list[tuple[str, str]], **instead: str) -> None:
        for command, output in shown:
            for old, new in instead.items():
                command = command.replace(old, new)
            printed, expected = comparable(shell.paste(command)), comparable(output)
            assert without_left_out(printed, expected) == expected, command

    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
        publish(client, BrokerUrl.parse(vhost.url).user)
        with subprocess.Popen(
            [sys.executable, "orders.py"], cwd=tmp_path, env=shell.environment, stderr=subprocess.DEVNULL
        ) as serving:
            try:
                wait_until(lambda: client.exists("error") and client.message_count("error") == 25, "all are parked")
                serving.terminate()
                assert serving.wait(TIMEOUT) == 0
            finally:
                serving.kill()

        check(commands("What failed?"))
        ids = {
            name: shell.paste(f"bide errors list {chosen} --json").split('"id": "')[1][:16]
            for name, chosen in {
                "9e0e0efb0b3e53be": "--header tenant=acme",
                "67492827945ee624": "--exception UndecodableMessageError",
            }.items()
        }
        check(commands("What failed?", 1), **ids)
        check(commands("The gateway is back"), **{"--over 10m": "--over 1s"})
        assert client.message_count("orders") == 22
        check(commands("The half message"), **ids)
        check(commands("The rest can wait"))
        assert client.message_count("error.archive") == 2

        ((history, shown),) = commands("Who did what?")
        printed = set(comparable(shell.paste(history)))
        assert set(comparable(shown)) - {"..."} <= printed

        shell.paste("bide errors unarchive --all --yes")
        ((_, program),) = blocks(PAGE, "From Python")
        (tmp_path / "errors.py").write_text(program, encoding="utf-8")
        assert shell.paste("python errors.py") == "2 KeyError at orders.py in charge\n0 sent back, 0 stay\n"

        ((refused, why),) = commands("Queues that are refused")
        assert comparable(shell.paste(f"{refused} || test $? = 2")) == comparable(why)


def test_an_interrupted_retry_prints_what_the_page_shows(
    program: Program, vhost: Vhost, rabbitmq: Rabbitmq, tmp_path: Path
) -> None:
    shell = Shell(tmp_path, rabbitmq, vhost)
    ((retry, shown), (history, log)) = commands("What a retry does")
    bide_, errors, retry_, *arguments = shlex.split(retry.replace("--over 10m", "--over 100s"))
    assert (bide_, errors, retry_) == ("bide", "errors", "retry")
    fill(vhost, 200, error=ConnectionError("no"))
    _, printed = interrupted(program, vhost, signal.SIGINT, *arguments, after=2)
    assert comparable(without_slow_api(printed)) == comparable(shown)
    expected = comparable(log)
    assert without_left_out(comparable(shell.paste(history)), expected) == expected


def test_a_forged_record_is_shown_and_others_are_counted(vhost: Vhost, rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    shell = Shell(tmp_path, rabbitmq, vhost)
    shell.environment["TZ"] = "UTC"
    ((history, shown),) = commands("Who did what?", 1)
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue("bide.audit", arguments={"x-queue-type": "stream"})]))
        for body in (*MALFORMED, json.dumps(RECORD).encode()):
            client.publish(body, to="bide.audit")
    assert sorted(shell.paste(history).splitlines()) == sorted(shown.splitlines())
