"""View of problems: the findings of ``bide delay verify``, and undeliverable messages."""

from __future__ import annotations

import re
from typing import Any, Final

from bide.admin.apply import message_counts
from bide.admin.verify import verify
from bide.console.parameters import Parameters
from bide.console.vhost import ConsoleVhost
from bide.error_queues.undeliverable import resend as resend_messages
from bide.errors import InvalidInputError
from bide.topology import Queue

_COMMAND: Final = re.compile(r"'((?:bide|rabbitmqctl|rabbitmq-plugins) [^']+)'")
_ORDER: Final = {"problem": 0, "warning": 1, "not checked": 2, "ok": 3}


async def findings(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """The findings of ``bide delay verify``, problems first, each with the commands that its text names."""
    report = await verify(await vhost.connection(), vhost.infrastructure, vhost.api)
    texts = [parameters.advise(one.text) for one in report.findings]
    rows = [
        {**one.to_dict(), "text": text, "commands": _COMMAND.findall(text)}
        for one, text in zip(report.findings, texts, strict=True)
    ]
    rows.sort(key=lambda one: _ORDER[str(one["status"])])
    return {
        "findings": rows,
        "ok": report.ok,
        "layout": report.layout,
        "broker": report.broker,
        "release": report.release,
    }


async def undeliverable(vhost: ConsoleVhost, _: Parameters) -> dict[str, Any]:
    """The undeliverable queues that exist, with their numbers of messages."""
    names = (vhost.infrastructure.undeliverable, vhost.schedules.requests.names.undeliverable)
    counts = await message_counts(await vhost.connection(), [Queue(name) for name in names])
    return {"queues": [{"name": name, "messages": count} for name, count in counts.items()]}


async def resend(vhost: ConsoleVhost, parameters: Parameters) -> dict[str, Any]:
    """Send the messages of an undeliverable queue to their targets, if a pattern allows the target."""
    queue, allow = parameters.required("queue"), parameters.texts("allow")
    if not allow:
        raise InvalidInputError("no target is allowed: give patterns such as orders.*")
    async with vhost.recorded("resend", queue, parameters.operator, {"allow": list(allow)}) as record:
        result = await resend_messages(vhost.client, allow=allow, queue=queue, management_url=vhost.management_url)
        values = {"sent": result.sent, "kept": dict(result.kept)}
        record |= values
    return values
