"""The programs of docs/retries.md and their output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import bide
from tests.polling import wait_until
from tests.readme import blocks, shape
from tests.support import Vhost
from tests.timeouts import TIMEOUT

BLOCKS: Final = [block for block in blocks("docs/retries.md") if block[0] != "mermaid"]
ID: Final = "0" * 30
MESSAGES: Final = (
    {"body": '{"id": 1, "amount": 20}', "type": "OrderPlaced"},
    {"body": '{"id": 2, "amount": 200}', "type": "OrderPlaced"},
    {"body": "", "type": "OrderShipped"},
    {"body": "{", "type": "OrderPlaced"},
)


def test_the_endpoint_prints_what_the_page_shows(vhost: Vhost, tmp_path: Path) -> None:
    (_, program), (_, output) = BLOCKS[:2]
    delays = 'delays=["1s", "2s", "3s"]'
    assert delays in program
    log = tmp_path / "log"

    def lines(text: str) -> list[str]:
        return shape(re.sub(rf"\b{ID}(?=\d\d\b)", "...", text.replace("SIGTERM", "sigterm")))

    def missing() -> list[str]:
        return [one for one in lines(output) if one != "..." and one not in lines(log.read_text())]

    with (
        bide.connect_sync(vhost.url) as client,
        log.open("wb") as into,
        subprocess.Popen(
            [sys.executable, "-u", "-c", program.replace(delays, 'delays=["10ms", "20ms", "30ms"]')],
            stdout=into,
            stderr=subprocess.STDOUT,
            env={**os.environ, "BIDE_URL": vhost.url, "BIDE_MANAGEMENT_URL": vhost.broker.management_url},
        ) as serving,
    ):
        try:
            wait_until(
                lambda: client.exists("orders") and client.exists("error"), "the endpoint has declared its queues"
            )
            for number, one in enumerate(MESSAGES, 1):
                client.publish(one["body"], to="orders", type=one["type"], message_id=f"{ID}{number:02}")
            wait_until(lambda: client.message_count("error") == 2, "two messages are parked")
            # The other messages may be handled later, and each line is printed after its message was parked.
            wait_until(lambda: missing() == ["INFO orders: sigterm: draining"], "the other lines are printed")
            serving.terminate()
            assert serving.wait(TIMEOUT) == 0, log.read_text()
        finally:
            serving.kill()

    assert missing() == []
    printed, shown = lines(log.read_text()), lines(output)
    of_second = [one for one in printed if "...N failed" in one and "JSON" not in one]
    assert [one for one in shown if "...N failed" in one and "JSON" not in one] == [*of_second[:3], of_second[-1]]
    assert len(of_second) == 4 * 3


def test_the_function_decides_as_the_page_says() -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS[2][1], names)
    now = datetime.now(UTC)
    failure = bide.Failure(
        endpoint="orders",
        queue="orders",
        error=TimeoutError(),
        attempt=1,
        delayed_retries=0,
        first_failed_at=now,
        failed_at=now,
    )
    policy = names["policy"]
    assert policy(failure) == bide.RetryLater(timedelta(seconds=1))
    assert policy(replace(failure, delayed_retries=99)) == bide.RetryLater(timedelta(minutes=8, seconds=32))
    assert policy(replace(failure, delayed_retries=100)) == bide.Park()
    failure = replace(failure, error=ValueError())
    assert policy(replace(failure, message_type="Newsletter")) == bide.Discard("newsletters are not repeated")
    assert policy(replace(failure, headers={"tenant": "acme"})) == bide.Park("orders.by-hand")
    assert policy(failure) == bide.Park()
