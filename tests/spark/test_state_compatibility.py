"""Ledgers, audits and digests of earlier releases, which this release continues.

The folders were written by the first release with these formats, with Spark 4.3, and must not change. A change that
fails a test here breaks the data of users, and needs a new version of the format.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

import bide
from bide.cli.pipeline.replay_audit import AuditReplay
from bide.delay.protocol import DelayInfrastructure
from bide.pipelines.audit import facts
from bide.pipelines.audit.folder import Folder
from bide.pipelines.audit.run import Sources, run
from bide.pipelines.ledger import Ledger
from bide.pipelines.replay.choices import Choices
from bide.pipelines.replay.from_audit import failures, remaining_of, send, without_earlier
from bide.pipelines.replay.tap_reader import ReplayRun
from bide.pipelines.schedule.plan import SchedulePlan
from bide.pipelines.schedule.progress import head_for
from bide.pipelines.schedule.rows import messages
from bide.pipelines.schedule.run import send as send_schedule
from bide.pipelines.schedule.run import survey
from bide.spark.sink_settings import SinkSettings
from tests.broker.conftest import SMALL_CLOCK
from tests.spark.receiving import drain, rest
from tests.spark.streams import Streams
from tests.support import Vhost, stream_port

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HERE: Final = Path(__file__).parent
TAPS: Final = {"scheduled": "bide.v1.tap.scheduled", "delivered": "bide.v1.tap.delivered"}
EVENTS: Final = "bide.events"


def plan(infrastructure: DelayInfrastructure, constants: dict[str, Any], **columns: Any) -> SchedulePlan:
    settings = SinkSettings.make("amqp://localhost", infrastructure=infrastructure, constants=constants)
    return SchedulePlan(settings=settings, **columns)


USUAL: Final = plan(bide.Clock(), {"to": "orders", "content_type": "application/json"}, at_column="due")
WITH_OPTIONS: Final = plan(
    bide.Clock(prefix="shop", max_delay=timedelta(days=30), resolution=timedelta(seconds=1), lanes=4),
    {"exchange": "reminders", "routing_key": "de", "type": "Remind", "priority": 3, "headers": {"b": 1, "a": "x"}},
    at_column="due",
    body_column="text",
    id_column="id",
    header_columns=("shop", "language"),
    name="november",
)
TO_DOTNET: Final = plan(
    bide.NServiceBus(routing="direct"),
    {"to": "Shop.Orders", "content_type": "application/json"},
    delay_column="wait",
    body_columns=("order", "email"),
)


@pytest.mark.parametrize(
    ("plan", "digest", "of_ledger"),
    [
        (USUAL, "196923a92a9ed119dddb984265f27fba", "12e8362d85d73511757a32c3c7ec1246"),
        (WITH_OPTIONS, "49099ed1dab4f7f7e059bdd10587e518", "edb9073b2a796f7f3c242796ae138dc2"),
        (TO_DOTNET, "898ddf6805cbf7f29087910dc2c9fc5a", "05ac78b49a193003a7a5df73e21ea2f9"),
    ],
)
def test_digests_of_schedules_are_unchanged(plan: SchedulePlan, digest: str, of_ledger: str) -> None:
    """Message ids and ledgers are found by them."""
    assert (plan.digest(), plan.ledger_digest()) == (digest, of_ledger)


REPLAY: Final = "f123019c90690da158c81a31d63f6230"
"""The digest of a replay without options."""


def test_digests_of_replays_are_unchanged() -> None:
    given: dict[str, Any] = {"url": "amqp://localhost", "folder": Folder("/audit"), "to": None, "parked": False,
                             "skip_missing": False, "ledger": None, "part_rows": 2_000, "started": 0.0}  # fmt: skip
    usual = AuditReplay(**given, where=None, limit=None, over=timedelta(0))
    other = AuditReplay(**given, where="endpoint = 'shop'", limit=10, over=timedelta(hours=2))
    assert (usual.plan, other.plan) == (REPLAY, "fedd4f825d29b6290dd79ba430ab850e")


def test_new_settings_with_defaults_do_not_change_digests() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class LaterClock(bide.Clock):
        jitter: timedelta = timedelta(0)

    @dataclass(frozen=True, slots=True, kw_only=True)
    class LaterPlan(SchedulePlan):
        reply_column: str | None = None

    settings = USUAL.settings
    later = SinkSettings.make(settings.url, infrastructure=LaterClock(), constants=settings.constants)
    same = LaterPlan(settings=later, at_column="due")
    assert (same.digest(), same.ledger_digest()) == (USUAL.digest(), USUAL.ledger_digest())
    assert LaterPlan(settings=later, at_column="due", reply_column="to").digest() != USUAL.digest()
    later = SinkSettings.make(
        settings.url, infrastructure=LaterClock(jitter=timedelta(seconds=1)), constants=settings.constants
    )
    assert LaterPlan(settings=later, at_column="due").ledger_digest() != USUAL.ledger_digest()


def test_foreign_infrastructures_have_digests() -> None:
    """Digests of an infrastructure without a description of its settings."""

    class Others:
        name = "others"

        def __init__(self, clock: bide.Clock) -> None:
            self._clock = clock

        def __getattr__(self, name: str) -> Any:
            return getattr(self._clock, name)

    def digest(**values: Any) -> str:
        others: Any = Others(bide.Clock(**values))
        return plan(others, {"to": "orders"}, at_column="due").ledger_digest()

    assert digest() == digest()
    assert len({digest(), digest(prefix="x"), digest(max_delay=timedelta(hours=1))}) == 3


SENT_BEFORE: Final = (1, 5, 8, 9, 10, 11, 12, 14, 21, 22, 26, 27, 31, 32, 35, 36, 37)


def rows_of(spark: SparkSession) -> DataFrame:
    """What the kept schedule was begun for: each second row is of a language, and two are alike."""
    return spark.range(0, 40, 1, 3).selectExpr(
        "concat('o-', greatest(id, 1)) as order",
        "if(id % 2 = 0 and id > 1, 'de', null) as language",
        "timestamp_seconds(1767225600 + greatest(id, 1)) as due",
    )


def test_a_schedule_of_version_1_is_continued(spark: SparkSession, vhost: Vhost, tmp_path: Path) -> None:
    """Of 40 rows, in four parts, two parts were sent."""
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders")]))
    settings = SinkSettings.make(vhost.url, infrastructure=SMALL_CLOCK, constants={"to": "reminders", "type": "Remind"})
    plan = SchedulePlan(at_column="due", header_columns=("language",), name="november", settings=settings)
    folder = tmp_path / "ledger"
    shutil.copytree(HERE / "schedule-ledger-v1", folder)
    # The tests' broker has another address each time.
    head_file = folder / "ledger.json"
    head_file.write_text(json.dumps({**json.loads(head_file.read_text()), "broker": plan.broker}))

    ledger, rows = Ledger(str(folder)), rows_of(spark)
    head = head_for(ledger, plan, survey(rows, plan, now=datetime.now(UTC)))
    sent = {row["part"]: row["sent"] for row in send_schedule(rows, plan, ledger, head).collect()}
    assert sent == {1: 11, 3: 11}
    orders = {row["message_id"]: json.loads(row["value"])["order"] for row in messages(rows, plan).collect()}
    found = {str(one.message_id): one.json()["order"] for one in drain(vhost.url, "reminders", sum(sent.values()))}
    assert found.items() <= orders.items()
    assert rest(vhost.url, "reminders") == []
    before = {one: order for one, order in orders.items() if one not in found}
    assert set(before.values()) == {f"o-{number}" for number in SENT_BEFORE}
    first = "c2366bd3f4ed60e14440a672170d4f0c"
    assert {one for one, order in before.items() if order == "o-1"} == {first, f"{first}-2"}


@pytest.fixture
def audit(tmp_path: Path) -> Folder:
    """Of five messages that came to an endpoint: it discarded m-1 and m-2, parked m-3, and processed the others.

    The second round knew of m-4 what the first did not: that it was delivered and processed. It was interrupted when
    all facts were there, and messages were about to be written.
    """
    shutil.unpack_archive(HERE / "audit-v2.zip", tmp_path / "audit")
    return Folder(str(tmp_path / "audit"))


def fill(streams: Streams, counts: dict[str, int]) -> None:
    """Streams that are as long as those were that were read."""
    for name, count in counts.items():
        streams.declare(name)
        streams.fill(name, range(count))


def test_a_replay_of_version_1_is_continued(
    spark: SparkSession, streams: Streams, audit: Folder, tmp_path: Path
) -> None:
    """Both discarded messages were chosen, in parts of one, and one part was sent."""
    shutil.copytree(HERE / "replay-ledger-v1", tmp_path / "ledger")
    choices = Choices(folder=str(tmp_path / "ledger"))
    left = [row["message_id"] for row in without_earlier(failures(spark, audit), choices).collect()]
    assert left == ["m-3"], "what was chosen is not chosen again"
    ledger = choices.unfinished(REPLAY, "localhost:5672/")
    assert ledger is not None
    (row,) = remaining_of(spark, ledger).collect()
    assert (row["message_id"], row["queue"], row["stream"], row["offset"], row["part"]) == (
        *("m-2", "orders", TAPS["delivered"], 2),
        1,
    )
    fill(streams, {TAPS["delivered"]: 2})
    for number in (2, 3):
        streams.fill(TAPS["delivered"], ["the body"], message_id=f"m-{number}")
    streams.channel.queue_declare("orders", durable=True, arguments={"x-queue-type": "quorum"})
    way = ReplayRun(url=streams.vhost.url, run="again")
    assert [(row["part"], row["sent"]) for row in send(spark, ledger, way).collect()] == [(1, 1)]
    assert [one.message_id for one in drain(streams.vhost.url, "orders", 1)] == ["m-2"]
    assert choices.unfinished(REPLAY, "localhost:5672/") is None


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["spark", "local"])
def test_an_audit_of_version_2_is_continued(spark: SparkSession, streams: Streams, audit: Folder, engine: str) -> None:
    """What was interrupted is done, and what streams have more is read, from the positions in Spark's checkpoints."""
    assert audit.noted_rows() == 2
    assert audit.unfinished_work()
    fill(streams, {TAPS["scheduled"]: 5, TAPS["delivered"]: 5, EVENTS: 5})
    facts_of = {row["message_id"]: row for row in audit.read(spark, "delivered", facts.SCHEMAS["delivered"]).collect()}
    due = int(facts_of["m-3"]["due"].timestamp() * 1_000)
    event = {"event": "processed", "endpoint": "shop", "queue": "orders", "message_id": "m-3", "attempt": 2, "due": due,
             "started": due + 60_000, "ended": due + 60_001}  # fmt: skip
    streams.fill(EVENTS, [json.dumps(event)])
    done = run(
        spark if engine == "spark" else None,
        Sources(
            url=streams.vhost.url,
            scheduled={TAPS["scheduled"]: "clock"},
            delivered={TAPS["delivered"]: "clock"},
            events=[EVENTS],
            port=stream_port(streams.vhost.broker),
        ),
        audit,
    )
    assert dict(done.rows) == {"scheduled": 0, "delivered": 1, "processed": 2, "failed": 0}
    assert (audit.version, audit.exists(audit.path("_checkpoint"))) == (3, False)
    assert (done.days, done.pending, audit.notes(), bool(audit.unfinished_work())) == (1, 0, [], False)
    found = spark.read.parquet(audit.location("messages")).orderBy("message_id").collect()
    assert [(row["message_id"], row["outcome"], row["attempts"]) for row in found] == [
        ("m-0", "processed", 1),
        ("m-1", "discarded", 1),
        ("m-2", "discarded", 1),
        ("m-3", "processed", 2),
        ("m-4", "processed", 1),
    ]
    counted = {
        table: spark.read.parquet(audit.location(table)).selectExpr("sum(count) as count").collect()[0]["count"]
        for table in ("lateness", "failures", "pending")
    }
    assert counted == {"lateness": 5, "failures": 3, "pending": None}
