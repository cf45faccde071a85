"""Content of a report: sections with a drawing, a note and a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from bide.durations import MILLISECOND
from bide.pipelines.charts import texts
from bide.pipelines.report import plots, schedule_sections
from bide.pipelines.report.figures import (
    FailureFigures,
    Figures,
    FlowFigures,
    Headline,
    LatenessBin,
    TargetFigures,
    UndecodableFigures,
)
from bide.pipelines.report.pending_figures import OverdueMessage, PendingFigures
from bide.pipelines.report.section import Card, Section, SectionTable
from bide.runtime.wording import quantity


def cards(figures: Figures) -> list[Card]:
    """The figures of the headline that are known."""
    found = []
    if (head := figures.headline) is not None:
        found = [
            Card(name="scheduled", value=texts.count(head.scheduled)),
            Card(name="delivered", value=texts.count(head.delivered)),
            Card(name="pending", value=texts.count(head.pending)),
            Card(name="overdue", value=texts.count(head.overdue), bad=head.overdue > 0),
            Card(name="lost?", value=texts.count(head.lost), bad=head.lost > 0),
            Card(name="p50 late", value=texts.milliseconds(head.p50)),
            Card(name="p99 late", value=texts.milliseconds(head.p99)),
        ]
        found += [
            Card(name=name, value=texts.count(count), bad=name in ("undeliverable", "unknown"))
            for name, count in head.ended.items()
        ]
    if figures.failures is not None:
        total = figures.failures.total
        found.append(Card(name="failures", value=texts.count(total), bad=total > 0))
    if figures.undecodable_total:
        found.append(Card(name="undecodable", value=texts.count(figures.undecodable_total), bad=True))
    return found


def summary(figures: Figures) -> str:
    """The headline in sentences."""
    head = figures.headline
    if head is None:
        return "This folder has no table of messages, so their delivery is unknown."
    if not head.scheduled:
        return "No message was scheduled yet."
    sentence = f"{head.delivered:,} of {quantity(head.scheduled, 'message')} {_were(head.delivered)} delivered"
    if head.delivered == 1 and head.max is not None:
        sentence += f", {texts.milliseconds(head.max)} late"
    elif head.p50 is not None and head.p99 is not None:
        half, most = texts.milliseconds(head.p50), texts.milliseconds(head.p99)
        sentence += f", half of them at most {half} late, 99 in 100 at most {most}"
    if head.ended:
        sentence += f". Not delivered: {schedule_sections.listed(head.ended)}"
    if not head.pending:
        return f"{sentence}. Nothing is pending."
    sentence += f". {head.pending:,} {_are(head.pending)} pending"
    if head.overdue:
        sentence += f", {head.overdue:,} of them overdue"
    if head.lost:
        which = "all of these" if head.lost == head.overdue else f"{head.lost:,} of these"
        sentence += f", {which} by more than {texts.span(head.lost_after)}: they may be lost"
    return sentence + "."


def failed(figures: Figures) -> str:
    """A short text about the failures; empty without any."""
    found = figures.failures
    if found is None or not found.total:
        return ""
    groups = quantity(len(found.groups) + found.others, "group")
    return f"{quantity(found.total, 'attempt')} failed, in {groups}"


def undecodable(figures: Figures) -> str:
    """A short text about undecodable messages; empty without any."""
    total = figures.undecodable_total
    return f"{quantity(total, 'message')} could not be decoded" if total else ""


def sections(figures: Figures) -> Iterator[Section]:
    """All sections of the report; a section without data has a note instead of a drawing."""
    yield _flow(figures.flow)
    yield _lateness(figures.lateness, figures.headline)
    if figures.flow is not None and any(one is not None for one in figures.flow.p50):
        yield _lateness_over_time(figures.flow)
    if any(one.p50 is not None for one in figures.targets):
        yield _targets(figures.targets, figures.more_targets)
    yield _pending(figures.pending, figures.headline)
    if figures.overdue:
        yield _oldest(figures)
    if figures.schedules is not None:
        yield schedule_sections.by_target(figures.schedules)
        if figures.schedules.spans:
            yield schedule_sections.over_time(figures.schedules)
    yield _failures(figures.failures)
    if figures.undecodable:
        yield _undecodable(figures.undecodable, figures.undecodable_total)


def _flow(found: FlowFigures | None) -> Section:
    section = partial(Section, name="flow", title="Scheduled and delivered")
    if found is None:
        return section(note=_no_table("messages"))
    if not found.scheduled:
        return section(note="Nothing was scheduled or delivered yet.")
    rows = [
        (texts.moment(found.first + found.width * number), *map(texts.count, counts))
        for number, counts in enumerate(zip(found.scheduled, found.delivered, found.waiting(), strict=True))
    ]
    return section(
        note="Scheduled messages are drawn upwards, delivered ones downwards. Below: messages waiting in the broker.",
        draw=lambda width: plots.flow(found, width=width),
        table=SectionTable(head=("from (UTC)", "scheduled", "delivered", "waiting"), rows=rows, number_columns=3),
    )


def _lateness(found: Sequence[LatenessBin] | None, headline: Headline | None) -> Section:
    section = partial(Section, name="lateness", title="Lateness")
    if found is None or headline is None:
        return section(note=_no_table("messages"))
    if not found:
        return section(note="Nothing was delivered yet.")
    total, cumulative, rows = sum(one.count for one in found), 0, []
    for one in found:
        cumulative += one.count
        rows.append((plots.lateness_range(one), texts.count(one.count), f"{100 * cumulative / total:.3f} %"))
    latest = texts.milliseconds(headline.max)
    early = f"{headline.early:,}" if headline.early else "None"
    return section(
        note=f"From due time to delivery, on a logarithmic scale. The latest was {latest} late. {early} came early.",
        draw=lambda width: plots.lateness(found, headline, width=width),
        table=SectionTable(head=("late", "messages", "cumulative"), rows=rows, number_columns=2),
    )


def _lateness_over_time(found: FlowFigures) -> Section:
    rows = [
        (texts.moment(found.first + found.width * number), texts.milliseconds(p50), texts.milliseconds(p99))
        for number, (p50, p99) in enumerate(zip(found.p50, found.p99, strict=True))
        if p50 is not None
    ]
    return Section(
        name="lateness-over-time",
        title="Lateness over time",
        note="Half of the messages were later than the lower line, one in a hundred later than the upper one.",
        draw=lambda width: plots.lateness_over_time(found, width=width),
        table=SectionTable(head=("from (UTC)", "p50", "p99"), rows=rows, number_columns=2),
    )


def _targets(found: Sequence[TargetFigures], more: int) -> Section:
    rows = [
        (
            plots.in_words(one.name),
            *map(texts.count, (one.scheduled, one.delivered, one.overdue)),
            *map(texts.milliseconds, (one.p50, one.p95, one.p99, one.max)),
        )
        for one in found
    ]
    left_out = f" {quantity(more, 'target')} with fewer {_are(more)} left out." if more else ""
    return Section(
        name="targets",
        title="Lateness by target",
        note=f"The targets with most messages.{left_out}",
        draw=lambda width: plots.targets(found, width=width),
        table=SectionTable(
            head=("target", "scheduled", "delivered", "overdue", "p50", "p95", "p99", "latest"),
            rows=rows,
            number_columns=7,
        ),
    )


def _pending(found: PendingFigures | None, headline: Headline | None) -> Section:
    section = partial(Section, name="pending", title="Pending, by due time")
    if found is None:
        return section(note=_no_table("pending"))
    if not found.targets:
        return section(note="Nothing is pending.")
    rows = [
        (
            plots.target_name(found, one),
            texts.moment(found.first + found.width * number),
            *map(texts.count, (count, overdue)),
        )
        for one in found.targets
        for number, (count, overdue) in enumerate(zip(one.counts, one.overdue, strict=True))
        if count
    ]
    now = None if headline is None else headline.until
    note = "Messages waiting for each target, by due time. The dashed line marks the last message that the audit saw."
    for number, when in ((found.earlier, "before"), (found.later, "after")):
        if number:
            note += f" Not shown: {quantity(number, 'message')} due long {when} the others."
    return section(
        note=note,
        draw=lambda width: plots.pending(found, now=now, width=width),
        table=SectionTable(head=("target", "due from (UTC)", "pending", "overdue"), rows=rows, number_columns=2),
    )


def _oldest(figures: Figures) -> Section:
    head, shown, total = figures.headline, len(figures.oldest), figures.overdue
    counted = quantity(total, "overdue message")
    which = f"The first {shown} of {counted}" if shown < total else counted
    note = f"{which} in the table of messages, by due time."
    if head is not None:
        note += f" A message that is overdue by more than {texts.span(head.lost_after)} may be lost."
        if (more := head.overdue - total) > 0:
            note += f" Not shown: {quantity(more, 'overdue schedule or retry', 'overdue schedules or retries')}."
    return Section(
        name="overdue",
        title="Overdue messages",
        note=note,
        table=SectionTable(
            head=("message id", "target", "type", "due (UTC)", "overdue for", "lost?"),
            rows=list(oldest_rows(figures.oldest, head)),
            number_columns=0,
            is_collapsed=False,
            long_text_column=0,
        ),
        query=figures.query,
        query_title=f"Query for all {total:,}" if total > 1 else "Query",
    )


def oldest_rows(found: Sequence[OverdueMessage], headline: Headline | None) -> Iterator[tuple[str, ...]]:
    """Overdue messages as rows of their table."""
    until = None if headline is None else headline.until
    for one in found:
        late = None if until is None or one.due is None else until - one.due
        lost = late is not None and headline is not None and late > headline.lost_after
        yield (
            one.message_id,
            plots.in_words(one.target),
            one.type or "–",
            texts.moment(one.due),
            texts.milliseconds(None if late is None else late / MILLISECOND),
            "maybe" if lost else "–",
        )


def _failures(found: FailureFigures | None) -> Section:
    section = partial(Section, name="failures", title="Failures")
    if found is None:
        return section(note=_no_table("failures"))
    if not found.groups:
        return section(note="Nothing failed.")
    rows = [
        (
            plots.group_name(one),
            one.endpoint,
            one.text,
            texts.moment(one.first_seen),
            texts.moment(one.last_seen),
            plots.trend(one),
            texts.count(one.messages),
            texts.count(one.count),
        )
        for one in found.groups
    ]
    left_out = f" {quantity(found.others, 'group')} with fewer {_are(found.others)} left out." if found.others else ""
    return section(
        note=f"Failed attempts, in groups of similar failures. Each group has its own vertical scale.{left_out}",
        draw=lambda width: plots.failures(found, width=width),
        table=SectionTable(
            head=(
                "exception",
                "endpoint",
                "newest text",
                "first (UTC)",
                "last (UTC)",
                "trend",
                "messages",
                "failures",
            ),
            rows=rows,
            number_columns=2,
            is_collapsed=False,
            long_text_column=2,
        ),
    )


def _undecodable(found: Sequence[UndecodableFigures], total: int) -> Section:
    rows = [
        (
            one.stream,
            one.reason,
            texts.moment(one.first_seen),
            texts.moment(one.last_seen),
            f"{one.first_offset:,}",
            texts.count(one.count),
        )
        for one in found
    ]
    more = total - sum(one.count for one in found)
    left_out = f" {quantity(more, 'message')} with other reasons {_are(more)} left out." if more else ""
    return Section(
        name="undecodable",
        title="Undecodable messages",
        note="Messages in the streams that are not AMQP 1.0. The table undecodable of the audit has their bytes. No "
        f"other section counts them.{left_out}",
        table=SectionTable(
            head=("stream", "reason", "first (UTC)", "last (UTC)", "first offset", "messages"),
            rows=rows,
            number_columns=2,
            is_collapsed=False,
            long_text_column=1,
        ),
    )


def _no_table(name: str) -> str:
    return f"This folder has no table {name!r}."


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"
