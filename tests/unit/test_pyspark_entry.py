"""Reasons why Spark does not find the data source."""

from __future__ import annotations

import subprocess
import sys

from tests.timeouts import TIMEOUT


def test_a_missing_pyspark_is_logged_for_debugging() -> None:
    script = (
        "import logging, sys\n"
        "logging.basicConfig(level=logging.DEBUG)\n"
        "sys.modules['pyspark'] = None\n"
        "import pyspark_bide\n"
        "assert not hasattr(pyspark_bide, 'DefaultSource')"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=TIMEOUT)
    assert "DEBUG:bide:there is no data source rabbitmq\n" in answer.stderr
    assert "\nModuleNotFoundError: " in answer.stderr
