"""The columns of the Spark source."""

from __future__ import annotations

import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from bide.errors import InvalidOptionError
from bide.spark.columns import QUEUE_COLUMNS, STREAM_COLUMNS, Columns, arrow_schema, table_schema


@pytest.mark.parametrize("columns", [STREAM_COLUMNS, QUEUE_COLUMNS], ids=["stream", "queue"])
@pytest.mark.parametrize("include_headers", [False, True])
def test_the_arrow_schema_equals_that_of_spark(columns: Columns, include_headers: bool) -> None:
    schema = table_schema(columns, include_headers=include_headers)
    assert arrow_schema(schema, columns).equals(to_arrow_schema(schema, timezone="UTC"))
    assert ("headers" in schema.fieldNames()) == include_headers
    assert set(schema.fieldNames()) <= set(columns)


def test_a_schema_may_choose_columns() -> None:
    schema = StructType([StructField("offset", LongType()), StructField("stream", StringType())])
    assert arrow_schema(schema, STREAM_COLUMNS).names == ["offset", "stream"]


def test_a_schema_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="unknown column 'key': choose from value, stream"):
        arrow_schema(StructType([StructField("key", LongType())]), STREAM_COLUMNS)
    with pytest.raises(InvalidOptionError, match="'offset' as string: declare it as bigint, nullable"):
        arrow_schema(StructType([StructField("offset", StringType())]), STREAM_COLUMNS)
    with pytest.raises(InvalidOptionError, match="'offset' as bigint not null"):
        arrow_schema(StructType([StructField("offset", LongType(), nullable=False)]), STREAM_COLUMNS)
