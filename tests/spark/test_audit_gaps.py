"""What an audit says where streams have lost what it has not read, and how it goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import bide
from bide.cli import app as cli
from bide.cli.pipeline_audit import own_words
from bide.delay.taps import Retention, taps_of
from bide.errors import InvalidOptionError
from bide.spark.source import WAY_OUT_OF_LEFT_OUT
from bide.topology import Queue, Topology
from tests.broker.conftest import SMALL_CLOCK
from tests.spark.test_audit import STREAM, put, with_client
from tests.support import Vhost, stream_port

TOLD = "told"
LIMITS = {"x-max-length-bytes": 100_000, "x-stream-max-segment-size-bytes": 50_000}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("spark")
def test_gaps_end_an_audit_until_they_are_allowed(
    vhost: Vhost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each time it names the options that it has, not those of the data source behind it."""
    celery = bide.Celery()
    events = Topology(queues=[Queue(TOLD, arguments={**STREAM, **LIMITS})])
    taps = [taps_of(one).topology(Retention()) for one in (SMALL_CLOCK, celery)]
    asyncio.run(put(vhost.url, SMALL_CLOCK.topology(), celery.topology(), *taps, events))

    def tell(*names: str, size: int = 0) -> None:
        async def publish(client: bide.Client) -> None:
            for name in names:
                event = {"event": "processed", "message_id": name, "ended": 1_795_262_400_000, "text": "x" * size}
                await client.publish(json=event, to=TOLD)

        with_client(vhost.url, SMALL_CLOCK, publish)

    def run(*options: str, code: int = 0) -> str:
        where = ("--url", vhost.url, "--stream-port", str(stream_port(vhost.broker)))
        given = ("--once", "--json", "--into", str(tmp_path / "audit"), "--events", TOLD, *where, *options)
        assert cli.run(["pipeline", "audit", *given]) == code
        said = capsys.readouterr()
        assert "failOnDataLoss" not in said.err
        return said.err if code else said.out

    def processed(output: str) -> int:
        rows: dict[str, Any] = json.loads(output)["rows"]
        return int(rows["processed"])

    tell("first")
    assert processed(run()) == 1

    # Not a message is missing, but nobody can know that.
    assert cli.run(["tap", "off", "--layout", "celery", "--delete", "--yes", "--url", vhost.url]) == 0
    said = run(code=2)
    assert f"has positions of {taps_of(celery).names[0]}, which the query does not read any more: name them by " in said
    assert "--layout, --prefix and --events as before, go on without them with --allow-gaps, or audit into" in said
    assert processed(run("--allow-gaps")) == 0

    # Far more than the stream keeps.
    tell(*(f"many-{number}" for number in range(100)), size=5_000)
    said = run(code=1)
    assert "retention was quicker than the reading. Go on with what is left with --allow-gaps, or audit into" in said
    assert 0 < processed(run("--allow-gaps")) < 100

    async def anew(client: bide.Client) -> None:
        await client.destroy(events, force=True)
        await client.declare(events)

    with_client(vhost.url, SMALL_CLOCK, anew)
    tell("last")
    assert "it was deleted and declared again. Go on with --allow-gaps, or audit into another folder" in run(code=1)
    assert processed(run("--allow-gaps")) == 1
    assert processed(run()) == 0


def test_a_batch_that_leaves_streams_out_is_told_of_in_the_words_of_the_command() -> None:
    """PySpark before 4.2 has it in the checkpoint when that is seen."""
    theirs = f"the checkpoint has positions of x, which the batch that it has begun leaves out: {WAY_OUT_OF_LEFT_OUT}"
    said = str(own_words(InvalidOptionError(theirs)))
    assert "failOnDataLoss" not in said
    assert "leaves out: name them by --layout, --prefix and --events as before and delete the newest file in " in said
    assert "'offsets', with its .crc (below _checkpoint); go on without them with --allow-gaps, or audit into" in said
