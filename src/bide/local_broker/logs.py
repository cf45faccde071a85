"""Extraction of the reason for a failed start from a node's logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_MAX_LINES = 25
_ERROR_PREFIX = re.compile(r"\d{4}-\d\d-\d\d [\d:.+]+ \[error\] <[\d.]+> ?")
_BOOT_FAILED = "BOOT FAILED"
# The start of Erlang's reports of processes that ended as a consequence: long, and without new information.
_REPORT = re.compile(r'\s*(?:supervisor:|crasher:|\{")')


def explain_failed_start(folder: Path) -> str:
    """Return the path of the log of the broker in *folder*, with the lines that explain why it did not start."""
    logs = folder / "log"
    for name in ("server.log", "supervisor.log"):
        try:
            text = (logs / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if lines := relevant_lines(text.splitlines()):
            return "\n".join([f"From {logs / name}:", *(f"  {line}" for line in lines)])
    return f"It wrote nothing to its logs in {logs}"


def relevant_lines(lines: Iterable[str]) -> list[str]:
    """Return the first error in console output, without repeated lines, or the last lines if there is no error."""
    everything = [line.rstrip() for line in lines if line.strip()]
    errors = list(dict.fromkeys(_first_error(everything)))
    return errors[:_MAX_LINES] or everything[-_MAX_LINES:]


def _first_error(lines: Iterable[str]) -> Iterator[str]:
    found = False
    for line in lines:
        text, is_error = _ERROR_PREFIX.subn("", line)
        found = found or bool(is_error) or text == _BOOT_FAILED
        if found and _REPORT.match(text):
            return
        if found and text.strip("= ") and text != _BOOT_FAILED:
            yield text
