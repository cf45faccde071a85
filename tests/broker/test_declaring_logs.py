"""What a delayed publish declares is logged before it is declared."""

from __future__ import annotations

import logging
import re

import pytest

import bide
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.receiving import fresh
from tests.support import Vhost


async def test_what_the_first_delayed_publish_declares_is_logged_before(
    vhost: Vhost, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="bide")
    queue = fresh("q")
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        await client.publish(b"", to=queue)
        assert "declaring" not in caplog.text
        for _ in range(2):
            await client.publish(b"", to=queue, delay="2s")
    core, digit = (one for one in caplog.messages if one.startswith("declaring"))
    assert re.fullmatch(r"declaring the delay infrastructure clock: \d+ exchanges, \d+ queues?, \d+ bindings", core)
    assert re.fullmatch(r"declaring the delay queues 'bide\.v1\.s2'(, .*)?", digit)
    caplog.clear()
    async with bide.connect(vhost.url, infrastructure=bide.Celery()) as client:
        await client.publish(b"", to=queue, delay="2s")
    assert "declaring the delay infrastructure celery" in caplog.text
