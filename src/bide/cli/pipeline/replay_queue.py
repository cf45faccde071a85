"""Replay of an error queue, on Spark or in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from bide.cli.advice import with_options
from bide.cli.output import echo, print_json
from bide.cli.pipeline.replay_view import InterruptedReplay, Preview, preview, preview_of, show
from bide.cli.pipeline.view import engine_facts, progress
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from bide.cli.pipeline.engine_choice import EngineChoice
    from bide.error_queues import OperationResult
    from bide.error_queues.operation import Progress
    from bide.pipelines.engine import Engine
    from bide.pipelines.replay.condition import TextCondition
    from bide.pipelines.replay.queue import FailedIn, ReplayCount
    from bide.pipelines.replay.small import ChosenMessage


def engine_for(where: str | None, choice: EngineChoice) -> tuple[Engine, TextCondition | None]:
    """The engine for a condition, and the parsed condition if that is this process."""
    from bide.pipelines.engine import Engine, NeedsSparkError
    from bide.pipelines.replay.condition import TextCondition

    forced = choice.forced()
    if forced is not None and forced.is_spark:
        return forced, None
    if where is None:
        return forced or Engine(False, "there is no condition"), None
    try:
        condition = TextCondition.parse(where)
    except NeedsSparkError as error:
        return choice.choose_spark(error), None
    return forced or Engine(False, "the condition only compares columns with text"), condition


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReplay:
    """A replay of an error queue with checked options.

    Attributes:
        source: the error queue.
        over: the time over which the messages are spread.
        where: the condition.
        condition: the condition for this process.
        limit: the largest number of messages.
        allow: patterns of target queues.
        engine: the engine.
        started: when the command started, as a monotonic time.
        stopped: the state after an interruption is added to it.
    """

    source: FailedIn
    over: timedelta
    where: str | None
    condition: TextCondition | None
    limit: int | None
    allow: tuple[str, ...]
    engine: Engine
    started: float
    stopped: list[InterruptedReplay] = field(default_factory=list)

    def work(self, spark: SparkSession | None, *, dry_run: bool, as_json: bool) -> int:
        """Choose the messages and send them, and return the exit code.

        Args:
            spark: the session; None for this process.
        """
        chosen = self._in_process() if spark is None else self._on_spark(spark)
        if self.allow:
            chosen.check_allowed(self.allow)
        if not dry_run:
            return self._send(chosen, as_json=as_json)
        found = chosen.preview()
        show(found, self.engine, as_json=as_json)
        return 1 if found.missing or found.unknown else 0

    def _in_process(self) -> _ChosenMessages:
        from bide.pipelines.replay.small import choose, spread

        with progress("browsing the queue"):
            messages = choose(self.source, condition=self.condition, limit=self.limit)
        return _InProcess(self.source, messages, spread(len(messages), self.over, begin=datetime.now(UTC)))

    def _on_spark(self, spark: SparkSession) -> _ChosenMessages:
        from bide.pipelines.replay.run import choose, evaluate_and_cache, failed, spread

        chosen = choose(failed(spark, self.source), where=self.where, limit=self.limit)
        with progress("browsing the queue"):
            return _OnSpark(
                self.source, evaluate_and_cache(spread(chosen, self.over, begin=datetime.now(UTC)), self.where)
            )

    def _send(self, chosen: _ChosenMessages, *, as_json: bool) -> int:
        given = {"where": self.where, "limit": self.limit, "over": str(self.over) if self.over else None}
        details = {name: value for name, value in given.items() if value is not None}
        queue = self.source.queue
        total = chosen.total()
        done = 0

        def count(number: int, _: int) -> None:
            nonlocal done
            done = number

        def stop(moved: OperationResult) -> None:
            kept = sum(moved.kept.values())
            self.stopped.append(
                InterruptedReplay(source=queue, sent=moved.done, left=total - moved.done - kept, kept=kept)
            )

        with progress("replaying", total=total, done=lambda: done):
            found = chosen.send(details=details, progress=count, interrupted=stop)
        seconds = time.monotonic() - self.started
        sent = {one.queue: one.messages for one in found if one.outcome == "sent"}
        kept = {one.reason: one.messages for one in found if one.outcome == "kept"}
        gone = sum(one.messages for one in found if one.outcome == "gone")
        number = sum(sent.values())
        if as_json:
            result = {"messages": total, "sent": number, "queues": sent, "kept": kept, "gone": gone}
            print_json({**result, "seconds": round(seconds, 3), **engine_facts(self.engine)})
        else:
            where = ", ".join(f"{messages:,} to {name}" for name, messages in sent.items())
            rate = f" in {seconds:.1f} s: {where}" if number else ""
            echo(f"replayed {quantity(number, 'message')}{rate}")
            echo(f"engine: {self.engine}")
        for reason, messages in kept.items():
            stay = quantity(messages, "message stays", "messages stay")
            echo(f"bide: {stay} in {queue}: {with_options(reason or '')}", err=True)
        if gone:
            echo(f"bide: {quantity(gone, 'message')} left {queue} since they were chosen", err=True)
        return 1 if kept else 0


class _ChosenMessages(Protocol):
    """The chosen messages of an error queue, on one of the engines."""

    def total(self) -> int:
        """The number of messages."""
        ...

    def check_allowed(self, allow: tuple[str, ...]) -> None:
        """Refuse targets that no pattern allows."""
        ...

    def preview(self) -> Preview:
        """Count messages by target and due time."""
        ...

    def send(
        self, *, details: Mapping[str, Any], progress: Progress, interrupted: Callable[[OperationResult], None]
    ) -> list[ReplayCount]:
        """Send the messages when they are due."""
        ...


@dataclass(frozen=True, slots=True)
class _OnSpark:
    source: FailedIn
    messages: DataFrame

    def total(self) -> int:
        return self.messages.count()

    def check_allowed(self, allow: tuple[str, ...]) -> None:
        from bide.pipelines.replay.run import check_allowed

        check_allowed(self.messages, self.source.to, allow)

    def preview(self) -> Preview:
        return preview(self.messages, url=self.source.url, source=self.source.queue, to=self.source.to, more={})

    def send(
        self, *, details: Mapping[str, Any], progress: Progress, interrupted: Callable[[OperationResult], None]
    ) -> list[ReplayCount]:
        from bide.pipelines.replay.queue import ReplayCount
        from bide.pipelines.replay.run import send
        from bide.pipelines.session import spark_errors

        with spark_errors(sending=True):
            found = send(self.messages, self.source, details=details, progress=progress, interrupted=interrupted)
            return [ReplayCount(**row.asDict()) for row in found.collect()]


@dataclass(frozen=True, slots=True)
class _InProcess:
    source: FailedIn
    messages: list[ChosenMessage]
    dues: list[int]

    def total(self) -> int:
        return len(self.messages)

    def check_allowed(self, allow: tuple[str, ...]) -> None:
        from bide.pipelines.replay.queue import refuse_disallowed_targets

        to = self.source.to
        refuse_disallowed_targets(
            sorted({one.queue for one in self.messages if one.queue}) if to is None else [to], allow
        )

    def preview(self) -> Preview:
        from bide.pipelines.replay.small import due_times

        return preview_of(
            [(one.queue, 1) for one in self.messages],
            lambda every: due_times(self.dues, every),
            url=self.source.url,
            source=self.source.queue,
            to=self.source.to,
            first=min(self.dues, default=None),
            last=max(self.dues, default=None),
            more={},
        )

    def send(
        self, *, details: Mapping[str, Any], progress: Progress, interrupted: Callable[[OperationResult], None]
    ) -> list[ReplayCount]:
        from bide.pipelines.replay.queue import send_chosen

        chosen = [(one.key, due) for one, due in zip(self.messages, self.dues, strict=True)]
        return send_chosen(chosen, self.source, details=details, progress=progress, interrupted=interrupted)
