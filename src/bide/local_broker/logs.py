"""The reason in a node's logs for a failed start."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_MOST_LINES = 25
_ERROR_PREFIX = re.compile(r"\d{4}-\d\d-\d\d [\d:.+]+ \[error\] <[\d.]+> ?")
_BOOT_FAILED = "BOOT FAILED"
# Erlang's reports of what went down with it follow: long, and without news.
_REPORT = re.compile(r'\s*(?:supervisor:|crasher:|\{")')


def explain_failed_start(folder: Path) -> str:
    """Return where the logs of the broker in *folder* are and the lines that tell why it did not start."""
    logs = folder / "log"
    for name in ("server.log", "supervisor.log"):
        try:
            text = (logs / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if lines := telling_lines(text.splitlines()):
            return "\n".join([f"From {logs / name}:", *(f"  {line}" for line in lines)])
    return f"It wrote nothing to its logs in {logs}"


def telling_lines(lines: Iterable[str]) -> list[str]:
    """Return the first error among the *lines* of a console, each line once; if there is none, the last lines."""
    everything = [line.rstrip() for line in lines if line.strip()]
    errors = list(dict.fromkeys(_first_error(everything)))
    return errors[:_MOST_LINES] or everything[-_MOST_LINES:]


def _first_error(lines: Iterable[str]) -> Iterator[str]:
    found = False
    for line in lines:
        text, is_error = _ERROR_PREFIX.subn("", line)
        found = found or bool(is_error) or text == _BOOT_FAILED
        if found and _REPORT.match(text):
            return
        if found and text.strip("= ") and text != _BOOT_FAILED:
            yield text
