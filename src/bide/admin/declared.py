"""Exchanges and queues on a broker, compared with a topology by declaring them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bide.admin.declaring import is_temporary
from bide.admin.report import Check, Finding, judged, listed, unchecked
from bide.admin.snapshot import ask_each
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.errors import BrokerError, DeclarationMismatchError, TargetNotFoundError
from bide.topology import Exchange, Queue

_Items = Sequence[Exchange] | Sequence[Queue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Redeclared:
    """The broker's answers to the declarations of exchanges or queues.

    Attributes:
        wanted: the items that should exist.
        found: the items that exist, with any properties.
        answers: for each item in *found*, the broker's reply to declaring it again, or the error.
    """

    wanted: _Items
    found: _Items
    answers: Sequence[Any]

    def findings(
        self, check: Check, kind: str, way_out: str, *, needed: _Items | None = None, fine: str = ""
    ) -> list[Finding]:
        """The findings about items that are missing or have other properties.

        Args:
            check: the check that these findings belong to.
            kind: ``exchanges`` or ``queues``.
            way_out: how to declare missing items.
            needed: the items that must exist; None for all.
            fine: the text if nothing is wrong.
        """
        wanted = self.wanted if needed is None else needed
        names = {one.name for one in self.found}
        missing = [one.name for one in wanted if one.name not in names]
        problems = []
        if missing:
            problems.append(f"{len(missing)} of {len(wanted)} {kind} do not exist, {listed(missing)}: {way_out}")
        for answer in self.answers:
            if isinstance(answer, DeclarationMismatchError):
                problems.append(
                    f"the {answer.kind} {answer.name!r} is declared with {answer.argument} = {answer.found}, where "
                    f"{answer.wanted} is wanted: when no messages wait in it, delete it and {way_out}"
                )
            elif isinstance(answer, BrokerError):
                found = judged(check, problems, "") if problems else []
                return [*found, unchecked(check, str(answer))]
        return judged(check, problems, fine or f"{len(wanted)} as they should be")


def is_missing(answer: Any) -> bool:
    """Whether a passive declaration failed because the exchange or queue does not exist."""
    return isinstance(answer, TargetNotFoundError) and not is_temporary(answer)


async def redeclare_exchanges(connection: Connection, exchanges: Sequence[Exchange]) -> Redeclared:
    """Declare again those exchanges that exist.

    Raises:
        BideError: the connection was lost.
    """
    return await _redeclare(
        connection, exchanges, lambda channel, one, passive: channel.declare_exchange(one, passive=passive)
    )


async def redeclare_queues(connection: Connection, queues: Sequence[Queue]) -> Redeclared:
    """Declare again those queues that exist.

    Raises:
        BideError: the connection was lost.
    """
    return await _redeclare(
        connection, queues, lambda channel, one, passive: channel.declare_queue(one, passive=passive)
    )


async def _redeclare(
    connection: Connection, items: Sequence[Any], declare: Callable[[Channel, Any, bool], Any]
) -> Redeclared:
    answers = await ask_each(connection, items, lambda channel, one: declare(channel, one, True))
    found = [one for one, answer in zip(items, answers, strict=True) if not is_missing(answer)]
    return Redeclared(
        wanted=items,
        found=found,
        answers=await ask_each(connection, found, lambda channel, one: declare(channel, one, False)),
    )
