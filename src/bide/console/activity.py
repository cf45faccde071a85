"""View of who did what: the operator log."""

from __future__ import annotations

from collections import deque
from contextlib import aclosing
from typing import Any, Final

from bide.console.asked import Asked
from bide.console.site import Site
from bide.console.values import iso, plain
from bide.error_queues.operator_log import AUDIT, AuditRecord, read_audit

_RECORDS: Final = 5_000
"""Records that are read, the latest ones."""

_RUNS: Final = 200


async def history(site: Site, _: Asked) -> dict[str, Any]:
    """The latest operations, each with its beginning and its end."""
    malformed: list[bytes] = []
    records = deque[AuditRecord](maxlen=_RECORDS)
    async with aclosing(read_audit(site.client, malformed=lambda _: malformed.append(b""))) as found:
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
            run["details"] = plain(record.details)
        else:
            run["state"] = record.step
            run["ended"] = iso(record.at)
            run["result"] = plain(record.details)
    latest = [*reversed(runs.values())][:_RUNS]
    return {"stream": AUDIT, "operations": latest, "malformed": len(malformed)}
