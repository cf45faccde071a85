"""The commands of docs/pipeline.md and their output."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import bide.spark
from bide.local_broker import LocalBroker
from tests.readme import INSTALL, PIPELINE, Shell, blocks, shape
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support import Rabbitmq

REMINDERS: Final = 300
SOON: Final = 270
FAILING: Final = 3
WAIT: Final = "timedelta(seconds=30)"


class Reader:
    """Runs the page's commands in a shell, except the program for Spark, which takes ten seconds to start.

    That is run in this process, whose session is there already.
    """

    def __init__(self, spark: SparkSession, shell: Shell, capture: pytest.CaptureFixture[str]) -> None:
        self.shell, self._spark, self._capture = shell, spark, capture

    def follow(self, block: str) -> str:
        """Run the commands of a block, and give what they print."""
        subprocess.run(["bash", "-n", "-c", block], check=True, timeout=TIMEOUT)
        # A line, with its standard input where that is written below it.
        found = re.findall(r"^((.+?)(?: <<'END'\n(.*?\n)END)?\n)", block, re.MULTILINE | re.DOTALL)
        assert "".join(whole for whole, _, _ in found) == block
        return "".join(self._run(whole, program) for whole, _, program in found)

    def _run(self, whole: str, program: str) -> str:
        if "pyspark" not in program:
            return self.shell.paste(whole)
        environment = {
            name: value for name, value in self.shell.environment.items() if name.startswith(("BIDE_", "XDG_"))
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.shell.folder)
            for name, value in environment.items():
                patch.setenv(name, value)
                # So that it is gone afterwards.
                patch.setitem(self._spark.sparkContext.environment, name, "")
            bide.spark.register(self._spark)
            self._capture.readouterr()
            exec(compile(program, PIPELINE, "exec"), {})
        bide.spark.register(self._spark)
        return "".join(self._capture.readouterr())


@pytest.fixture
def start(
    spark: SparkSession, tmp_path: Path, rabbitmq: Rabbitmq, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[], Reader]]:
    """Start over, with a new folder and without a broker."""
    brokers: list[LocalBroker] = []

    def start_over() -> Reader:
        for broker in brokers:
            broker.stop()
        folder = tmp_path / str(len(brokers))
        folder.mkdir()
        shell = Shell(folder, rabbitmq)
        brokers.append(LocalBroker(shell.state / "bide" / "broker"))
        return Reader(spark, shell, capsys)

    yield start_over
    for broker in brokers:
        broker.stop()


@pytest.mark.long
@pytest.mark.slow
def test_the_commands_of_the_pipeline_page_print_what_it_shows(start: Callable[[], Reader]) -> None:
    page = blocks(PIPELINE)
    assert [language for language, _ in page] == ["sh", ""] * 5
    commands = [text for _, text in page[0::2]]
    assert WAIT in commands[1]

    def follow_to_schedule(seconds: int) -> tuple[Reader, list[str]]:
        reader = start()
        soon = commands[1].replace(WAIT, f"timedelta(seconds={seconds})")
        return reader, [reader.follow(text) for text in (commands[0].removeprefix(INSTALL), soon)]

    # A Spark that runs already needs ten seconds on a quiet machine, and minutes on a busy one: then start over.
    reader, printed = follow_to_schedule(25)
    if "due already" in printed[1]:
        reader, printed = follow_to_schedule(300)
    printed += [reader.follow(text) for text in commands[2:]]
    for done, (_, shown) in zip(printed, page[1::2], strict=True):
        assert shape(done) == shape(shown), done

    _, scheduling, auditing, replaying, reading = printed
    assert f"scheduled {REMINDERS} messages" in scheduling
    audit = re.search(r"(\d+) scheduled, (\d+) delivered, (\d+) processed, (\d+) failed; .* (\d+) pending", auditing)
    assert audit is not None
    # A machine so slow that some were due before they were sent has sent those at once, past the taps.
    scheduled, delivered, processed, failed, pending = map(int, audit.groups())
    assert (processed, failed, pending) == (SOON - FAILING, FAILING, REMINDERS - SOON)
    assert scheduled - delivered == pending
    assert f"replayed {FAILING} messages" in replaying
    seen = re.search(r"^(\d+) were scheduled$", reading, re.MULTILINE)
    assert seen is not None
    # With the second reminders. A replay sends each message when it is due, past the delay queues and their taps.
    assert int(seen[1]) == scheduled + pending
    folder = reader.shell.folder
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert (folder / "report.svg").read_text(encoding="utf-8").startswith("<svg ")
