"""Files of rejected rows."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bide.errors import InvalidInputError
from bide.spark.rejects import Rejects

BATCH = pa.RecordBatch.from_arrays(
    [pa.array(["a", "b", "c"]), pa.array([timedelta(microseconds=n) for n in (1_000, 1_001, -1_001)])],
    names=["value", "delay"],
)


def reject(folder: Path, *places: int) -> None:
    with Rejects(str(folder), "part-00000-run") as rejects:
        for place in places:
            rejects.add(BATCH, {place: ("returned", f"reason {place}", f"m-{place}")})


def test_rejected_rows_have_reason_id_and_delay_in_milliseconds(tmp_path: Path) -> None:
    reject(tmp_path / "rejects", 2, 1)
    (file,) = (tmp_path / "rejects").iterdir()
    assert pq.read_table(file).to_pylist() == [
        {"value": "c", "delay": -1, "message_id": "m-2", "reject_status": "returned", "reject_reason": "reason 2"},
        {"value": "b", "delay": 2, "message_id": "m-1", "reject_status": "returned", "reject_reason": "reason 1"},
    ]


def test_rows_without_another_message_id_keep_their_own(tmp_path: Path) -> None:
    batch = BATCH.append_column("message_id", pa.array(["own-a", None, "own-c"]))
    with Rejects(str(tmp_path), "part-00000-run") as rejects:
        rejects.add(batch, {0: ("invalid", "why", None), 1: ("returned", "why", "made-b")})
        rejects.add(batch, {1: ("invalid", "why", None), 2: ("returned", "why", "own-c")})
    (file,) = tmp_path.iterdir()
    assert pq.read_table(file).column("message_id").to_pylist() == ["own-a", "made-b", None, "own-c"]


def test_another_attempt_replaces_or_removes_the_file(tmp_path: Path) -> None:
    reject(tmp_path, 0, 1)
    reject(tmp_path, 2)
    (file,) = tmp_path.iterdir()
    assert pq.read_table(file).column("value").to_pylist() == ["c"]
    reject(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match=r"the folder .*file.rejects. for rejects cannot be used"):
        reject(tmp_path / "file" / "rejects", 0)


def test_a_failed_attempt_keeps_the_previous_file(tmp_path: Path) -> None:
    reject(tmp_path, 0)
    with pytest.raises(OSError, match="gone"):
        _fail(tmp_path)
    (file,) = tmp_path.iterdir()
    assert pq.read_table(file).column("value").to_pylist() == ["a"]


def _fail(folder: Path) -> None:
    with Rejects(str(folder), "part-00000-run") as rejects:
        rejects.add(BATCH, {1: ("invalid", "why", None)})
        raise OSError("gone")
