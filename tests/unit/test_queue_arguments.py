from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bide.topology import Queue, Topology
from bide.topology.queue_arguments import RULES
from bide.topology.validation import problems

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bide.topology import Argument
    from bide.topology.queue_arguments import Release

DEAD_LETTERS: dict[str, Argument] = {"x-dead-letter-exchange": "amq.fanout"}


def of_queue(arguments: Mapping[str, Argument], release: Release | None = None) -> list[str]:
    return problems(Topology(queues=[Queue("q", arguments=arguments)]), release=release)


# --- which type takes what

RIGHT: dict[str, list[Argument]] = {
    "x-queue-type": ["classic", "quorum", "stream"],
    "x-expires": [1, 315_360_000_000],
    "x-message-ttl": [0, 1, 315_360_000_000],
    "x-dead-letter-exchange": ["amq.fanout", ""],
    "x-dead-letter-routing-key": ["", "q", "k" * 255],
    "x-dead-letter-strategy": ["at-most-once", "at-least-once"],
    "x-max-length": [0, 1, 2**63 - 1],
    "x-max-length-bytes": [0, 10**12],
    "x-max-in-memory-length": [0],
    "x-max-in-memory-bytes": [0],
    "x-max-priority": [1, 255],
    "x-overflow": ["drop-head", "reject-publish"],
    "x-queue-mode": ["default", "lazy"],
    "x-queue-version": [2],
    "x-queue-master-locator": ["client-local", "random", "min-masters"],
    "x-queue-leader-locator": ["client-local", "balanced"],
    "x-single-active-consumer": [True, False],
    "x-quorum-initial-group-size": [1, 5],
    "x-delivery-limit": [-1, 0, 20],
    "x-delayed-retry-type": ["disabled", "all", "failed", "returned"],
    "x-delayed-retry-min": [1],
    "x-delayed-retry-max": [60_000],
    "x-consumer-disconnected-timeout": [0, 60_000],
    "x-consumer-timeout": [0, 60_000],
    "x-member-placement-tag": ["zone-a"],
    "x-max-age": ["1s", "7D", "12h", "1Y", "3M", "5m", "007D"],
    "x-stream-max-segment-size-bytes": [0, 3_000_000_000],
    "x-stream-filter-size-bytes": [16, 255],
    "x-initial-cluster-size": [1],
}
WRONG: dict[str, list[Argument]] = {
    "x-queue-type": ["Quorum", "", 1],
    "x-expires": [0, -1, 315_360_000_001, "1000", 1.5, True],
    "x-message-ttl": [-1, 315_360_000_001, "1000", 1.0, False],
    "x-dead-letter-exchange": [5],
    "x-dead-letter-routing-key": [5, "k" * 256],
    "x-dead-letter-strategy": ["exactly-once", 1],
    "x-max-length": [-1, 2**63, "5"],
    "x-max-length-bytes": [-1, "1GB"],
    "x-max-in-memory-length": [-1],
    "x-max-in-memory-bytes": [-1],
    "x-max-priority": [0, -1, 256, "10"],
    "x-overflow": ["reject", 1],
    "x-queue-mode": ["eager"],
    "x-queue-version": [0, 3, "2"],
    "x-queue-master-locator": ["balanced"],
    "x-queue-leader-locator": ["anywhere", 1],
    "x-single-active-consumer": [1, "true"],
    "x-quorum-initial-group-size": [0, "3"],
    "x-delivery-limit": ["5", 1.0, True],
    "x-delayed-retry-type": ["linear"],
    "x-delayed-retry-min": [0, "5s"],
    "x-delayed-retry-max": [0, "5s"],
    "x-consumer-disconnected-timeout": [-1],
    "x-consumer-timeout": [-1],
    "x-member-placement-tag": ["", 5],
    "x-max-age": ["7", "0D", "7 D", "7d", "D", "-7D", 7, ""],
    "x-stream-max-segment-size-bytes": [-1, 3_000_000_001],
    "x-stream-filter-size-bytes": [15, 256],
    "x-initial-cluster-size": [0],
}
TAKEN_BY = {
    "classic": """
        x-queue-type x-expires x-message-ttl x-dead-letter-exchange x-dead-letter-routing-key x-max-length
        x-max-length-bytes x-max-priority x-overflow x-queue-mode x-queue-version x-queue-master-locator
        x-queue-leader-locator x-single-active-consumer
    """,
    "quorum": """
        x-queue-type x-expires x-message-ttl x-dead-letter-exchange x-dead-letter-routing-key x-dead-letter-strategy
        x-max-length x-max-length-bytes x-max-in-memory-length x-max-in-memory-bytes x-overflow
        x-queue-leader-locator x-single-active-consumer x-quorum-initial-group-size x-delivery-limit
        x-delayed-retry-type x-delayed-retry-min x-delayed-retry-max x-consumer-disconnected-timeout
        x-consumer-timeout x-member-placement-tag
    """,
    "stream": """
        x-queue-type x-max-length-bytes x-max-age x-stream-max-segment-size-bytes x-stream-filter-size-bytes
        x-initial-cluster-size x-queue-leader-locator
    """,
}
TAKERS = {kind: names.split() for kind, names in TAKEN_BY.items()}
COMPANIONS: dict[str, dict[str, Argument]] = {
    "x-dead-letter-routing-key": DEAD_LETTERS,
    "x-dead-letter-strategy": {**DEAD_LETTERS, "x-overflow": "reject-publish"},
    "x-delayed-retry-type": {"x-delayed-retry-min": 10},
}


def test_the_tables_of_this_test_are_complete() -> None:
    assert RIGHT.keys() == WRONG.keys() == RULES.keys() == {name for names in TAKERS.values() for name in names}


def queue_with(queue_type: str, name: str, value: Argument) -> dict[str, Argument]:
    return {"x-queue-type": queue_type, **COMPANIONS.get(name, {}), name: value}


@pytest.mark.parametrize(
    ("queue_type", "name", "value"),
    [(kind, name, value) for kind, names in TAKERS.items() for name in names for value in RIGHT[name]],
)
def test_valid_values_are_accepted(queue_type: str, name: str, value: Argument) -> None:
    assert of_queue(queue_with(queue_type, name, value)) == []


@pytest.mark.parametrize(
    ("queue_type", "name", "value"),
    [(kind, name, value) for kind, names in TAKERS.items() for name in names for value in WRONG[name]],
)
def test_invalid_values_are_refused(queue_type: str, name: str, value: Argument) -> None:
    found = of_queue(queue_with(queue_type, name, value))

    assert found
    assert all(one.startswith(f"queue 'q': {name} is ") for one in found)
    assert repr(value) in found[0]
    assert "but must be" in found[0] or "64 bits" in found[0]


@pytest.mark.parametrize(
    ("queue_type", "name"),
    [(kind, name) for kind, names in TAKERS.items() for name in RULES if name not in names],
)
def test_arguments_of_other_queue_types_are_refused(queue_type: str, name: str) -> None:
    found = of_queue({**COMPANIONS.get(name, {}), name: RIGHT[name][0], "x-queue-type": queue_type})

    assert any(
        one.startswith(f"queue 'q': {name} is for ") and one.endswith("remove it, or change x-queue-type")
        for one in found
    )


def test_unknown_arguments_are_accepted() -> None:
    assert of_queue({"x-unknown": 5}) == []


# --- by release


@pytest.mark.parametrize(
    ("arguments", "too_old", "new_enough", "words"),
    [
        (
            {"x-queue-leader-locator": "balanced"},
            (3, 13, 7),
            (4, 0, 0),
            "on classic queues needs RabbitMQ 4.0 or later",
        ),
        (
            {"x-queue-type": "quorum", "x-delayed-retry-type": "all", "x-delayed-retry-min": 5},
            (4, 2, 9),
            (4, 3, 0),
            "needs RabbitMQ 4.3 or later, and the broker is 4.2.9",
        ),
        ({"x-queue-type": "stream", "x-stream-filter-size-bytes": 16}, (3, 12), (3, 13), "needs RabbitMQ 3.13"),
        ({"x-queue-type": "quorum", "x-delivery-limit": -1}, (3, 13), (4, 0), "means no limit only from RabbitMQ 4.0"),
        ({"x-queue-version": 1}, (4, 3), (4, 2, 9), "do not support"),
    ],
)
def test_arguments_are_refused_before_their_release(
    arguments: dict[str, Argument], too_old: Release, new_enough: Release, words: str
) -> None:
    assert of_queue(arguments) == []
    assert of_queue(arguments, new_enough) == []
    assert words in of_queue(arguments, too_old)[0]


# --- combinations

AT_LEAST_ONCE: dict[str, Argument] = {"x-queue-type": "quorum", "x-dead-letter-strategy": "at-least-once"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x-dead-letter-routing-key": "k"}, ["x-dead-letter-routing-key is 'k' without x-dead-letter-exchange"]),
        ({**AT_LEAST_ONCE, **DEAD_LETTERS}, ["x-overflow 'drop-head', which makes it at-most-once"]),
        ({**AT_LEAST_ONCE, **DEAD_LETTERS, "x-overflow": "drop-head"}, ["set x-overflow to 'reject-publish'"]),
        ({**AT_LEAST_ONCE, "x-overflow": "reject-publish"}, ["without x-dead-letter-exchange: add the exchange"]),
        (AT_LEAST_ONCE, ["without x-dead-letter-exchange", "which makes it at-most-once"]),
        (
            {"x-queue-type": "quorum", "x-overflow": "reject-publish-dlx"},
            ["which quorum queues treat like 'drop-head'"],
        ),
        ({"x-queue-type": "quorum", "x-delayed-retry-type": "failed"}, ["without x-delayed-retry-min"]),
        (
            {"x-queue-type": "quorum", "x-delayed-retry-min": 6, "x-delayed-retry-max": 5},
            ["x-delayed-retry-max is 5, less than x-delayed-retry-min, which is 6"],
        ),
        ({"alternate-exchange": "amq.fanout"}, ["alternate-exchange is for exchanges"]),
    ],
)
def test_contradictory_combinations_are_refused(arguments: dict[str, Argument], words: list[str]) -> None:
    found = of_queue(arguments)

    assert len(found) == len(words)
    assert all(word in one for word, one in zip(words, found, strict=True))


@pytest.mark.parametrize(
    "arguments",
    [
        {"x-overflow": "reject-publish-dlx", **DEAD_LETTERS},
        {"x-queue-type": "quorum", "x-dead-letter-strategy": "at-most-once", **DEAD_LETTERS},
        {"x-queue-type": "quorum", "x-delayed-retry-type": "disabled"},
        {"x-queue-type": "quorum", "x-delayed-retry-min": 5, "x-delayed-retry-max": 5},
    ],
)
def test_valid_combinations_are_accepted(arguments: dict[str, Argument]) -> None:
    assert of_queue(arguments) == []
