"""Spark judges histories as DuckDB does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bide.check.judgement import judge
from tests.check_cases import CASES, found
from tests.check_histories import write_history


@pytest.mark.long
def test_spark_and_duckdb_give_the_same_verdict(tmp_path: Path) -> None:
    expected: Counter[str] = Counter()
    for number, (rows, broken) in enumerate(CASES.values(), 1):
        write_history(tmp_path, *rows, run=f"run-{number:04}")
        expected.update(broken)
    by_duckdb = judge(tmp_path)
    assert found(by_duckdb) == expected
    assert judge(tmp_path, engine="spark") == by_duckdb
