"""``bide pipeline replay --audit`` without Spark."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections import Counter as Multiset
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from pyarrow import parquet

import bide
from bide.delay.taps import taps_of
from bide.errors import InvalidInputError
from bide.pipelines.engine import NeedsSparkError
from bide.pipelines.replay.choices import Choices
from bide.pipelines.replay.small_audit import (
    FoundInProcess,
    TappedFailure,
    check_small,
    chosen_of,
    find,
    record,
    remaining_of,
)
from bide.topology import Queue, Topology
from tests.audited_shop import AuditedShop, check_that_a_limit_counts_only_available_messages, fill
from tests.broker.conftest import SMALL_CLOCK
from tests.polling import wait_until
from tests.spark.receiving import drain, rest
from tests.spark.spark_processes import Counter, started
from tests.spark.test_folder_lock import holder_of
from tests.support import Vhost
from tests.timeouts import TIMEOUT

WITHOUT_SPARK = """
import sys
sys.modules["pyspark"] = None
from bide.cli.app import run
sys.exit(run(sys.argv[1:]))
"""


# The command sleeps between two looks for a file, which gives no event.
PAUSING = """
import sys, time
from pathlib import Path
sys.modules["pyspark"] = None
from bide.cli.app import run
from bide.pipelines.ledger import Ledger
folder, add = Path(sys.argv.pop(1)), Ledger.add
def add_after_pause(self, part):
    if part.part == 1:
        (folder / "sent").touch()
        while not (folder / "go on").exists():
            time.sleep(0.01)
    add(self, part)
Ledger.add = add_after_pause
sys.exit(run(sys.argv[1:]))
"""
"""A command that waits when the messages of its second part are sent, and not recorded yet."""

INTERRUPTED = """
import signal, sys, threading
sys.modules["pyspark"] = None
from bide.cli.app import run
start = threading.Thread.start
def start_and_interrupt(self):
    start(self)
    if self.name.startswith("replay"):
        signal.raise_signal(signal.SIGINT)
threading.Thread.start = start_and_interrupt
sys.exit(run(sys.argv[1:]))
"""
"""A command that is interrupted while it starts the thread that sends."""


@pytest.fixture
def shop(vhost: Vhost, tmp_path: Path) -> AuditedShop:
    return AuditedShop(vhost, tmp_path / "[eu]")


def found_in(shop: AuditedShop, **options: int | bool) -> FoundInProcess:
    # Options by name, of several types.
    return find(shop.folder, Choices(folder=str(shop.ledger)), url=shop.url, **options)  # type: ignore[arg-type]


def program(shop: AuditedShop, *arguments: str) -> list[str]:
    """A command that cannot import PySpark."""
    return [sys.executable, "-c", WITHOUT_SPARK, *shop.command(), *arguments]


def test_discarded_messages_are_replayed_once_without_spark(
    shop: AuditedShop, capsys: pytest.CaptureFixture[str]
) -> None:
    async def publish(client: bide.Client) -> None:
        for number in range(4):
            await client.publish(
                b"d%d" % number, to="orders", delay="100ms", message_id=f"d{number}", type="Order",
                headers={"discount": 0.5, "n": number},
            )  # fmt: skip
        await client.publish(b"p", to="orders", delay="100ms", message_id="p", headers={"bad": True})
        await client.publish(b"n", to="orders", message_id="never-delayed", headers={"discount": 1})
        await client.publish(b"g", to="orders", delay="100ms", message_id="good")

    async def fail(client: bide.Client) -> None:
        await shop.fail(client, 7)

    shop.work(publish, fail)
    shop.audit()
    assert shop.replay("--dry-run", "--json") == 1
    captured = capsys.readouterr()
    dry = json.loads(captured.out)
    assert (dry["messages"], dry["queues"], dry["missing_queues"]) == (4, {"orders": 4}, [])
    assert (dry["parked"], dry["unseen"], dry["dropped"]) == (1, 1, 0)
    assert sum(one["count"] for one in dry["due"]) == 4
    assert dry["engine"] == "local"
    assert dry["engine_reason"].startswith("the facts of the audit have ")
    assert not shop.ledger.exists(), "a dry run writes nothing"
    assert "bide: the bodies of some messages are missing, and nothing was sent: 1 that no tap has seen" in captured.err
    assert shop.replay() == 1
    assert "Send the others with --skip-missing" in capsys.readouterr().err

    chosen = ("--where", "exception = 'LookupError' and message_id like 'd%' and `group` <> ''", "--over", "4s")
    done = subprocess.run(program(shop, *chosen, "--json"), capture_output=True, text=True, check=True, timeout=TIMEOUT)
    result = json.loads(done.stdout)
    assert (result["sent"], result["sent_before"], result["gone"]) == (4, 0, 0)
    assert result["seconds"] >= 3, "the last one is sent when it is due"
    assert "bide: streams drop headers whose values are lists or tables" in done.stderr
    found = sorted(drain(shop.url, "orders", 4), key=lambda one: str(one.message_id))
    assert [(one.message_id, one.body, one.type, one.headers["n"]) for one in found] == [
        (f"d{number}", b"d%d" % number, "Order", number) for number in range(4)
    ]
    assert all(one.history.returned == 1 and one.history.retries == 0 for one in found)
    dues = [row["deliver_at"] for row in chosen_of(Choices(folder=str(shop.ledger)).ledger(1)).to_pylist()]
    assert [one - dues[0] for one in dues] == [timedelta(seconds=number) for number in range(4)]

    assert shop.replay("--skip-missing") == 0
    text = capsys.readouterr().out
    assert text.startswith("replayed 0 messages\nengine: this process, because the facts of the audit have ")
    assert rest(shop.url, "orders") == []

    async def fail_again(client: bide.Client) -> None:
        await client.publish(b"d1", to="orders", delay="50ms", message_id="d1", headers={"discount": 1})
        await shop.fail(client, 1)

    shop.work(fail_again)
    shop.audit()
    assert shop.replay("--skip-missing", "--parked") == 0
    assert "replayed 2 messages" in capsys.readouterr().out
    assert {one.message_id for one in drain(shop.url, "orders", 2)} == {"d1", "p"}
    assert rest(shop.url, "orders") == []


def test_missing_messages_and_queues_are_reported(shop: AuditedShop, capsys: pytest.CaptureFixture[str]) -> None:
    fill(shop, 3)
    limited = found_in(shop, limit=2)
    assert [one.message_id for one in limited.messages] == ["m0", "m1"]
    with bide.connect_sync(shop.url) as client:
        client.destroy(Topology(queues=[Queue("orders")]))
    assert shop.replay("--dry-run") == 1
    assert "3 to orders  (does not exist)" in capsys.readouterr().out
    assert shop.replay("--allow", "mail.*") == 2
    assert "messages would go to queues that are not allowed (orders)" in capsys.readouterr().err
    assert shop.replay() == 1
    assert "messages failed on queues that do not exist any more (orders), and nothing was sent" in (
        capsys.readouterr().err
    )
    with bide.connect_sync(shop.url) as client:
        client.declare(Topology(queues=[Queue.quorum("orders"), Queue.quorum("elsewhere")]))
    assert shop.replay("--to", "elsewhere", "--limit", "1") == 0
    assert [one.message_id for one in drain(shop.url, "elsewhere", 1)] == ["m0"]
    with bide.connect_sync(shop.url) as client:
        client.wait_for(client.client.destroy(Topology(queues=[Queue(taps_of(SMALL_CLOCK).delivered)]), force=True))
    found = found_in(shop)
    assert (found.messages, found.unseen, found.dropped) == ([], 0, 2)
    capsys.readouterr()
    assert shop.replay() == 1
    assert "2 that the retention of a tap's stream has removed, or whose stream was deleted" in capsys.readouterr().err


def test_a_limit_counts_only_available_messages(shop: AuditedShop, capsys: pytest.CaptureFixture[str]) -> None:
    check_that_a_limit_counts_only_available_messages(shop, capsys)


def test_a_second_replay_is_refused_while_the_first_runs(shop: AuditedShop, capsys: pytest.CaptureFixture[str]) -> None:
    fill(shop, 2)
    with holder_of(shop.ledger) as process:
        assert shop.replay() == 1
        assert f"bide: the ledger {shop.ledger} is in use by the process {process.pid} on " in capsys.readouterr().err
        assert shop.replay("--dry-run") == 0, "it chooses nothing"
        assert Choices(folder=str(shop.ledger)).count() == 0
    assert shop.replay() == 0
    assert {one.message_id for one in drain(shop.url, "orders", 2)} == {"m0", "m1"}


def test_a_killed_replay_is_continued_without_a_loss(
    shop: AuditedShop, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """``kill -9`` while a part is under way, and the same command again."""
    number, part = 600, 50
    fill(shop, number)
    options = ("--part-rows", str(part))
    ledger = Choices(folder=str(shop.ledger)).ledger(1)
    with started([sys.executable, "-c", PAUSING, tmp_path, *shop.command(), *options]) as replay:
        replay.wait_until((tmp_path / "sent").exists, "the second part was sent")
        replay.kill()
    assert sum(one.sent for one in ledger.parts()) == part
    assert shop.replay("--limit", "1") == 2
    assert "has an unfinished replay" in capsys.readouterr().err
    assert shop.replay(*options, "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert done["sent"] + done["sent_before"] == number
    assert done["engine_reason"].startswith("the unfinished choice has ")
    found = Multiset((one.message_id, one.body) for one in drain(shop.url, "orders", 10 * number, quiet="3s"))
    assert {message_id for message_id, _ in found} == {f"m{n}" for n in range(number)}, "nothing is lost"
    assert len(found) == number, "what came twice has the same id and body"
    assert sum(found.values()) - number == part, "the part that was under way"


@pytest.mark.parametrize("over", [(), ("--over", "2m")], ids=["at once", "spread"])
def test_an_interrupted_replay_finishes_its_part(shop: AuditedShop, over: tuple[str, ...], tmp_path: Path) -> None:
    """So that no message is sent twice."""
    number = 600
    fill(shop, number)
    ledger = Choices(folder=str(shop.ledger)).ledger(1)
    with closing(Counter(shop.url, "orders")) as counter:
        options = (*("--part-rows", "5" if over else "20"), *over)
        # Messages that are sent at once may all be sent before the signal comes.
        command = (
            program(shop, *options)
            if over
            else [*(sys.executable, "-c", PAUSING, str(tmp_path), *shop.command(), *options)]
        )
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:

            def is_under_way() -> bool:
                return counter() > 0 if over else (tmp_path / "sent").exists()

            wait_until(lambda: is_under_way() or process.poll() is not None, "some messages were sent")
            process.send_signal(signal.SIGINT)
            (tmp_path / "go on").touch()
            _, stderr = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
        assert process.returncode == 128 + signal.SIGINT, stderr
        arrived = counter()
    assert 0 < arrived < number
    assert sum(one.sent for one in ledger.parts()) == arrived
    *_, interrupted, again = (line for line in stderr.splitlines() if line.startswith("bide: "))
    assert interrupted.startswith(f"bide: interrupted: {arrived} of {number} messages replayed, ")
    assert again.startswith("bide: go on with: bide pipeline replay --url ")
    if not over:
        assert subprocess.run(program(shop, "--part-rows", "20"), check=False, timeout=TIMEOUT).returncode == 0
        found = sorted(str(one.message_id) for one in drain(shop.url, "orders", number))
        assert found == sorted(f"m{place}" for place in range(number))
        assert rest(shop.url, "orders") == []


def test_an_interruption_at_the_first_part_counts_it(shop: AuditedShop) -> None:
    """The interruption comes when the thread that sends has started, and the replay does not know it yet."""
    number, command = 60, [sys.executable, "-c", INTERRUPTED, *shop.command(), "--part-rows", "20"]
    fill(shop, number)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    sent = sum(one.sent for one in Choices(folder=str(shop.ledger)).ledger(1).parts())
    assert f"bide: interrupted: {sent} of {number} messages replayed, " in done.stderr


def test_a_choice_that_was_killed_before_its_head_is_made_anew(shop: AuditedShop) -> None:
    fill(shop, 3)
    choices = Choices(folder=str(shop.ledger))
    found = found_in(shop)
    ledger = record(choices, found.messages, plan="shop", broker="localhost")
    Path(ledger.folder, "ledger.json").unlink()
    assert choices.unfinished("shop", "localhost") is None
    assert found_in(shop).messages == found.messages, "a choice without a head is none"
    again = record(choices, found.messages[:2], plan="shop", broker="localhost", part_rows=1)
    assert again.folder == ledger.folder
    assert [(one.message_id, one.part) for one in remaining_of(ledger)] == [("m0", 0), ("m1", 1)]
    assert [one.message_id for one in found_in(shop).messages] == ["m2"]
    with pytest.raises(InvalidInputError, match="has an unfinished replay to the broker localhost"):
        choices.unfinished("another", "localhost")


def test_large_audits_and_choices_are_left_to_spark(
    shop: AuditedShop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(shop, 3)
    with pytest.raises(NeedsSparkError, match=r"^the facts of the audit have .* kB, more than 1\.0 kB$"):
        found_in(shop, largest=1_000)
    found = found_in(shop, largest=10_000_000)
    ledger = record(Choices(folder=str(shop.ledger)), found.messages, plan="shop", broker="localhost")
    with pytest.raises(NeedsSparkError, match=r"^the unfinished choice has .* kB, more than 1\.0 kB$"):
        check_small(ledger, largest=1_000)
    # Arrow does not parse a URI with brackets.
    (link := tmp_path / "link").symlink_to(shop.folder.place)
    uri = ["--audit", f"file://{link}", "--ledger", str(shop.ledger) + "2"]
    for arguments, reason in (
        (uri, f"file://{link} is a URI"),
        (["--where", "attempts > 2", "--ledger", str(shop.ledger) + "2"],
         "the condition is more than comparisons of columns with text"),
        (["--where", "exchange = 'x'", "--ledger", str(shop.ledger) + "2"],
         "the condition is more than comparisons of columns with text"),
    ):  # fmt: skip
        assert shop.replay("--engine", "local", "--dry-run", *arguments) == 2
        assert capsys.readouterr().err == f"bide: {reason}, which only Spark supports: leave out --engine local\n"
        done = subprocess.run(
            program(shop, "--dry-run", *arguments), capture_output=True, text=True, check=False, timeout=TIMEOUT
        )
        assert done.returncode == 2
        assert done.stderr.endswith(f"; Spark is needed because {reason}\n")


def test_large_earlier_choices_are_left_to_spark(shop: AuditedShop) -> None:
    fill(shop, 3)
    many = [
        TappedFailure(message_id=str(uuid4()), queue="orders", failed_at=number, stream="tap", offset=number)
        for number in range(50_000)
    ]
    record(Choices(folder=str(shop.ledger)), many, plan="shop", broker="localhost")
    with pytest.raises(NeedsSparkError, match=r"^the earlier choices have .* MB, more than 1\.0 MB$"):
        found_in(shop, largest=1_000_000)
    assert len(found_in(shop).messages) == 3


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_broken_file_of_a_choice_is_named(
    shop: AuditedShop, capsys: pytest.CaptureFixture[str], is_finished: bool
) -> None:
    fill(shop, 3)
    assert shop.replay() == 0
    ledger = Choices(folder=str(shop.ledger)).ledger(1)
    if not is_finished:
        Path(ledger.folder, "part-00000.json").unlink()
    capsys.readouterr()
    (file,) = Path(ledger.folder, "chosen").glob("*.parquet")
    file.write_bytes(file.read_bytes()[:-10])
    assert shop.replay("--engine", "local") == 2
    assert f"bide: the chosen messages in {file} cannot be read" in capsys.readouterr().err
    shutil.rmtree(file.parent)
    assert shop.replay("--engine", "local") == 2
    assert f"bide: the chosen messages in {file.parent} cannot be read" in capsys.readouterr().err


def test_a_broken_file_of_the_audit_is_named(shop: AuditedShop, capsys: pytest.CaptureFixture[str]) -> None:
    fill(shop, 3)
    file = next(Path(shop.folder.place, "failed").rglob("*.parquet"))
    data = file.read_bytes()
    file.write_bytes(data[:-10])
    assert shop.replay("--dry-run") == 2
    assert f"{file} is not a complete Parquet file" in capsys.readouterr().err


def test_tables_without_a_newer_column_are_read(shop: AuditedShop) -> None:
    """As an earlier release of bide wrote them."""
    fill(shop, 3)
    before = found_in(shop).messages
    for file in Path(shop.folder.place, "failed").rglob("*.parquet"):
        parquet.write_table(parquet.ParquetFile(file).read().drop_columns(["text"]), file)
    assert found_in(shop).messages == before
