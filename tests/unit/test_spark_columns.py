"""The columns of the Spark source."""

from __future__ import annotations

import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from bide.errors import InvalidOptionError
from bide.spark.columns import QUEUE_COLUMNS, STREAM_COLUMNS, ColumnTypes, arrow_schema, table_schema
from bide.spark.datasource import RabbitMQDataSource


@pytest.mark.parametrize("columns", [STREAM_COLUMNS, QUEUE_COLUMNS], ids=["stream", "queue"])
@pytest.mark.parametrize("include_headers", [False, True])
def test_the_arrow_schema_equals_that_of_spark(columns: ColumnTypes, include_headers: bool) -> None:
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


def source(**options: str) -> RabbitMQDataSource:
    return RabbitMQDataSource(dict(options))


def test_an_option_chooses_columns() -> None:
    made = source(stream="s", columns="offset, headers,headers_json")
    assert made.schema().fieldNames() == ["offset", "headers", "headers_json"]
    assert source(queue="q", columns="attempts").schema().fieldNames() == ["attempts"]
    made.reader(made.schema())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"columns": "offset,key"}, "the option columns names 'key', which is not a column: choose from value, stream"),
        ({"columns": "attempts"}, "the option columns names 'attempts'"),
        ({"columns": "offset,offset"}, "give different names"),
        ({"columns": "offset", "includeHeaders": "json"}, "the options columns and includeHeaders were both given"),
        ({"includeHeaders": "map"}, "give one of false, true, json"),
    ],
)
def test_other_columns_are_refused(options: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidOptionError, match=reason):
        source(stream="s", **options).schema()


def test_columns_beside_another_schema_are_refused() -> None:
    schema = StructType([StructField("value", BinaryType())])
    made = source(stream="s", columns="offset")
    for reader in (made.reader, made.streamReader):
        with pytest.raises(InvalidOptionError, match="columns names offset, but the schema has value"):
            reader(schema)


@pytest.mark.parametrize("choice", ["false", "true", "json"])
def test_headers_are_text_or_json(choice: str) -> None:
    found = set(source(stream="s", includeHeaders=choice).schema().fieldNames()) & {"headers", "headers_json"}
    assert found == {"true": {"headers"}, "json": {"headers_json"}}.get(choice, set())


def test_a_read_without_options_names_the_ways_to_make_a_table() -> None:
    with pytest.raises(InvalidOptionError, match=r"CREATE TABLE .* use CREATE TEMPORARY VIEW"):
        source().reader(table_schema(STREAM_COLUMNS, include_headers=False))
