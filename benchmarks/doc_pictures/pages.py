"""Insertion of pictures and captions into the documentation."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.doc_pictures.figures import EVERY, Audited, Campaign, Replayed, levels_of
from benchmarks.doc_pictures.plots import audited, campaign, picture, planned, replayed
from bide.pipelines.charts import texts
from bide.pipelines.charts.drawing import Drawing


def drawings(kept: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Callable[[float], Drawing]]:
    """The drawings of each page."""
    levels = levels_of(plan)
    return {
        "schedule": lambda width: campaign(Campaign(**kept["schedule"]), width=width),
        "audit": lambda width: audited(Audited(**kept["audit"]), width=width),
        "replay": lambda width: replayed(Replayed(**kept["replay"]), width=width),
        "plan": lambda width: planned(levels, width=width),
    }


def captions(kept: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, str]:
    """The captions of the pictures."""
    count, seconds, late = kept["messages"], kept["seconds"], kept["late_ms"]
    outcomes = {name: sum(kept["audit"][name]) for name in ("processed", "parked", "waiting")}
    failed, back = kept["replay"]["parked"], kept["replay"]["received"]
    fails, over = (f"{seconds[name]:g} seconds" for name in ("fails", "over"))

    def lateness(which: str) -> str:
        p50, p99 = (texts.milliseconds(late[which][name]) for name in ("p50", "p99"))
        return f"at most {p50} after their due time, and 99 % at most {p99} after it."

    load = kept["load_average"][1]
    busy = f", which other work kept busy too (a load of {load:.0f})" if load > 1.5 * kept["cores"] else ""
    where = f"`make doc-pictures`: RabbitMQ {kept['rabbitmq']}, Spark and endpoint on {kept['cores']} cores{busy}."
    return {
        "schedule": (
            f"One run sent {count:,} reminders within {kept['schedule']['sent_in']:.1f} s, and an endpoint received "
            f"half of them {lateness('first')} The dashed line shows the due messages. {where}"
        ),
        "audit": (
            f"The table `messages` by due time, after a round in the middle of a campaign of {count:,} reminders: "
            f"{outcomes['processed']:,} processed, {outcomes['parked']:,} parked because their handler failed for "
            f"{fails}, and {outcomes['waiting']:,} waiting. The dashed line is the last delivery that the audit saw. "
            f"{where}"
        ),
        "replay": (
            f"{sum(failed):,} messages failed within {fails}, up to {max(failed) / EVERY:,.0f} per second, and were "
            f"sent back over {over}, at most {max(back) / EVERY:,.0f} per second. Half of them arrived "
            f"{lateness('again')} {where}"
        ),
        "plan": (
            f"The same run: messages held by each level, of {plan['messages']:,} messages that were sent to RabbitMQ "
            f"{plan['rabbitmq']} within {texts.span(timedelta(seconds=plan['seconds']))}. The dashed line is the plan."
        ),
    }


def name_of(page: str) -> str:
    """The picture of a page, from ``docs`` on."""
    return f"pictures/pipeline-{page}.svg"


def with_caption(text: str, page: str, caption: str) -> str:
    """A page on which the paragraph below its picture is this one.

    Raises:
        SystemExit: it has no such picture.
    """
    found = re.search(rf"^!\[[^\]]+\]\({re.escape(name_of(page))}\)\n\n(.+?)(?=\n\n)", text, re.M | re.S)
    if found is None:
        raise SystemExit(f"the page of {page} has no picture {name_of(page)} with a sentence below it")
    wrapped = textwrap.fill(caption, 120, break_long_words=False, break_on_hyphens=False)
    return text[: found.start(1)] + wrapped + text[found.end(1) :]


def write(docs: Path, kept: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Draw the pictures, and write their captions into the pages."""
    texts = captions(kept, plan)
    for page, draw in drawings(kept, plan).items():
        (docs / name_of(page)).write_text(picture(f"pipeline-{page}", draw), encoding="utf-8")
        path = docs / f"pipeline-{page}.md"
        path.write_text(with_caption(path.read_text(encoding="utf-8"), page, texts[page]), encoding="utf-8")
