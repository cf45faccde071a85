"""Work for the benchmark's runner, which needs no broker."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from bide.bench.job import Answer, Job


def answer(job: Job) -> Answer:
    """Measured at once."""
    sys.stdout.write("what a library prints\n")
    return Answer(values=job.options["values"])


def hang(job: Job) -> Answer:
    """Start another process, and never end."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(job.options["file"]).write_text(str(process.pid))
    time.sleep(600)
    return Answer(values={})
