"""Small tables that are read without Spark, and those that are left to it."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

import bide
from bide.errors import InvalidColumnError
from bide.pipelines.engine import NeedsSparkError
from bide.pipelines.schedule.hashes import checksum_of, parts_of
from bide.pipelines.schedule.plan import SchedulePlan
from bide.pipelines.schedule.small import Messages, messages, survey
from bide.pipelines.small_table import read_small
from bide.pipelines.small_times import zone_of
from bide.spark.sink_settings import SinkSettings

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)


def read(path: Path, data: str | bytes, largest: int = 1_000_000) -> pa.Table:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return read_small(str(path), format=None, options={}, largest=largest)[0]


def plan_of(**columns: str) -> SchedulePlan:
    settings = SinkSettings.make("amqp://localhost", infrastructure=bide.Clock(), constants={"to": "orders"})
    return SchedulePlan(settings=settings, **columns)  # type: ignore[arg-type]  # fields by name


def test_csv_is_text_in_which_an_empty_cell_is_null(tmp_path: Path) -> None:
    found = read(tmp_path / "t.csv", 'a,b\r\n1,"x, y"\n ,""\n\n,z')
    assert found.to_pylist() == [{"a": "1", "b": "x, y"}, {"a": " ", "b": None}, {"a": None, "b": "z"}]
    assert found.schema.types == [pa.string()] * 2


def test_json_columns_are_sorted_and_have_one_type(tmp_path: Path) -> None:
    found = read(tmp_path / "t.jsonl", '{"z": 1, "b": 4}\n\n{"a": true, "b": 0.5}\n{"n": null}\n')
    assert found.column_names == ["a", "b", "n", "z"]
    assert found.schema.types == [pa.bool_(), pa.float64(), pa.string(), pa.int64()]


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("t.csv", 'a\n"x""y"', "a quotation mark or a line break inside a cell"),
        ("t.csv", 'a\n"x\ny"', "a quotation mark or a line break inside a cell"),
        ("t.csv", 'a\n "x"', "a quotation mark or a line break inside a cell"),
        ("t.csv", "a\n\\", "a backslash"),
        ("t.csv", "a,b\n1", "more or fewer cells"),
        ("t.csv", "_c1,\n1,2", "the same name"),
        ("t.csv", "a,a\n1,2", "the same name"),
        ("t.csv", "a,A\n1,2", "differ only in case"),
        ("t.csv", "", "is empty"),
        ("t.csv", b"a\n\xff", "not UTF-8"),
        ("t.csv", "\ufeffa\n1", "a byte order mark"),
        ("t.csv.gz", "a\n1", "is compressed"),
        ("t.csv", "a\n" + "1\n" * 1_000_000, "2.0 MB, more than 1.0 MB"),
        ("t.json", '{"a": 1}{"a": 2}', "not one JSON object"),
        ("t.json", '{"a": NaN}', "not one JSON object"),
        ("t.json", '{"a": 1, "a": 2}', "not one JSON object"),
        ("t.json", '[{"a": 1}]', "not a JSON object"),
        ("t.json", '{"a": 1}\n{"a": "1"}', "'a' has nested values, large numbers, or values of several types"),
        ("t.json", '{"a": [1]}', "'a' has nested values"),
        ("t.json", '{"a": 9223372036854775808}', "'a' has nested values, large numbers"),
        ("t.json", '{"a": 1e999}', "'a' has nested values, large numbers"),
        ("t.json", '{"a": "\\ud800"}', "'a' has half of a surrogate pair"),
        ("t.json", '{"\\ud800": 1}', "have a column '.ud800'"),
        ("t.json", '{"a": 1, "": 2}', "have a column ''"),
        ("t.json", '{"a": 1}\n\u00a0\n', "not one JSON object"),
        ("t.json", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "not one JSON object"),
        ("t.json", '{"_corrupt_record": 1}', "a column '_corrupt_record', which Spark fills itself"),
        ("t.csv", "a,_corrupt_record\n1,2", "a column '_corrupt_record', which Spark fills itself"),
        ("t.orc", "", "the input is ORC"),
        ("t.parquet", "no", "cannot be read by Arrow"),
    ],
)  # fmt: skip
def test_what_spark_may_read_differently_is_left_to_spark(
    tmp_path: Path, name: str, data: str | bytes, reason: str
) -> None:
    with pytest.raises(NeedsSparkError, match=reason):
        read(tmp_path / name, data)


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array([1], pa.uint8()), "'a' .* is uint8"),
        (pa.array([timedelta(1)]), "'a' .* is duration"),
        (pa.array([NOW], pa.timestamp("ns", "UTC")), r"'a' .* is timestamp\[ns"),
        (pa.array([[1]]), "'a' .* is list<"),
        (pa.array([b"\xff"]).cast(pa.string(), safe=False), "'a' .* has text that is not UTF-8"),
    ],
    ids=lambda one: str(getattr(one, "type", "")),
)
def test_types_that_only_spark_knows_are_left_to_spark(tmp_path: Path, column: pa.Array, reason: str) -> None:
    parquet.write_table(pa.table({"a": column}), tmp_path / "t.parquet")
    with pytest.raises(NeedsSparkError, match=reason):
        read_small(str(tmp_path / "t.parquet"), format=None, options={})


def test_an_interval_of_spark_is_left_to_spark(tmp_path: Path) -> None:
    """Spark writes it as a number of microseconds, and its type into the metadata."""
    fields = [{"name": "a", "type": "interval day to second", "nullable": True, "metadata": {}}]
    marks = {"org.apache.spark.sql.parquet.row.metadata": json.dumps({"type": "struct", "fields": fields})}
    parquet.write_table(pa.table({"a": [1]}).replace_schema_metadata(marks), tmp_path / "t.parquet")
    with pytest.raises(NeedsSparkError, match=r"'a' .* is interval day to second"):
        read_small(str(tmp_path / "t.parquet"), format=None, options={})


def test_text_of_another_kind_is_left_to_spark(tmp_path: Path) -> None:
    """Other programs write enumerations, which Arrow reads as bytes; Arrow itself cannot write them."""
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"a": ["x"]}), path, store_schema=False)
    text, enumeration = bytes.fromhex("25004c1c000000"), bytes.fromhex("25084c4c000000")
    assert path.read_bytes().count(text) == 1
    path.write_bytes(path.read_bytes().replace(text, enumeration))
    assert parquet.read_table(path).schema.field("a").type == pa.binary()
    with pytest.raises(NeedsSparkError, match=r"'a' .* is ENUM"):
        read_small(str(path), format=None, options={})


def test_old_timestamps_are_read_from_files_of_spark(tmp_path: Path) -> None:
    """Spark writes timestamps as INT96 by default, as times with a zone, and dates of the calendar of today."""
    moments = [NOW + timedelta(microseconds=1), None, datetime(1, 1, 1, tzinfo=UTC)]
    table, path = pa.table({"n": [1, 2, 3], "a": pa.array(moments, pa.timestamp("us"))}), tmp_path / "t.parquet"

    def write(release: str) -> None:
        with parquet.ParquetWriter(path, table.schema, use_deprecated_int96_timestamps=True) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata({"org.apache.spark.version": release})

    write("4.3.0")
    found, _ = read_small(str(path), format=None, options={})
    assert found.column("a").type == pa.timestamp("us", "UTC")
    assert found.column("a").to_pylist() == moments
    write("3.0.0")
    with pytest.raises(NeedsSparkError, match=r"'a' .* is INT96, and not from Spark 4"):
        read_small(str(path), format=None, options={})


def test_times_out_of_range_are_left_to_spark(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"a": pa.array([1 << 62]).cast(pa.timestamp("ms"))}), path)
    with pytest.raises(NeedsSparkError, match="cannot be read by Arrow"):
        read_small(str(path), format=None, options={})


def test_a_parquet_file_that_is_large_in_memory_is_left_to_spark(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"a": pa.nulls(200_000, pa.int64())}), path)
    assert path.stat().st_size < 1_000_000
    with pytest.raises(NeedsSparkError, match="too large in memory, with 200,000 rows"):
        read_small(str(path), format=None, options={}, largest=1_000_000)
    assert read_small(str(path), format=None, options={}, largest=None)[0].num_rows == 200_000


def test_a_missing_file_is_not_called_a_pattern(tmp_path: Path) -> None:
    """With a Hadoop configuration, Spark may find the file in another file system."""
    with pytest.raises(NeedsSparkError, match=r"none\.csv is not on this machine$"):
        read_small(str(tmp_path / "none.csv"), format=None, options={})
    with pytest.raises(NeedsSparkError, match=r"\*\.csv is a pattern$"):
        read_small(str(tmp_path / "*.csv"), format=None, options={})


def test_the_folder_of_a_stream_is_left_to_spark(tmp_path: Path) -> None:
    """Its list of files leaves out those of attempts that failed."""
    (tmp_path / "_spark_metadata").mkdir()
    (tmp_path / "a.csv").write_text("a\n1")
    with pytest.raises(NeedsSparkError, match="was written by a streaming query, whose log"):
        read_small(str(tmp_path), format="csv", options={})


def test_a_folder_is_read_without_hidden_files(tmp_path: Path) -> None:
    folder = tmp_path / "t.csv"
    folder.mkdir()
    for name, data in (
        ("b", "a\n2"), ("_k=1", "a\n1"), ("_SUCCESS", "x"), (".crc", "x"), ("c._COPYING_", "x")
    ):  # fmt: skip
        (folder / name).write_text(data)
    found, size = read_small(str(folder), format=None, options={})
    assert found.column("a").to_pylist() == ["1", "2"]
    assert size == f"{folder} has 6 B"
    (folder / "day=1").mkdir()
    with pytest.raises(NeedsSparkError, match="has subfolders"):
        read_small(str(folder), format=None, options={})


def made(column: pa.Array, zone: str = "UTC", **columns: str) -> Messages:
    return messages(
        pa.table({"a": column, "wait": pa.array(["5m"] * len(column), pa.string())}), plan_of(**columns), zone_of(zone)
    )


@pytest.mark.parametrize(
    ("column", "columns", "reason"),
    [
        (pa.array(["28.11.2026"]), {"at_column": "a"}, "'28.11.2026', which is not a time in ISO 8601 .like 20"),
        (pa.array(["2026-11-28T13:05Z"]), {"at_column": "a"}, "'2026-11-28T13:05Z', which is not a time in ISO 8601"),
        (pa.array([1e22]), {"delay_column": "wait"}, "'a' has 1e.22, whose text depends on the release of Java"),
        (pa.array([1]), {"at_column": "a"}, "'a' is bigint, which is not a time"),
        (pa.array([1.5]), {"delay_column": "a"}, "'a' is double"),
        (pa.array([1 << 62]).cast(pa.timestamp("us")), {"at_column": "a"}, "'a' has times outside the years"),
        (pa.array([1]), {"delay_column": "wait", "body_column": "a"}, "'a' is bigint"),
        (pa.array([b"x"]), {"delay_column": "wait", "id_column": "a"}, "'a' is binary"),
    ],
)
def test_values_that_only_spark_can_convert_are_left_to_spark(
    column: pa.Array, columns: dict[str, str], reason: str
) -> None:
    with pytest.raises(NeedsSparkError, match=reason):
        made(column, **columns)


@pytest.mark.parametrize("columns", [{}, {"header_columns": ("a",)}])
@pytest.mark.parametrize("year", [1, 1900, 9999])
def test_a_time_whose_offset_is_uncertain_is_left_to_spark(year: int, columns: dict[str, tuple[str]]) -> None:
    """In 1900, the offset of Amsterdam had seconds, which Python writes and Java does not."""
    column = pa.array([datetime(year, 1, 1, tzinfo=UTC)], pa.timestamp("us", "UTC"))
    with pytest.raises(NeedsSparkError, match="'a' has times before 1972 or in 9999 in a zone other than UTC"):
        made(column, "Europe/Amsterdam", delay_column="wait", **columns)  # type: ignore[arg-type]  # fields by name
    found = made(column, delay_column="wait").columns["value"].to_pylist()
    assert found == [f'{{"a":"{year:04}-01-01T00:00:00.000Z"}}']


def test_a_time_zone_that_python_may_not_know_is_left_to_spark() -> None:
    for name in ("Mars/Olympus", "+02:00", "CET", "../etc"):
        with pytest.raises(NeedsSparkError, match="the time zone is "):
            zone_of(name)


def test_a_missing_column_is_an_error_of_its_own() -> None:
    with pytest.raises(InvalidColumnError, match="there is no column 'due': choose from a, wait"):
        made(pa.array(["x"]), at_column="due")


def test_an_empty_table_has_no_messages() -> None:
    found = survey(made(pa.array([], pa.string()), delay_column="wait"), now=NOW)
    assert (found.rows, found.checksum, found.first) == (0, 0, None)


def test_a_delay_of_a_key_that_ends_after_the_year_9999_is_too_late() -> None:
    """A key can wait until the year 9999, longer than a message in any delay infrastructure."""
    waits = pa.array([f"{7_970 * 365} d", "2922000 d"])
    table = pa.table({"k": ["a", "b"], "wait": waits})
    found = survey(messages(table, plan_of(delay_column="wait", key_column="k"), zone_of("UTC")), now=NOW)
    assert (found.too_late, found.invalid) == (1, 1)


def test_hashes_are_those_of_spark() -> None:
    """Taken from ``select hash(digest), xxhash64(digest)`` of Spark 4.3."""
    digests = ["0123456789abcdef0123456789abcdef", "f" * 32]
    assert parts_of([], 7) == []
    assert [parts_of([one], 1 << 31)[0] for one in digests] == HASHES
    assert [checksum_of([one]) for one in digests] == CHECKSUMS
    assert checksum_of(digests) == CHECKSUMS[0] ^ CHECKSUMS[1]


HASHES = [1_293_569_732, 1_062_050_660]
CHECKSUMS = [7_380_026_953_736_478_117, -8_271_296_653_305_210_072]


def test_the_modules_of_this_process_do_not_import_spark() -> None:
    program = (
        "import sys\n"
        "sys.modules['pyspark'] = None\n"
        "import bide.pipelines.schedule.small, bide.pipelines.plan.small, bide.pipelines.small_table\n"
        "import bide.pipelines.schedule.progress, bide.pipelines.engine, bide.cli.pipeline.commands\n"
        "import bide.pipelines.replay.small, bide.pipelines.replay.small_audit\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_dry_run_needs_neither_spark_nor_java(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("id,due\n1,2100-01-01T00:00:00Z\n2,2100-01-01 00:20Z\n3,2100-01-03\n")
    program = (
        "import sys\n"
        "sys.modules['pyspark'] = None\n"
        "from bide.cli.app import run\n"
        "sys.exit(run(['pipeline', 'schedule', 'rows.csv', '--to', 'orders', '--at-column', 'due', "
        "'--key-column', 'id', '--dry-run']))"
    )

    def dry_run() -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-c", program], env={"PATH": ""}, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr

    code, stdout, stderr = dry_run()
    assert (code, stdout) == (2, "")
    assert stderr == (
        "bide: Spark is missing: install bide[spark], and Java 17 or later; Spark is needed because the column 'due' "
        "has '2100-01-01 00:20Z', which is not a time in ISO 8601 (like 2026-12-24T18:00:00)\n"
    )
    path = tmp_path / "rows.csv"
    path.write_text(path.read_text().replace("00:20Z", "00:20"))
    code, stdout, stderr = dry_run()
    assert (code, stderr) == (0, "")
    first, due, *times, engine = stdout.splitlines()
    assert first == "3 messages to the queue orders on localhost:5672/; nothing was sent"
    assert due == "due from 2100-01-01 00:00:00 to 2100-01-03 00:00:00 UTC"
    assert [line.split()[2] for line in (times[0], times[-1])] == ["2", "1"]
    assert engine == "engine: this process, because rows.csv has 62 B"
