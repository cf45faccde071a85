"""What clients and consumers saw, compared with the log as the judge of the model reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bide.errors import PublishError, ScheduleLogError, UnsentError
from bide.schedules.names import partition_of
from tests.schedule_model.judge import Verdict, read
from tests.schedule_simulation.world import NAMES, World

_UNSEEN = 20


def judge_answers(world: World) -> Iterator[str]:
    """Compare the answers with the log."""
    expected = {request: answer for one in world.verdicts for request, answer in one.answers.items()}
    repeated = {request for one in world.verdicts for request in one.repeats}
    for one in world.operations:
        if one.what == "look":
            continue
        if one.error is not None:
            certain = type(one.error) is PublishError or isinstance(one.error, ScheduleLogError | UnsentError)
            # An operation with a filter may be in the logs of other partitions than the one that refused it.
            if certain and len(one.requests) == 1 and one.requests[0] in expected:
                yield f"{one.what} of {one.key} is in the log, and raised {one.error!r}"
            continue
        for request in one.requests:
            if request not in expected:
                yield f"{one.what} of {one.key} is not in the log: {one.result}"
        if len(one.requests) == 1 and one.requests[0] in expected:
            request, given = one.requests[0], one.result
            wanted = expected[request]
            outcome = given.outcome.value
            if outcome == "forgotten" and request in repeated:
                continue
            if outcome in ("too-late", "not-found"):
                shown: tuple[Any, ...] = (outcome,)
            else:
                shown = (outcome, given.version)
            if shown != wanted and (shown, wanted) != (("not-found",), ("too-late",)):
                yield f"{one.what} of {one.key} was answered {shown}, and the log says {wanted}"
        elif len(one.requests) > 1:
            # The result says which partitions have forgotten what a repeated request changed.
            unknown = {
                request
                for number in one.result.forgotten
                for request in world.verdicts[number].answers
                if request in repeated
            }
            known = [request for request in one.requests if request in expected and request not in unknown]
            keys = sorted(key for request in known for key in expected[request][1])
            if tuple(keys) != one.result.keys:
                yield f"{one.what} of {one.key} was answered {one.result.keys}, and the log says {keys}"


def judge_deliveries(world: World) -> Iterator[str]:
    """Compare what consumers received with the log."""
    lives = {occurrence: life for one in world.verdicts for occurrence, life in one.lives.items()}
    delivered = dict[str, str]()
    for one in world.received:
        occurrence = one.schedule if one.schedule in lives else str(one.message_id)
        life = lives.get(occurrence)
        if life is None:
            yield f"{occurrence} was delivered, and the log does not know it"
            continue
        delivered[occurrence] = one.queue
        is_set_aside = one.queue == NAMES.undeliverable
        if life.fate not in ("under way", "delivered", "undeliverable"):
            yield f"{occurrence} is {life.fate} by the log, and was delivered"
        elif one.at < life.due:
            yield f"{occurrence} was delivered {life.due - one.at} ms early"
        elif one.body != life.body:
            yield f"{occurrence} was delivered with the message of another"
        elif is_set_aside != (life.target in ("q:gone", "q:foreign")):
            yield f"{occurrence} for {life.target} came to {one.queue}"
    paused = {entry["occurrence"] for one in world.verdicts for entry in one.waiting.values() if entry["paused"]}
    for occurrence, life in lives.items():
        if occurrence in paused:
            continue
        if life.fate in ("delivered", "undeliverable") and occurrence not in delivered:
            yield f"{occurrence} is {life.fate} by the log, and was not received"
        elif life.fate == "waiting" or (life.fate == "under way" and life.target != "q:stuck"):
            yield f"{occurrence} never came"


def judge_looks(world: World) -> Iterator[str]:
    """Compare a client's view of a key with what waited there at some time from question to answer."""
    looks = [one for one in world.operations if one.what == "look" and one.error is None]
    versions: dict[str, list[tuple[int, str | None]]] = {one.key: [(0, None)] for one in looks}
    verdicts = [Verdict() for _ in world.verdicts]
    for number, (partition, exchange, body) in enumerate(world.history, 1):
        read(verdicts[partition], exchange, body, partition, len(verdicts))
        for key, known in versions.items():
            if partition_of(key) == partition:
                entry = verdicts[partition].waiting.get(key)
                version = None if entry is None else entry["version"]
                if version != known[-1][1]:
                    known.append((number, version))
    for one in looks:
        shown = None if one.result is None else one.result.version
        known = versions[one.key]
        ends = [since for since, _ in known[1:]] + [len(world.history) + 1]
        # The last records may not have been written down yet when the answer came.
        possible = {
            version
            for (since, version), end in zip(known, ends, strict=True)
            if since <= one.ended + _UNSEEN and end > one.begun
        }
        if shown not in possible:
            yield f"the version of {one.key} was answered {shown}, and the log says {sorted(map(str, possible))}"
