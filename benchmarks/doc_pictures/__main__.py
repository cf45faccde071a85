"""The pictures of the pipeline pages, drawn from one small campaign that runs for real.

``python -m benchmarks.doc_pictures`` starts a broker of its own and an endpoint, turns the taps on, and has ``bide
pipeline schedule`` send reminders that are due within two minutes. For fifteen seconds of them the endpoint's handler
fails; meanwhile ``bide pipeline audit`` looks; at last ``bide pipeline replay`` sends back what was parked. That takes
about five minutes. The figures go to ``benchmarks/doc_pictures.json``, the pictures to ``docs/pictures``, and the
sentences below them into the pages. ``--from FILE`` draws what was measured before.

The picture of the plan is of ``benchmarks/plan_check.json``, see ``plan_check.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.doc_pictures.pages import write
from benchmarks.doc_pictures.running import Options, run
from bide.local_broker import LocalBroker

ROOT: Final = Path(__file__).parents[2]
RESULT: Final = ROOT / "benchmarks/doc_pictures.json"
PLAN: Final = ROOT / "benchmarks/plan_check.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doc_pictures", description=__doc__)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--seconds", type=int, default=120, help="from the first due time to the last")
    parser.add_argument("--lead", type=int, default=20, help="seconds of the shortest delay")
    parser.add_argument("--over", type=int, default=60, help="seconds over which failed messages are spread")
    parser.add_argument("--chroot", type=Path, help="the root of another system whose RabbitMQ is started")
    parser.add_argument("--result", type=Path, default=RESULT, help="a file for all figures, as JSON")
    parser.add_argument("--from", dest="kept", type=Path, help="draw these figures, and run nothing")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="the folder of the pages")
    arguments = parser.parse_args()
    # Ended like this, too, it ends what it has begun.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Hundreds of messages fail as they should.
    logging.getLogger("bide.endpoint").setLevel(logging.CRITICAL)
    if arguments.kept is None:
        options = Options(
            messages=arguments.messages, lead=arguments.lead, seconds=arguments.seconds, over=arguments.over
        )
        with (
            tempfile.TemporaryDirectory() as folder,
            LocalBroker.start(ephemeral=True, chroot=arguments.chroot) as broker,
        ):
            kept = asyncio.run(run(broker, Path(folder), options))
        arguments.result.write_text(lines_of(kept), encoding="utf-8")
    else:
        kept = json.loads(arguments.kept.read_text(encoding="utf-8"))
    write(arguments.docs, kept, json.loads(PLAN.read_text(encoding="utf-8")))


def lines_of(kept: Mapping[str, Any]) -> str:
    """As JSON, a list in a line."""
    text = json.dumps(kept, indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: json.dumps(json.loads(found[0])), text) + "\n"


if __name__ == "__main__":
    main()
