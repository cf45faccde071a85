"""Findings of a verification."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "problem", "not checked"]

Check = Literal[
    "release",
    "feature flags",
    "management API",
    "exchanges",
    "queues",
    "bindings",
    "policies",
    "protection",
    "replication",
    "leaders",
    "node releases",
    "node clocks",
    "consumers",
    "relays",
    "targets",
    "delivery limits",
    "guard",
    "cross-delivery",
    "NServiceBus targets",
    "taps",
    "stuck messages",
    "undeliverable messages",
    "schedule log",
    "schedule policies",
    "schedule replication",
    "schedule leaders",
    "gates",
    "gate clocks",
    "dead-letter prefetch",
    "senders",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check, or one of the problems that it found.

    Attributes:
        text: for a problem or a warning, what is wrong and how to fix it; for an item that was not checked, why not.
    """

    check: Check
    status: Status
    text: str

    def to_dict(self) -> dict[str, str]:
        """The finding as ``--json`` prints it."""
        return {"check": self.check, "status": self.status, "text": self.text}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Everything that a verification found, in the order of the checks.

    Attributes:
        layout: the name of the delay infrastructure's layout.
        broker: the broker's host and port.
        release: the broker's release, such as ``4.3.6``.
    """

    layout: str
    broker: str
    vhost: str
    release: str
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that are problems."""
        return tuple(one for one in self.findings if one.status == "problem")

    @property
    def ok(self) -> bool:
        """Whether no problem was found. Warnings and unchecked items are not problems."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The report as ``--json`` prints it."""
        return {
            "ok": self.ok,
            "layout": self.layout,
            "broker": self.broker,
            "vhost": self.vhost,
            "release": self.release,
            "findings": [one.to_dict() for one in self.findings],
        }


def judged(check: Check, problems: Iterable[str], fine: str) -> list[Finding]:
    """One finding per problem, or one finding that the check passed."""
    found = [Finding(check=check, status="problem", text=text) for text in problems]
    return found or [Finding(check=check, status="ok", text=fine)]


def warned(check: Check, text: str) -> Finding:
    """The finding of a setting that works but should be changed."""
    return Finding(check=check, status="warning", text=text)


def unchecked(check: Check, why: str) -> Finding:
    """The finding of a check that was not possible."""
    return Finding(check=check, status="not checked", text=why)


def listed(names: Iterable[str], *, limit: int = 5) -> str:
    """The first names, and the number of the others: ``'a', 'b' and 37 more``."""
    shown = [repr(name) for name in names]
    rest = len(shown) - limit
    # One more name takes no more space than "and 1 more".
    if rest > 1:
        return f"{', '.join(shown[:limit])} and {rest} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))
