"""Histories with planted faults, and the promises that they break."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from bide.check.history import UNDELIVERABLE, Row, digest_of
from bide.check.judgement import Verdict
from tests.check_histories import DELIVERED, FAULT, SECOND, SENT

EARLY = replace(DELIVERED, received_at=SENT.due - SECOND)
AGAIN = replace(DELIVERED, received_at=DELIVERED.received_at + SECOND)
LATE = replace(DELIVERED, received_at=SENT.due + 30 * SECOND)
KILLED_GATE = replace(FAULT, kind="kill-process", what="gate-1")
STEP = replace(FAULT, kind="clock-step", clock_step=600 * SECOND)
SCHEDULE = replace(SENT, workload="gate")
NEIGHBOUR = replace(SENT, role="neighbour", workload="isolated")

CASES: Final[dict[str, tuple[list[Row], dict[str, int]]]] = {
    "nothing": ([SENT, DELIVERED], {}),
    "lost": ([SENT], {"lost": 1}),
    "lost although a fault happened": ([SENT, FAULT], {"lost": 1}),
    "in one queue of two": ([SENT, replace(SENT, place="r"), DELIVERED], {"lost": 1}),
    "undeliverable": ([SENT, replace(DELIVERED, place=UNDELIVERABLE)], {}),
    "in doubt and lost": ([replace(SENT, expected="unknown")], {}),
    "in doubt and delivered": ([replace(SENT, expected="unknown"), DELIVERED], {}),
    "early": ([SENT, EARLY], {"early": 1}),
    "early although a node was killed": ([SENT, EARLY, FAULT], {"early": 1}),
    "early within the error of the clock": ([SENT, replace(DELIVERED, received_at=SENT.due - 1_020)], {}),
    "early by a microsecond more": ([SENT, replace(DELIVERED, received_at=SENT.due - 1_021)], {"early": 1}),
    "early by less than the step of a clock": ([SENT, EARLY, STEP], {}),
    "early by more than the step of a clock": (
        [SENT, EARLY, replace(STEP, clock_step=SECOND // 2)],
        {"early": 1},
    ),
    "early by less than the steps of two clocks": (
        [SENT, EARLY, replace(STEP, clock_step=SECOND * 6 // 10), replace(STEP, number=2, clock_step=SECOND // 2)],
        {},
    ),
    "early after the step of a clock": (
        [SENT, EARLY, replace(STEP, began=100 * SECOND, ended=110 * SECOND, settled=120 * SECOND)],
        {"early": 1},
    ),
    "in doubt and early": ([replace(SENT, expected="unknown"), EARLY], {"early": 1}),
    "after the earlier of two due times": (
        [SENT, replace(SENT, due=SENT.due + 60 * SECOND), DELIVERED],
        {},
    ),
    "late": ([SENT, LATE], {"late": 1}),
    "late during a fault": ([SENT, LATE, FAULT], {}),
    "late during an alarm that makes nothing late": ([SENT, LATE, replace(FAULT, late=False)], {"late": 1}),
    "late after a fault": ([SENT, replace(LATE, received_at=FAULT.settled + 6 * SECOND), FAULT], {"late": 1}),
    "late after two faults one after the other": (
        [
            SENT,
            replace(LATE, received_at=100 * SECOND),
            FAULT,
            replace(FAULT, number=2, began=62 * SECOND, ended=70 * SECOND, settled=110 * SECOND),
        ],
        {},
    ),
    "late in a pause between two faults": (
        [
            SENT,
            replace(LATE, received_at=100 * SECOND),
            FAULT,
            replace(FAULT, number=2, began=80 * SECOND, ended=90 * SECOND, settled=110 * SECOND),
        ],
        {"late": 1},
    ),
    "late because its target is full": ([replace(SENT, role="blocked"), LATE], {}),
    "twice": ([SENT, DELIVERED, AGAIN], {"twice": 1}),
    "twice after a fault": ([SENT, DELIVERED, AGAIN, FAULT], {}),
    "twice after a fault between two of its delay queues": (
        [
            replace(SENT, due=115 * SECOND),
            replace(DELIVERED, received_at=115 * SECOND),
            replace(DELIVERED, received_at=116 * SECOND),
            FAULT,
        ],
        {},
    ),
    "twice before a fault": ([SENT, DELIVERED, AGAIN, replace(FAULT, began=17 * SECOND)], {"twice": 1}),
    "twice although only a gate was killed": ([SENT, DELIVERED, AGAIN, KILLED_GATE], {"twice": 1}),
    "a schedule twice after a gate was killed": ([SCHEDULE, DELIVERED, AGAIN, KILLED_GATE], {}),
    "a schedule twice although only a relay was killed": (
        [SCHEDULE, DELIVERED, AGAIN, replace(KILLED_GATE, what="relay-1")],
        {"twice": 1},
    ),
    "twice after a fault that doubles nothing": (
        [SENT, DELIVERED, AGAIN, replace(FAULT, twice=False)],
        {"twice": 1},
    ),
    "redelivered": ([SENT, DELIVERED, replace(AGAIN, redelivered=True)], {}),
    "twice because it was sent twice": ([replace(SENT, attempts=2), DELIVERED, AGAIN], {}),
    "a schedule twice": ([SCHEDULE, DELIVERED, AGAIN], {"twice": 1}),
    "a schedule twice while gates start": ([replace(SCHEDULE, role="blocked"), DELIVERED, AGAIN], {}),
    "refused": ([replace(SENT, expected="nothing")], {}),
    "refused and delivered": ([replace(SENT, expected="nothing"), DELIVERED], {"refused": 1}),
    "another body": ([SENT, replace(DELIVERED, body=digest_of(b"other"))], {"changed": 1}),
    "other headers": ([SENT, replace(DELIVERED, headers=digest_of(b"other"))], {"changed": 1}),
    "another routing key": ([SENT, replace(DELIVERED, routing_key="r")], {"changed": 1}),
    "the second copy changed": (
        [SENT, DELIVERED, replace(AGAIN, redelivered=True, body=digest_of(b"other"))],
        {"changed": 1},
    ),
    "in another queue": ([SENT, DELIVERED, replace(DELIVERED, place="r")], {"strange": 1}),
    "never sent": ([replace(DELIVERED, id="m2")], {"strange": 1}),
    "a schedule that was cancelled and delivered": (
        [replace(SCHEDULE, expected="nothing"), DELIVERED],
        {"schedules": 1},
    ),
    "a schedule that was neither": ([SCHEDULE], {"schedules": 1}),
    "an answer that cannot be": ([replace(SCHEDULE, expected="impossible"), DELIVERED], {"schedules": 1}),
    "a late neighbour": ([NEIGHBOUR, LATE], {"neighbours": 1}),
    "a lost neighbour": ([NEIGHBOUR], {"neighbours": 1}),
    "a neighbour on time": ([NEIGHBOUR, DELIVERED], {}),
}
"""Rows of a history, and the number of violations of each promise."""


def found(verdict: Verdict) -> dict[str, int]:
    """The number of violations of each promise that was broken."""
    return {one.rule: one.violations for one in verdict.findings if one.violations}
