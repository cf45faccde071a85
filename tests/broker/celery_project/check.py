"""Ten kinds of delayed tasks, sent to a running worker, and what must be true of each."""

# A program as users of Celery write it, and Celery has no type annotations.
# mypy: ignore-errors

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import celery.events  # noqa: F401 (Celery imports it at first use, and threads that do so at once block each other)
from celery import chain, chord, group
from tasks import add, app, facts_file, guard, insist, persist, remind, total, write

TIMEOUT = float(os.environ["TIMEOUT"])
DELAY = 1.5
CLOCK_STEP = 0.001
"""Times in headers have whole milliseconds."""


def value(result: Any) -> Any:
    return result.get(timeout=TIMEOUT, interval=0.05)


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.time() + TIMEOUT
    while not holds():
        assert time.time() < deadline, f"it did not come about that {what}"
        time.sleep(0.05)  # files give no event


def facts_of_last_run(task_id: str) -> dict[str, Any]:
    """The facts of a task that is retried; its result can be replaced by the state of the run before."""
    file = facts_file(task_id)
    wait_until(file.exists, "a task has had its last run")
    return json.loads(file.read_text())


def not_early(sent_at: float, seconds: float, facts: dict[str, Any]) -> None:
    assert facts["at"] >= sent_at + seconds - CLOCK_STEP, (facts, sent_at)


def countdown() -> None:
    sent_at = time.time()
    facts = value(remind.apply_async((1,), countdown=DELAY))
    not_early(sent_at, DELAY, facts)
    assert facts["args"] == [1]
    assert datetime.fromisoformat(facts["eta"]).timestamp() >= sent_at + DELAY
    assert facts["exchange"] == ""
    assert facts["routing_key"] == "work"


def fraction_of_a_second() -> None:
    sent_at = time.time()
    not_early(sent_at, 0.05, value(remind.apply_async(countdown=0.05)))


def eta() -> None:
    due = datetime.now(UTC) + timedelta(seconds=DELAY)
    facts = value(remind.apply_async(eta=due))
    not_early(due.timestamp(), 0, facts)
    assert datetime.fromisoformat(facts["eta"]) == due


def retries() -> None:
    """Also retries without a delay, from a queue that is not the default one."""
    sent_at = time.time()
    facts = facts_of_last_run(persist.apply_async(([1, 0, 0.5], []), countdown=1, queue="safe").id)
    first, second, third, fourth = facts["runs"]
    assert first >= sent_at + 1 - CLOCK_STEP
    assert second >= first + 1 - CLOCK_STEP
    assert fourth >= third + 0.5 - CLOCK_STEP
    assert facts["routing_key"] == "safe"


def retries_with_backoff() -> None:
    sent_at = time.time()
    facts = facts_of_last_run(insist.apply_async(countdown=0.5).id)
    not_early(sent_at, 3.5, facts)
    assert facts["retries"] == 2


def chains() -> None:
    sent_at = time.time()
    result = chain(add.s(1, 2), add.s(3).set(countdown=1), remind.s().set(countdown=1)).apply_async(countdown=0.5)
    facts = value(result)
    not_early(sent_at, 2.5, facts)
    assert facts["args"] == [6]


def groups_and_chords() -> None:
    sent_at = time.time()
    header = group(add.s(number, 1).set(countdown=DELAY) for number in range(3))
    numbers, at = value(chord(header)(total.s().set(countdown=1)))
    assert numbers == 6
    assert at >= sent_at + DELAY + 1 - CLOCK_STEP
    assert value(group(add.s(number, 1) for number in range(3)).apply_async(countdown=0.5)) == [1, 2, 3]


def other_queues() -> None:
    """A quorum queue on a direct exchange, and a queue on a topic exchange."""
    sent_at = time.time()
    results = guard.apply_async(countdown=DELAY), write.apply_async(countdown=DELAY)
    safe, letters = map(value, results)
    not_early(sent_at, DELAY, safe)
    not_early(sent_at, DELAY, letters)
    assert (safe["exchange"], safe["routing_key"]) == ("", "safe")


def expiry() -> None:
    in_time = remind.apply_async(countdown=DELAY, expires=DELAY + TIMEOUT)
    # Without the adapter, the broker drops a message that no worker has received when it expires.
    for seconds in (10, 40, 130):
        expired = remind.apply_async(countdown=seconds + 2, expires=seconds)
        dropped_at = time.time() + seconds + 60
        wait_until(
            lambda task=expired, end=dropped_at: task.state == "REVOKED" or time.time() > end,
            "a task that expired is revoked",
        )
        if expired.state == "REVOKED":
            value(in_time)
            return
    raise AssertionError("tasks that expired were not revoked")


def revoking() -> None:
    """Workers remember what was revoked, and discard it when it is due."""
    # A busy worker may hear of it only after the task has run.
    for seconds in (10, 30, 90):
        revoked = remind.apply_async(countdown=seconds)
        revoked.revoke()
        wait_until(lambda task=revoked: task.state in {"REVOKED", "SUCCESS"}, "a task that was revoked is discarded")
        if revoked.state == "REVOKED":
            return
    raise AssertionError("tasks that were revoked have run")


def priorities() -> None:
    facts = value(remind.apply_async(countdown=DELAY, queue="urgent", priority=7))
    # A priority would hold back other tasks in the delay queues of RabbitMQ 4.0 to 4.2.
    assert facts["priority"] == 7 or "bide-priority" in facts["headers"]


def events() -> None:
    """The events name the queue and the due time of the task, not where it waits."""
    seen: dict[str, dict[str, Any]] = {}
    complete, listening = threading.Event(), threading.Event()

    def note(event: dict[str, Any]) -> None:
        if event["uuid"] == task_id:
            seen[event["type"]] = event
            if {"task-sent", "task-received", "task-succeeded"} <= seen.keys():
                complete.set()

    def listen() -> None:
        with app.connection_for_read() as connection:
            receiver = app.events.Receiver(connection, handlers=dict.fromkeys(NAMES, note))
            with receiver.consumer_context() as (consuming, _, _):
                listening.set()
                while not complete.is_set():
                    with suppress(TimeoutError):
                        consuming.drain_events(timeout=1)

    task_id = f"event-{time.time()}"
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    assert listening.wait(TIMEOUT)
    due = datetime.now(UTC) + timedelta(seconds=1)
    remind.apply_async(eta=due, task_id=task_id)
    assert complete.wait(TIMEOUT), seen
    for name in ("task-sent", "task-received"):
        assert datetime.fromisoformat(seen[name]["eta"]) == due
    assert seen["task-sent"]["queue"] == "work"
    assert seen["task-sent"]["routing_key"] == "work"


NAMES = ("task-sent", "task-received", "task-succeeded")

CHECKS: tuple[Callable[[], None], ...] = (
    countdown,
    fraction_of_a_second,
    eta,
    retries,
    retries_with_backoff,
    chains,
    groups_and_chords,
    other_queues,
    expiry,
    revoking,
    priorities,
    events,
)


def main() -> int:
    """Run all checks at the same time, because each of them mostly waits."""
    failed = []

    def run(check: Callable[[], None]) -> None:
        try:
            check()
            print("passed", check.__name__, flush=True)
        except BaseException as error:  # noqa: BLE001 (it is printed, and counted)
            failed.append(check.__name__)
            print("failed", check.__name__, repr(error), flush=True)

    threads = [threading.Thread(target=run, args=(check,)) for check in CHECKS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
