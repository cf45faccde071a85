"""``bide.integrations.celery`` with real Celery workers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from amqp.exceptions import NotFound

import bide
from bide.admin.apply import exists
from bide.errors import InvalidInputError, InvalidNameError, NoGateAnswerError
from bide.integrations.celery import CeleryApp
from bide.topology import Exchange, Topology
from tests.acceptance.test_cli import Program
from tests.broker.receiving import connected, eventually, receive
from tests.broker.schedule_log import gating
from tests.broker.workers import killed_at_the_end
from tests.support import Vhost
from tests.timeouts import TIMEOUT

PROJECT = Path(__file__).parent / "celery_project"

CHECKS = 12

BEFORE = "from celery import Celery\n"
AFTER = "from bide.integrations.celery import CeleryApp as Celery\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The project's files, and a folder for its results."""
    for file in ("tasks.py", "check.py"):
        (tmp_path / file).write_text((PROJECT / file).read_text())
    (tmp_path / "results").mkdir()
    return tmp_path


def adopt(folder: Path, name: str = "tasks.py") -> None:
    """Change one line of the project."""
    text = (PROJECT / "tasks.py").read_text()
    assert text.count(BEFORE) == 1
    (folder / name).write_text(text.replace(BEFORE, AFTER))


@asynccontextmanager
async def running(folder: Path, url: str, *arguments: str, log: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process with children of its own, all ended at the end."""
    environment = {
        **os.environ,
        "CELERY_BROKER_URL": url,
        "RESULTS": str(folder / "results"),
        "TIMEOUT": str(TIMEOUT),
        "PYTHONUNBUFFERED": "1",
    }
    with (folder / log).open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            cwd=folder,
            env=environment,
            start_new_session=True,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
        )
    async with killed_at_the_end(process):
        yield process


@asynccontextmanager
async def worker(folder: Path, url: str, pool: str, *, app: str = "tasks") -> AsyncIterator[None]:
    """A worker that is ready."""
    options = ["--pool", pool, "--concurrency", "3", "--without-mingle", "--without-gossip", "--loglevel", "info"]
    log = f"worker-{app}.log"
    async with running(folder, url, "-m", "celery", "-A", app, "worker", *options, log=log) as process:

        async def is_ready() -> bool:
            assert process.returncode is None, (folder / log).read_text()
            return " ready." in (folder / log).read_text()

        await eventually(is_ready)
        yield


async def check(folder: Path, url: str) -> str:
    """The output of the project's checks."""
    async with asyncio.timeout(3 * TIMEOUT), running(folder, url, "check.py", log="check.log") as process:
        await process.wait()
    output = (folder / "check.log").read_text()
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize("pool", ["prefork", pytest.param("threads", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "adopted", [pytest.param(False, marks=pytest.mark.long, id="before"), pytest.param(True, id="after")]
)
async def test_a_project_passes_its_checks_before_and_after_one_changed_line(
    folder: Path, vhost_url: str, pool: str, adopted: bool
) -> None:
    if adopted:
        adopt(folder)
    async with worker(folder, vhost_url, pool):
        output = await check(folder, vhost_url)
        if adopted:
            await check_retries_of_a_clients_task(folder, vhost_url)
    assert output.count("passed") == CHECKS
    async with connected(vhost_url) as connection:
        assert await exists(connection, Topology([Exchange("bide.v1.delivery")])) is adopted
        assert await exists(connection, Topology([Exchange("celery_delayed_27")])) is not adopted


def logs_of(folder: Path) -> str:
    """What the workers logged."""
    return "\n".join(one.read_text() for one in folder.glob("worker-*.log"))


async def facts_of(folder: Path, task_id: str) -> dict[str, Any]:
    """The facts of a task, when its last run has written them."""
    file = folder / "results" / f"facts-{task_id}.json"

    async def is_written() -> bool:
        return await asyncio.to_thread(file.exists)

    try:
        await eventually(is_written)
    except AssertionError as error:
        raise AssertionError(logs_of(folder)) from error
    result: dict[str, Any] = json.loads(file.read_text())
    return result


async def check_retries_of_a_clients_task(folder: Path, url: str) -> None:
    """A task from bide's client, straight to a queue: the worker gets it from an exchange of the infrastructure."""
    task_id = str(uuid.uuid4())
    headers = {"task": "persist", "id": task_id, "lang": "py"}
    async with bide.connect(url) as client:
        await client.publish(json=[[[0, 0.5], []], {}, {}], headers=headers, to="safe", delay="500ms", priority=3)
    facts = await facts_of(folder, task_id)
    assert len(facts["runs"]) == 3
    assert (facts["exchange"], facts["routing_key"]) == ("", "safe")
    assert facts["runs"][2] >= facts["runs"][1] + 0.5


@pytest.mark.parametrize(
    "adopted", [pytest.param("sender"), pytest.param("worker", marks=pytest.mark.long)], ids="only the {}".format
)
async def test_sides_with_and_without_the_adapter_work_together(folder: Path, vhost_url: str, adopted: str) -> None:
    """As while a new version is rolled out, or rolled back. Retries of the worker return to their queue."""
    (folder / "other.py").write_text((folder / "tasks.py").read_text())
    if adopted == "worker":
        # Native delayed delivery of the senders needs what an earlier worker declared.
        async with worker(folder, vhost_url, "prefork"):
            pass
    adopt(folder, "tasks.py" if adopted == "sender" else "other.py")
    async with worker(folder, vhost_url, "prefork", app="other"):
        output = await check(folder, vhost_url)
    assert output.count("passed") == CHECKS


SEND = """
from {app} import write
for _ in range(3):
    print(write.apply_async(countdown=3).id)
"""


async def delayed_by(app: str, folder: Path, url: str) -> list[str]:
    """The ids of tasks that an application delays."""
    log = f"send-{app}.log"
    async with asyncio.timeout(TIMEOUT), running(folder, url, "-c", SEND.format(app=app), log=log) as process:
        await process.wait()
    output = (folder / log).read_text()
    assert process.returncode == 0, output
    return output.split()


async def ran(folder: Path, tasks: list[str], *, exchange: str) -> None:
    """Wait until these tasks have run. None of them was early, and all came from this exchange."""
    for task_id in tasks:
        facts = await facts_of(folder, task_id)
        assert facts["at"] >= datetime.fromisoformat(facts["eta"]).timestamp() - 0.001
        assert facts["exchange"] == exchange


def successes(log: Path) -> int:
    """How many tasks a worker has run."""
    return log.read_text().count(" succeeded in ")


def has_run(vhost: Vhost, log: Path, count: int) -> Callable[[], Awaitable[bool]]:
    """Whether a worker has run this many tasks, and acknowledged them. More are an error.

    Celery acknowledges a moment after the run. A worker that is killed before that leaves the task to the next one.
    """
    options = ("-p", vhost.name, "--silent", "--no-table-headers", "messages_unacknowledged")

    async def is_so() -> bool:
        assert successes(log) <= count, "a task ran twice"
        listed = await asyncio.to_thread(vhost.broker.rabbitmqctl, "list_queues", *options)
        return successes(log) == count and set(listed.split()) == {"0"}

    return is_so


NATIVE = "celery_delayed_delivery"


async def destroyed(program: Program, *layout: str) -> str:
    """The output of a command that deletes an infrastructure, once that is empty.

    A queue still counts messages that it has passed on, until their new queue has confirmed them.
    """
    printed = ""

    async def is_done() -> bool:
        nonlocal printed
        done = await asyncio.to_thread(program.run, "delay", "destroy", *layout, "--yes")
        printed = done.stdout.decode()
        return done.returncode == 0

    await eventually(is_done)
    return printed


@pytest.mark.long
async def test_queues_of_both_sides_are_drained_and_deleted_after_rolling_out_and_back(
    folder: Path, vhost: Vhost
) -> None:
    """Tasks wait in the other side's queues while the worker is replaced, and each runs once."""
    adopt(folder, "adapted.py")
    program, url = Program(vhost), vhost.url
    async with worker(folder, url, "threads"):
        pass
    native = await delayed_by("tasks", folder, url)

    async with worker(folder, url, "threads", app="adapted"):
        adapted = await delayed_by("adapted", folder, url)
        await ran(folder, native, exchange=NATIVE)
        await ran(folder, adapted, exchange="post")
        assert "28 queues deleted, with 0 messages" in await destroyed(program, "--layout", "celery")
        await ran(folder, await delayed_by("adapted", folder, url), exchange="post")
        await eventually(has_run(vhost, folder / "worker-adapted.log", 9))
    adapted = await delayed_by("adapted", folder, url)

    async with worker(folder, url, "threads"):
        native = await delayed_by("tasks", folder, url)
        await ran(folder, native, exchange=NATIVE)
        await ran(folder, adapted, exchange="post")
        assert "deleted, with 0 messages" in await destroyed(program)
        await ran(folder, await delayed_by("tasks", folder, url), exchange=NATIVE)
        await eventually(has_run(vhost, folder / "worker-tasks.log", 9))
    async with connected(url) as connection:
        assert not await exists(connection, Topology([Exchange("bide.v1.delivery")]))


async def test_revoke_cancels_a_keyed_task_while_it_waits(vhost_url: str, tmp_path: Path) -> None:
    app = CeleryApp("tests", broker=vhost_url, set_as_current=False)
    app.conf.update(task_default_queue="work", task_ignore_result=True, bide_keyed=True)
    async with bide.connect(vhost_url) as client, gating(vhost_url, tmp_path / "gate"):

        def send(label: str, countdown: float) -> str:
            options: dict[str, Any] = {"priority": 3, "expiration": 3600, "delivery_mode": "transient"}
            result = app.send_task("remind", [label], countdown=countdown, keyed=True, **options)
            return str(result.id)

        revoked = await asyncio.to_thread(send, "revoked", 3600)
        ran = await asyncio.to_thread(send, "ran", 3)
        waiting = await client.scheduled(revoked)
        assert waiting is not None
        await asyncio.to_thread(app.control.revoke, revoked)
        assert await client.scheduled(revoked) is None
        (message,) = await receive(client, "work", 1)
        assert (message.json()[0], message.headers["id"], message.key) == (["ran"], ran, ran)
        assert (message.exchange, message.raw.exchange, message.raw.routing_key) == ("", "", "work")
        assert datetime.now(UTC) >= datetime.fromisoformat(message.headers["eta"])
        assert [message.raw.values[name] for name in ("priority", "expiration", "delivery_mode")] == [3, "3600000", 1]

        await asyncio.to_thread(app.control.revoke, ["unknown", ran])

        another = await asyncio.to_thread(send, "another", 3600)
        with pytest.raises(InvalidNameError, match="control characters"):
            await asyncio.to_thread(app.control.revoke, ["not a key\n", another])
        assert await client.scheduled(another) is None, "the first error ended the revoke"
    await asyncio.to_thread(app.amqp.keyed.client.close)
    app.close()


@pytest.mark.long
async def test_revoke_cancels_all_tasks_though_no_gate_answers(vhost_url: str, tmp_path: Path) -> None:
    app = CeleryApp("tests", broker=vhost_url, set_as_current=False)
    app.conf.update(task_default_queue="work", task_ignore_result=True, bide_keyed=True)
    async with gating(vhost_url, tmp_path / "gate"):
        sent = [await asyncio.to_thread(app.send_task, "remind", countdown=3600, keyed=True) for _ in range(2)]
    with pytest.raises(NoGateAnswerError):
        await asyncio.to_thread(app.control.revoke, [one.id for one in sent])
    async with bide.connect(vhost_url) as client, gating(vhost_url, tmp_path / "gate"):
        assert await client.count_scheduled() == 0
    await asyncio.to_thread(app.amqp.keyed.client.close)
    app.close()


def test_keyed_tasks_have_to_be_allowed(vhost_url: str) -> None:
    app = CeleryApp("tests", broker=vhost_url, set_as_current=False)
    with pytest.raises(InvalidInputError, match="bide_keyed"):
        app.send_task("remind", countdown=3, keyed=True)
    app.close()


async def test_a_deleted_infrastructure_is_declared_again(vhost_url: str) -> None:
    """The task that finds it missing is an error to its sender, and the next one is delayed."""
    app = CeleryApp("tests", broker=vhost_url, set_as_current=False)
    app.conf.update(task_default_queue="work", task_ignore_result=True)
    app.conf.broker_transport_options = {"confirm_publish": True}

    def send(label: str) -> None:
        app.send_task("remind", [label], countdown=1)

    await asyncio.to_thread(send, "before")
    async with bide.connect(vhost_url) as client:
        assert [one.json()[0] for one in await receive(client, "work", 1)] == [["before"]]
        await client.destroy(bide.Clock().core_topology(), force=True)
        with pytest.raises(NotFound, match="NOT_FOUND"):
            await asyncio.to_thread(send, "lost")
        await asyncio.to_thread(send, "after")
        assert [one.json()[0] for one in await receive(client, "work", 1)] == [["after"]]
    app.close()
