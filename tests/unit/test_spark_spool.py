"""Record batches spooled to disk."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from bide.spark import spool
from bide.spark.spool import Spool

BATCHES = [pa.RecordBatch.from_arrays([pa.array([f"{n}-{row}" for row in range(100)])], names=["v"]) for n in range(3)]


@pytest.mark.parametrize("in_memory", [1, 1 << 20])
def test_spooled_batches_are_returned_in_order_and_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: int
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/nowhere")
    monkeypatch.setattr(spool, "MAX_IN_MEMORY", in_memory)
    with Spool() as aside:
        for batch in BATCHES:
            aside.put(batch)
        is_in_file = aside._file._rolled
        assert list(aside.batches()) == BATCHES
    assert is_in_file is (in_memory == 1)
    assert list(tmp_path.iterdir()) == []


def test_an_unused_spool_has_no_batches() -> None:
    with Spool() as aside:
        assert list(aside.batches()) == []
