"""View of the operator log: who did what, when, and with what result."""

from __future__ import annotations

from collections import deque
from contextlib import aclosing
from typing import Any, Final

from bide.console.parameters import Parameters
from bide.console.values import iso, json_value
from bide.console.vhost import ConsoleVhost
from bide.error_queues.operator_log import OPERATOR_LOG, OperatorLogRecord, read_operator_log

_MAX_RECORDS: Final = 5_000
"""The maximum number of records that the view uses: the latest ones. All are read."""

_MAX_OPERATIONS: Final = 200
"""The maximum number of operations that the view lists."""


async def history(vhost: ConsoleVhost, _: Parameters) -> dict[str, Any]:
    """The latest operations, each with what was chosen and with its result."""
    malformed: list[bytes] = []
    records = deque[OperatorLogRecord](maxlen=_MAX_RECORDS)
    async with aclosing(read_operator_log(vhost.client, malformed=lambda _: malformed.append(b""))) as found:
        async for one in found:
            records.append(one)
    runs: dict[str, dict[str, Any]] = {}
    for record in records:
        run = runs.setdefault(
            record.run,
            {
                "run": record.run,
                "at": iso(record.at),
                "who": record.who,
                "user": record.user,
                "operation": record.operation,
                "queue": record.queue,
                "state": "begun",
                "ended": None,
                "details": {},
                "result": {},
                "ids": 0,
            },
        )
        if record.step == "ids":
            run["ids"] += len(record.details.get("ids", ()))
        elif record.step == "begun":
            run["details"] = json_value(record.details)
        else:
            run["state"] = record.step
            run["ended"] = iso(record.at)
            run["result"] = json_value(record.details)
    latest = [*reversed(runs.values())][:_MAX_OPERATIONS]
    return {"stream": OPERATOR_LOG, "operations": latest, "malformed": len(malformed)}
