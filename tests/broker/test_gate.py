"""A gate delivers scheduled messages on a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

import bide
from bide.errors import PublishRefusedError
from bide.gate.question_consumer import QuestionConsumer
from bide.schedules.encoding import encode
from bide.schedules.names import PARTITIONS, partition_of
from bide.schedules.questions import CountQuestion, KeyQuestion, PageQuestion
from bide.schedules.records import ChangeSchedule, Claim, ScheduleFilter
from bide.schedules.recurrence import Recurrence
from bide.topology import Binding, Exchange, Queue, Topology
from tests.broker.receiving import eventually, ready_at, receive
from tests.broker.schedule_log import NAMES, LogClient, gating, log_client, now_ms
from tests.leaks import no_leaks
from tests.readme import read
from tests.support import Vhost


@pytest.fixture(autouse=True)
async def quiet() -> AsyncIterator[None]:
    """A gate may leave neither a task nor an unhandled error behind."""
    async with no_leaks():
        yield


@pytest.fixture
async def client(vhost: Vhost, quiet: None) -> AsyncIterator[bide.Client]:
    """A client, with a target and the schedule log."""
    async with bide.connect(vhost.url) as client:
        await client.declare(NAMES.topology() | Topology(queues=[Queue.quorum("mails")]))
        yield client


@pytest.fixture
async def log(vhost: Vhost, client: bide.Client) -> AsyncIterator[LogClient]:
    """A client of the log."""
    async with log_client(vhost.url) as log:
        yield log


def has_counted(gate: bide.Gate, **numbers: int) -> Callable[[], Awaitable[bool]]:
    """Whether a gate counts these deliveries: their confirms can come after the messages."""

    async def is_so() -> bool:
        return {name: getattr(gate.done, name) for name in numbers} == numbers

    return is_so


async def test_a_message_is_delivered_when_it_is_due_as_it_was_sent(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    async with gating(vhost.url, tmp_path) as gate:
        properties = {"message_id": "m", "correlation_id": "c", "headers": {"list": [1, {"a": None}]}}
        record = await log.add("invoice:42", "q:mails", 1000, body=b"\x00body", properties=properties)
        (message,) = await receive(client, "mails", 1)
        assert now_ms() >= record.due
        await eventually(has_counted(gate, delivered=1))
    assert message.body == b"\x00body"
    values = message.raw.values
    assert (values["message_id"], values["correlation_id"]) == ("m", "c")
    assert values["headers"] == {
        "list": [1, {"a": None}],
        "bide-key": "invoice:42",
        "bide-schedule-id": str(record.request),
        "bide-due": record.due,
        "bide-to": "q:mails",
    }


async def test_a_cancelled_message_is_not_delivered(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    async with gating(vhost.url, tmp_path):
        first = await log.add("invoice:42", "q:mails", 3_600_000, body=b"cancelled")
        answer = await log.change("cancel", "invoice:42")
        assert (answer.outcome, answer.version) == ("cancelled", str(first.request))
        assert (await log.change("cancel", "invoice:42")).outcome == "not-found"
        await log.add("invoice:42", "q:mails", body=b"sent")
        assert [one.body for one in await receive(client, "mails", 1)] == [b"sent"]
        late = await log.change("cancel", "invoice:42")
        assert late.outcome == "too-late"


async def test_a_cancel_that_stands_before_the_gate_starts_counts(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    await log.add("a", "q:mails", body=b"cancelled")
    await log.append(ChangeSchedule(request=log.next_request(partition_of("a")), action="cancel", key="a"))
    await log.add("b", "q:mails", body=b"sent")
    async with gating(vhost.url, tmp_path):
        assert [one.body for one in await receive(client, "mails", 1)] == [b"sent"]
    assert await ready_at(vhost.url, "mails") == 0


async def test_what_waits_is_replaced_moved_paused_and_run(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    await log.add("paused", "q:mails", 1000, body=b"paused")
    pause = ChangeSchedule(request=log.next_request(partition_of("paused")), action="pause", key="paused")
    # Before the gate starts, so that no gate can deliver the message first.
    await log.append(pause)
    async with gating(vhost.url, tmp_path):
        await log.add("replaced", "q:mails", 3_600_000, body=b"old")
        await log.add("replaced", "q:mails", 3_600_000, body=b"new")
        assert (await log.change("move", "replaced", due=now_ms())).outcome == "moved"
        assert [one.body for one in await receive(client, "mails", 1)] == [b"new"]

        assert (await log.call(pause)).outcome == "paused"
        await log.add("other", "q:mails", 1500, body=b"other")
        assert [one.body for one in await receive(client, "mails", 1)] == [b"other"]
        assert (await log.change("resume", "paused", at=now_ms())).outcome == "resumed"
        assert [one.body for one in await receive(client, "mails", 1)] == [b"paused"]

        await log.add("now", "q:mails", 3_600_000, body=b"now")
        assert (await log.change("run-now", "now")).outcome == "running"
        assert [one.body for one in await receive(client, "mails", 1)] == [b"now"]


async def test_conditions_are_answered(log: LogClient, vhost: Vhost, tmp_path: Path) -> None:
    async with gating(vhost.url, tmp_path):
        first = await log.add("a", "q:mails", 3_600_000)
        absent = await log.call(log.add_record("a", "q:mails", 0, if_absent=True))
        assert (absent.outcome, absent.version) == ("exists", str(first.request))
        changed = log.add_record("a", "q:mails", 0, if_version="other-1")
        assert (await log.call(changed)).outcome == "changed"
        assert (await log.call(changed)).outcome == "changed"
        assert (await log.call(log.add_record("a", "q:mails", 3_600_000, if_version=str(first.request)))).outcome == (
            "scheduled"
        )
        # A repeated request gets the first answer, and changes nothing.
        assert (await log.call(changed)).outcome == "changed"


async def test_a_recurring_message_is_delivered_again_and_again_until_it_is_cancelled(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    async with gating(vhost.url, tmp_path):
        every = Recurrence.of("1s", now=datetime.now(UTC))
        record = await log.add("digest", "q:mails", 0, body=b"x", every=every)
        runs = await receive(client, "mails", 3)
        ids = [one.message_id for one in runs]
        assert len(set(ids)) == 3
        assert all(str(one).startswith(f"{record.request}@") for one in ids)
        due = [one.raw.values["headers"]["bide-due"] for one in runs]
        assert due == sorted(due)
        assert (await log.change("cancel", "digest")).outcome == "cancelled"


async def test_filters_change_all_that_match(client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path) -> None:
    keys = [f"invoice:{number}" for number in range(100)]
    async with gating(vhost.url, tmp_path):
        for key in keys:
            await log.add(key, "q:mails", 3_600_000)
        await log.add("other", "q:mails", 3_600_000)
        chosen = ScheduleFilter(prefix="invoice:", target="q:mails")
        answers = [await log.change_all("cancel", one, chosen) for one in range(PARTITIONS)]
        assert {one.outcome for one in answers} == {"cancelled"}
        assert sum(one.count for one in answers) == len(keys)
        assert sorted(key for one in answers for key in one.keys) == sorted(keys)
        left = [await log.ask(CountQuestion(filter=ScheduleFilter()), one) for one in range(PARTITIONS)]
        assert sum(one.count or 0 for one in left) == 1


async def test_questions_see_what_was_confirmed_before(log: LogClient, vhost: Vhost, tmp_path: Path) -> None:
    async with gating(vhost.url, tmp_path):
        for number in range(50):
            record = await log.add("a", "q:mails", 3_600_000, body=b"%d" % number)
            answer = await log.ask(KeyQuestion(key="a"), partition_of("a"))
            assert [one.version for one in answer.waiting] == [str(record.request)]
            assert answer.waiting[0].message.body == b"%d" % number
        page = await log.ask(PageQuestion(filter=ScheduleFilter(prefix="a"), limit=10), partition_of("a"))
        assert [one.key for one in page.waiting] == ["a"]
        # One that cannot be read is ignored, and those behind it are answered.
        await log.channel.publish(exchange=NAMES.operations, routing_key="queries.0", values={}, body=b"?")
        assert (await log.ask(CountQuestion(filter=ScheduleFilter()), 0)).count is not None


async def test_missing_and_forbidden_targets_go_to_the_undeliverable_queue(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    await client.declare(Topology([Exchange("shop", "topic")]))
    forged = encode(Claim(gate="forged", items=()))
    async with gating(vhost.url, tmp_path, allow=["mails", "gone", "shop", "missing", "*schedule*"]) as gate:
        targets = {
            "queue-gone": ("q:gone", "no queue takes"),
            "exchange-gone": ("x:missing", "does not exist"),
            "unrouted": ("x:shop", "no queue takes"),
            "forbidden": ("q:secret", "matches no allowed pattern"),
            "forged": (f"x:{NAMES.gates}", "belongs to the schedule log"),
            "log": (f"q:{NAMES.log(0)}", "belongs to the schedule log"),
            "nonsense": ("nonsense", "neither a queue nor an exchange"),
        }
        for key, (target, _) in targets.items():
            await log.add(key, target, body=forged, routing_key="some.key")
        copies = {"headers": {"CC": ["secret"]}}
        await log.add("copies", "q:mails", properties=copies)
        found = await receive(client, NAMES.undeliverable, len(targets) + 1)
        await log.add("fine", "q:mails")
        await receive(client, "mails", 1)
        await eventually(has_counted(gate, undeliverable=len(targets) + 1))
    headers = {one.raw.values["headers"]["bide-key"]: one.raw.values["headers"] for one in found}
    for key, (target, reason) in targets.items():
        assert reason in headers[key]["bide-set-aside"]
        assert headers[key]["bide-to"] == target
        assert headers[key]["bide-routing-key"] == "some.key"
    assert "secret" in headers["copies"]["bide-set-aside"]


async def test_an_exchange_routes_the_message(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    bound = Topology([Exchange("shop", "topic")], bindings=[Binding("shop", "mails", "order.*")])
    await client.declare(bound, external=["mails"])
    async with gating(vhost.url, tmp_path):
        properties = {"user_id": "someone", "priority": 3}
        await log.add("a", "x:shop", body=b"a", routing_key="order.created", properties=properties)
        (message,) = await receive(client, "mails", 1)
    assert (message.exchange, message.routing_key) == ("shop", "order.created")
    assert message.raw.values["headers"]["bide-user-id"] == "someone"
    assert message.raw.values["priority"] == 3


async def test_a_target_that_refuses_holds_up_no_other(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    full = Queue("full", arguments={"x-queue-type": "quorum", "x-max-length": 1, "x-overflow": "reject-publish"})
    await client.declare(Topology(queues=[full]))
    # Otherwise it takes all that are sent before it says that it is full.
    filled = 0
    with suppress(PublishRefusedError):
        while True:
            await client.publish(b"first", to="full")
            filled += 1
    key = "stuck"
    async with gating(vhost.url, tmp_path) as gate:
        for number in range(30):
            await log.add(f"{key}{number}", "q:full", body=b"%d" % number)
        for number in range(100):
            await log.add(f"mail{number}", "q:mails", body=b"%d" % number)
        await receive(client, "mails", 100)

        async def has_been_refused() -> bool:
            return gate.done.refused > 0

        await eventually(has_been_refused)
        bodies = {one.body for one in await receive(client, "full", filled + 30)}
        await eventually(has_counted(gate, delivered=130))
    assert bodies == {b"first", *(b"%d" % number for number in range(30))}


async def test_a_target_that_confirms_nothing_holds_up_no_other(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    """As a quorum queue without a majority. RabbitMQ would block the whole connection if more were in flight."""
    await client.declare(Topology(queues=[Queue.quorum("silent")]))
    process, count = f"'{vhost.name}_silent'", 3000
    async with gating(vhost.url, tmp_path):
        await asyncio.to_thread(vhost.broker.rabbitmqctl, "eval", f"sys:suspend({process}).")
        for first in range(0, count, 500):
            numbers = range(first, first + 500)
            await asyncio.gather(*(log.add(f"silent{number}", "q:silent", body=b"%d" % number) for number in numbers))
        for _ in range(3):
            await asyncio.gather(*(log.add(f"{number}", "q:mails", body=b"%d" % number) for number in range(100)))
            assert len({one.body for one in await receive(client, "mails", 100)}) == 100
        await asyncio.to_thread(vhost.broker.rabbitmqctl, "eval", f"sys:resume({process}).")
        assert len({one.body for one in await receive(client, "silent", count)}) == count


async def test_thousands_are_cancelled_by_a_filter_and_others_are_on_time_meanwhile(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    count = 4000
    async with gating(vhost.url, tmp_path):
        for first in range(0, count, 500):
            numbers = range(first, first + 500)
            await asyncio.gather(*(log.add(f"invoice:{number}", "q:mails", 3_600_000) for number in numbers))
        cancels = [
            asyncio.create_task(log.change_all("cancel", one, ScheduleFilter(prefix="invoice:")))
            for one in range(PARTITIONS)
        ]
        await log.add("other", "q:mails")
        await receive(client, "mails", 1)
        assert sum([(await one).count for one in cancels]) == count


async def test_many_questions_about_large_lists_hold_up_no_message(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a gate answers all that have arrived before it claims, and again before it delivers."""
    partition, count = partition_of("due"), 150
    answer, at_once = QuestionConsumer.answer, list[int]()

    async def counted(questions: QuestionConsumer, proven_at: float) -> int:
        at_once.append(await answer(questions, proven_at))
        return at_once[-1]

    monkeypatch.setattr(QuestionConsumer, "answer", counted)
    keys = [key for key in (f"k{number}" for number in range(10_000)) if partition_of(key) == partition][:1000]
    async with gating(vhost.url, tmp_path):
        await asyncio.gather(*(log.add(key, "q:mails", 3_600_000) for key in keys))
        question = PageQuestion(filter=ScheduleFilter(), limit=1000)
        answers = [asyncio.create_task(log.ask(question, partition)) for _ in range(count)]
        await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        await log.add("due", "q:mails")
        await receive(client, "mails", 1)
        assert {len((await one).waiting) for one in answers} == {len(keys)}
    # How many in all were answered before the message came depends on how long the broker took to store its claim.
    assert max(at_once) < count // 2


async def test_a_gate_works_with_the_permissions_of_the_documentation(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    patterns = {
        "configure": "^$",
        "write": r"^(bide\.v1\.schedule\.gates|amq\.default)$",
        "read": r"^bide\.v1\.schedule",
    }
    page = read("docs/schedules.md")
    assert all(f"`{one}`" in page for one in patterns.values())
    vhost.broker.add_user("gate", "secret")
    vhost.broker.set_permissions(vhost.name, "gate", **patterns)
    try:
        url = vhost.broker.vhost_url(vhost.name, user="gate", password="secret")
        async with gating(url, tmp_path, allow=["mails", "gone"], retention=1_000_000) as gate:
            assert (await log.change("cancel", "none")).outcome == "not-found"
            await log.add("a", "q:mails")
            await receive(client, "mails", 1)
            for key, target in (("b", "q:gone"), ("c", "q:forbidden")):
                await log.add(key, target)
            await eventually(has_counted(gate, delivered=1, undeliverable=2))
            # After a quarter of the retention, the gate carries the state forward, and frees the room.
            room = f"room.{partition_of('much')}"
            await log.channel.publish(exchange=NAMES.operations, routing_key=room, values={}, body=b"reservation")
            await asyncio.gather(*(log.add("much", "q:mails", 3_600_000, body=bytes(20_000)) for _ in range(20)))

            async def room_is_freed() -> bool:
                if await ready_at(vhost.url, NAMES.room(partition_of("much"))) == 0:
                    return True
                # The room is freed after a snapshot during which little was appended.
                await log.add("much", "q:mails", 3_600_000, body=bytes(20_000))
                return False

            await eventually(room_is_freed, step=1)
    finally:
        vhost.broker.delete_user("gate")
