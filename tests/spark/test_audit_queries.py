"""Several queries of a round that fail together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException

from bide.errors import BideError
from bide.pipelines.audit import _finish
from bide.pipelines.session import spark_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def test_one_failure_is_raised_and_no_other_is_lost(spark: SparkSession, tmp_path: Path) -> None:
    def failing(name: str) -> StreamingQuery:
        def fail(batch: DataFrame, number: int) -> None:
            raise ValueError(f"the {name} is broken")

        source = spark.readStream.format("rate").load()
        return source.writeStream.foreachBatch(fail).option("checkpointLocation", str(tmp_path / name)).start()

    with pytest.raises(StreamingQueryException, match="the first is broken") as caught:
        _finish([failing("first"), failing("second")])
    (note,) = caught.value.__notes__
    assert note.startswith("another query failed, too: ")
    assert "the second is broken" in note
    # In one line, as the command line tells it.
    with pytest.raises(BideError, match=r"^Spark: .*the first is broken.*$"), spark_errors():
        raise caught.value
