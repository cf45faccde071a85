"""Checks of tables and of Spark's installation before Spark starts."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from bide.cli.app import BAD_USAGE, run
from bide.errors import InvalidInputError
from bide.pipelines.formats import is_uri, reads_local_paths, refuse_missing, spark_uri

CONFIGURED = ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_CONF_DIR", "SPARK_HOME", "PYSPARK_GATEWAY_PORT")


@pytest.mark.parametrize("name", ["none.csv", "file.csv/below.csv", "none"])
def test_missing_local_sources_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file.csv").touch()
    refuse_missing(str(tmp_path / "file.csv"), None, reads_local_paths=True)
    refuse_missing(str(tmp_path), "parquet", reads_local_paths=True)
    with pytest.raises(InvalidInputError, match="does not exist: name a file or a folder of csv files"):
        refuse_missing(str(tmp_path / name), "csv", reads_local_paths=True)


@pytest.mark.parametrize(
    "source", ["file:/none/r.csv", "file:///none/r.csv", "hdfs:/none/r.csv", "s3a://none/r.csv", "/none/r*.csv"]
)
def test_sources_that_only_spark_can_resolve_are_accepted(source: str) -> None:
    """A scheme is one with a single slash too, as Hadoop prints it."""
    refuse_missing(source, None, reads_local_paths=True)
    refuse_missing("/none/r.csv", None, reads_local_paths=False)
    refuse_missing("none", "table", reads_local_paths=True)
    assert is_uri(source) == (not source.startswith("/"))


def test_a_name_too_long_for_the_file_system_is_left_to_spark() -> None:
    source = f"/{'x' * 300}.csv"
    with pytest.raises(OSError, match="File name too long"):
        Path(source).stat()
    refuse_missing(source, None, reads_local_paths=True)


def test_a_file_in_a_folder_without_permission_is_left_to_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may enter every folder, and these tests may run as root: so ``stat`` is replaced."""
    refused: list[Path] = []

    def refuse(path: Path, **_: bool) -> None:
        refused.append(path)
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refuse)
        refuse_missing("/other/r.csv", None, reads_local_paths=True)
    assert refused == [Path("/other/r.csv")]


@pytest.mark.parametrize(
    ("master", "configuration", "environment", "expected"),
    [
        (None, {}, {}, True),
        ("local[2]", {"spark.sql.shuffle.partitions": "2"}, {}, True),
        ("spark://shop.example:7077", {}, {}, False),
        ("sc://shop.example", {}, {}, False),
        ("local[2]", {"spark.hadoop.fs.defaultFS": "hdfs://shop.example"}, {}, False),
        # What lies there may name another file system.
        ("local[2]", {}, {"HADOOP_CONF_DIR": "/etc/hadoop"}, False),
        (None, {}, {"PYSPARK_GATEWAY_PORT": "1"}, False),
    ],
)
def test_local_paths_are_checked_only_when_spark_reads_this_machine(
    master: str | None,
    configuration: dict[str, str],
    environment: dict[str, str],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in CONFIGURED:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert reads_local_paths(master, configuration) == expected


@pytest.mark.parametrize(
    "command",
    [
        ("audit", "--into", "audit", "--engine", "spark"),
        ("plan", "--rate", "1/s", "--delay", "5m", "--engine", "spark"),
        ("replay", "--queue", "error", "--engine", "spark"),
        ("report", ".", "--engine", "spark"),
    ],
    ids=lambda command: command[0],
)
def test_without_spark_each_command_says_what_to_install(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run(["pipeline", *command]) == BAD_USAGE
    found = capsys.readouterr().err.replace("; Spark is needed because --engine spark was given", "")
    assert found == "bide: Spark is missing: install bide[spark], and Java 17 or later\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "packages"),
    [
        (("schedule", "x.csv", "--to", "orders", "--at-column", "due", "--dry-run"), "PyArrow is"),
        (("report", ".", "--engine", "local"), "PyArrow is"),
        (("audit", "--into", "audit", "--once", "--engine", "local"), "PyArrow is"),
    ],
    ids=["schedule", "report", "audit"],
)
def test_without_pyarrow_each_command_for_small_tables_says_what_to_install(
    command: tuple[str, ...], packages: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run(["pipeline", *command]) == BAD_USAGE
    assert capsys.readouterr().err == (
        f"bide: {packages} missing: install bide[pipeline], or bide[spark] and Java for large tables\n"
    )


def test_local_folders_become_file_uris_for_spark() -> None:
    assert spark_uri("/data/audit/", "messages") == "file:///data/audit/messages"
    assert spark_uri("audit") == f"file://{Path.cwd()}/audit"
    assert spark_uri("s3a://shop/audit/", "_state", "pending") == "s3a://shop/audit/_state/pending"
