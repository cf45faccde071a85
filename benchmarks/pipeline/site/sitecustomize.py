"""Processor time of Spark's Python workers that have ended.

Python imports this module when it starts. The daemon of PySpark ignores SIGCHLD, and Linux then forgets what the
workers used as soon as they end. With the default for this signal, they stay until the daemon ends.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

if "pyspark.daemon" in sys.orig_argv:
    _signal = signal.signal

    def _set_handler(number: int, handler: Any) -> Any:
        is_ignored = number == signal.SIGCHLD and handler is signal.SIG_IGN
        return _signal(number, signal.SIG_DFL if is_ignored else handler)

    signal.signal = _set_handler  # type: ignore[assignment]  # with less exact types
