"""The command line, ``bide``.

Exit codes:

==== ==================================================================================================
0    done
1    a check or an operation failed, or a question was answered with no; standard error has one line about it
2    bad usage: the options or values given cannot be used; nothing was done
130  interrupted by Ctrl-C (143 by SIGTERM, 129 by a closed terminal), after connections and files were closed
==== ==================================================================================================

Command modules import only click. All other imports happen when a command runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import sys
import time

_INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit."""
    started = time.monotonic()
    try:
        # Imported here, so that Ctrl-C during the imports is handled too.
        from bide.cli.streams import flush_output, open_missing

        open_missing()
        from bide.cli.app import run

        code = flush_output(run(sys.argv[1:], started=started))
    except KeyboardInterrupt:
        code = _INTERRUPTED
    sys.exit(code)
